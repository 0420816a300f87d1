"""Blocks of photos are shared out among the CPUs from the first moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import SETTINGS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

# Two tasks that each wait for the other's file. Ray Data by itself runs one at a time for a second, so they never meet.
MEETING = """
import json, sys, time
from pathlib import Path
import numpy as np
import pyarrow as pa
import ray
from ray.data._internal.stats import get_or_create_stats_actor
from yolo_ray.data.pipeline import ChunkLimits, _blocks

folder = Path(sys.argv[1])
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)

class Meet:
    def __init__(self, number):
        self.place = folder / str(number)

    def __call__(self, rows):
        self.place.mkdir(exist_ok=True)
        (self.place / str(rows["id"][0])).touch()
        until = time.monotonic() + 0.8
        while len(list(self.place.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return rows | {"met": np.full(len(rows["id"]), len(list(self.place.iterdir())) == 2)}

met = []
for number in range(6):  # the first ones start processes
    blocks = _blocks(2, 1, ChunkLimits(2, 1.0), Meet(number))
    met.append(all(ray.get(block)["met"][0].as_py() for block in blocks))
seen = ray.get(get_or_create_stats_actor().get_datasets.remote())
print(json.dumps([met, len(seen)]))
"""


def test_a_short_chunk_uses_all_cpus_and_many_are_one_dataset(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEETING, str(tmp_path)],
        env={**os.environ, **SETTINGS}, cwd="/", text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    met, datasets = json.loads(done.stdout.splitlines()[-1])
    assert any(met), met
    assert datasets == 1, "Ray keeps what it knows of each dataset for ever"
