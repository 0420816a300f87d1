"""The cache of photos through Ray Data and through whole runs: the same pixels, and nothing left behind."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import SETTINGS, SMALL, Head, Outcome
from tests.stores import s3_server, upload, use_s3
from tests.synthetic import make_dataset
from yolo_ray.data.cache import cache_file
from yolo_ray.data.packing import PackConfig, pack
from yolo_ray.data.records import load_records
from yolo_ray.data.room import CachePlace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STREAMS = """
import hashlib, json, sys
from dataclasses import replace
from contextlib import contextmanager
from pathlib import Path
import numpy as np
import ray
from yolo_ray.cluster.caching import cached, reading_of
from yolo_ray.augment.images import decode_photo, resize_photo
from yolo_ray.config.schema import AugmentConfig, PhotosConfig
from yolo_ray.data.pipeline import StreamLimits, eval_photos, train_photos
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.records import load_records

folder, *sources = sys.argv[1:]
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
blur = [{"transform": "Blur", "p": 0.5}]

def decoded(photo):
    # on the CPU what a device does with data.decode=gpu
    pixels = resize_photo(decode_photo("", photo.data), 64) if photo.shape is None else photo.pixels()
    square = np.full((64, 64, 3), 114, np.uint8)
    square[: pixels.shape[0], : pixels.shape[1]] = pixels
    return square

def digest(cache, cpus, *, source=sources[0], workers=1, transforms=blur, encoded=False):
    # of every sample, by step and slot, and of every photo of an evaluation
    total, warnings, samples = hashlib.sha256(), [], {}
    records = load_records(source, "train", max_bad=0)
    plan = Plan(records, seed=3, epochs=2, batch=5, imgsz=64, augment=AugmentConfig(close_mosaic=0))
    plan_handle, records_handle = ray.put(plan), ray.put(records)
    reading = reading_of(PhotosConfig(cache=cache, cache_dir=folder), 64, records)
    limits = StreamLimits(cpus, 1.0, 2**26, apart=cpus == 4)
    with cached(replace(reading, encoded=encoded), PhotosConfig(cache=cache)) as (reading, told):
        for slots in (slots_of(rank, workers, 5) for rank in range(workers)):
            for photos in train_photos(plan_handle, slots, range(-7, 6), transforms, reading, limits, warnings.append):
                for slot, number, photo in zip(slots, photos.ids, photos.photos, strict=True):
                    photo = decoded(photo) if encoded else photo
                    samples[photos.step, slot] = number.tobytes() + photo.tobytes()
        ids = np.arange(len(records))
        for ids, photos in eval_photos(records_handle, ids, reading, batch=4, limits=limits, warn=warnings.append):
            total.update(ids.tobytes() + photos.tobytes())
    assert len(samples) == 13 * 5
    for _, sample in sorted(samples.items()):
        total.update(sample)
    return [cache, cpus, total.hexdigest(), told, warnings]

rows = [digest(*case) for case in
        (("off", 1), ("off", 4), ("memory", 4), ("memory", 2), ("disk", 2), ("disk", 4), ("disk", 1))]
others = [digest("off", 4, source=source) for source in sources[1:]] + [digest("off", 2, workers=4)]
plain = [digest("off", 2, transforms=False, source=source, encoded=way) for source, way in
         ((sources[0], False), (sources[0], True), (sources[3], True))]
blocked = Path(folder) / "file"
blocked.touch()
folder = str(blocked)
rows.append(digest("disk", 2))

@contextmanager
def cached(reading, data):  # a node that joined later, which the driver never asked
    yield reading, []

rows.append(digest("disk", 2))
print(json.dumps([rows, others, plain]))
"""


def test_samples_depend_on_nothing_but_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache, in memory, on disk, cold and warm; one, two and four tasks; four workers; a folder, a pack, a store."""
    data = make_dataset(tmp_path / "data", train=13, val=5, size=(64, 96))
    pack(PackConfig(data=str(data), out=str(tmp_path / "pack")), lambda line: None)
    folder = tmp_path / "cache"
    with s3_server() as endpoint:
        loose = upload(endpoint, data.parent, "loose", bucket="loose-samples")
        packed = upload(endpoint, tmp_path / "pack", "packed", bucket="packed-samples")
        use_s3(monkeypatch, endpoint)
        sources = (
            data,
            tmp_path / "pack" / "data.yaml",
            f"{loose}/data.yaml",
            f"{packed}/data.yaml",
        )
        done = subprocess.run(
            [sys.executable, "-c", STREAMS, str(folder), *map(str, sources)],
            env={**os.environ, **SETTINGS}, cwd="/", text=True, capture_output=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, others, plain = json.loads(done.stdout.splitlines()[-1])
    assert len(others) == 4
    assert len({digest for _, _, digest, _, _ in plain}) == 1, "JPEGs for the device to decode"
    everything = rows + others
    assert len({digest for _, _, digest, _, _ in everything}) == 1
    late = rows.pop()[-1]
    assert [warnings for *_, warnings in rows] == [[]] * len(rows)
    assert len(late) in (1, 2) and "cannot be used" in late[0], "once from each stream at most"
    told = ["; ".join(text for _, text in sentences) for _, _, _, sentences, _ in rows]
    assert told[0] == "" and "filled as they are read" in told[2] and "filled as" in told[4]
    assert "there already" in told[5] and "cannot be used" in told[-1]
    assert len(list(folder.glob("*.photos"))) == 1
    assert not in_memory(data).exists()


def in_memory(data: Path, split: str = "train") -> Path:
    records = load_records(data, split, max_bad=0)  # pyright: ignore[reportArgumentType]
    file = cache_file(records, 64, fast_decode=False)
    return CachePlace("memory", (file,)).path_of(file)


def losses_of(run: Path) -> list[dict[str, str]]:
    rows = csv.DictReader((run / "results.csv").read_text().splitlines())
    return [{k: v for k, v in row.items() if k.startswith(("train/", "val/"))} for row in rows]


def test_a_run_is_the_same_with_a_cache_and_leaves_none_in_memory(
    trained: tuple[Path, Outcome, str], head: Head, data: Path
) -> None:
    """Under a name that exists, so it gets a number and leaves the first run as it was."""
    run, _, _ = trained
    before = (run / "result.json").read_bytes()
    outcome = head.run(
        "train", f"data={data}", f"project={run.parent}", "epochs=2", "cache=memory", "mlflow.enabled=false", *SMALL
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    assert "data.cache=memory: 0.2 MiB of resized photos" in outcome.stderr
    assert outcome.result["run"] == str(run.parent / "train2")
    assert losses_of(run) == losses_of(run.parent / "train2") != []
    assert (run / "result.json").read_bytes() == before
    assert not in_memory(data).exists() and not in_memory(data, "val").exists()
