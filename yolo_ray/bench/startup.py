"""From process start to the first replay, in parts: a process for each case, with an empty cache and a full one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from yolo_ray.bench.measure import Clock
from yolo_ray.bench.variants import (
    EAGER,
    GRAPH,
    GRAPH_COMPILE,
    Setting,
    Subject,
    build_variant,
    make_scene,
)
from yolo_ray.step.precision import set_kernels

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
LONGEST_S = 900
ROOT = Path(__file__).resolve().parents[2]


def startup_rows(setting: Setting, device: str, *, compile: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant and cache: seconds of import, build, first step, warm-up and capture.

    On a CPU there is no graph: the eager step is started instead.
    """
    variants = [GRAPH, GRAPH_COMPILE] if compile else [GRAPH]
    for variant in variants if device == "cuda" else [EAGER]:
        with tempfile.TemporaryDirectory(prefix="yolo_ray-cache-") as folder:
            for cache in ("cold", "warm"):
                row = setting.named() | {"variant": variant, "cache": cache}
                row |= _start(setting, device, variant, Path(folder))
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def _start(setting: Setting, device: str, variant: str, cache: Path) -> dict[str, Any]:
    """What a fresh process says of itself, or why it failed."""
    places = {name: str(cache / name.lower()) for name in CACHES}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | places | {"PYTHONPATH": os.pathsep.join(paths)}
    told = {"setting": asdict(setting), "device": device, "variant": variant, "begin": time.time()}
    command = [sys.executable, "-m", "yolo_ray.bench.startup", json.dumps(told)]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not ready after {LONGEST_S} s"}
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        lines = ended.stderr.strip().splitlines()
        return {"failed": lines[-1][:200] if lines else f"exit code {ended.returncode}"}
    return json.loads(ended.stdout.strip().splitlines()[-1])


def measure_birth(told: dict[str, Any]) -> dict[str, float]:
    """In the fresh process: seconds of each part since ``told["begin"]``, made-up photos not counted.

    Import is the interpreter, torch and the CUDA context; build imports Ultralytics too.
    """
    device = torch.device(told["device"])
    setting = Setting(**told["setting"])
    clock = Clock(device, steps=None, blocks=1)
    torch.zeros(1, device=device)
    clock.wait()
    parts = {"import_s": time.time() - told["begin"]}
    set_kernels(setting.precision, deterministic=setting.deterministic)
    scene = make_scene(setting, device)
    built: list[Subject] = []
    parts["build_s"] = clock.seconds(
        lambda: built.append(build_variant(told["variant"], setting, scene))
    )
    subject = built[0]
    parts["kernels_s"] = clock.seconds(subject.first)
    if told["variant"] != EAGER:
        parts["capture_s"] = clock.seconds(lambda: subject.call(0))
    parts["total_s"] = sum(parts.values())
    subject.close()
    return {name: round(value, 2) for name, value in parts.items()}


if __name__ == "__main__":
    print(json.dumps(measure_birth(json.loads(sys.argv[1]))))
