"""Times training steps side by side: Ultralytics eager, ours eager, ours as one graph, the graph compiled."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._autograd import (
    DeviceType,  # what the profiler gives; torch has no public name for it
)

from yolo_ray.augment.device import augment
from yolo_ray.bench.options import CPU_CASES, GPU_CASES, BenchConfig, split_case
from yolo_ray.bench.rival import Rival
from yolo_ray.bench.scene import make_batches, make_records
from yolo_ray.data.batch import Batch
from yolo_ray.errors import UserError
from yolo_ray.model.build import build_detector
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.build import build_step
from yolo_ray.step.graph import GraphedStep, Step
from yolo_ray.step.precision import resolve_precision, set_kernels
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions

WARM_UP = {"cuda": 8, "cpu": 1}
CONTROLS = Controls(lr=1e-3, lr_bias=1e-3, momentum=0.9, weight_decay=5e-4, ema_decay=0.99)
COLUMNS = {
    "model": "model", "batch": "batch", "variant": "variant", "step_ms": "step ms", "spread": "min-max",
    "kernel_ms": "kernel ms", "launches": "launches", "images_per_s": "images/s", "peak_gib": "peak GiB",
    "ready_s": "ready s", "ratio": "x Ultralytics",
}  # fmt: skip
Row = dict[str, Any]


def compare(config: BenchConfig) -> dict[str, Any]:
    """Run the benchmark, write ``step.json`` and ``step.md``, return rows and conditions.

    Raises:
        UserError: device="cuda" without a GPU.
    """
    device = _device(config)
    precision = resolve_precision(config.precision, device)
    set_kernels(precision, deterministic=config.deterministic)
    rows: list[Row] = []
    for case in config.cases or (GPU_CASES if device.type == "cuda" else CPU_CASES):
        rows += _Case(config, device, precision, *split_case(case)).rows()
    result = {"conditions": _conditions(config, device, precision), "rows": rows}
    _write(Path(config.out), result)
    _print(result)
    return result


class _Case:
    """One model at one batch size."""

    def __init__(
        self, config: BenchConfig, device: torch.device, precision: str, model: str, batch: int
    ) -> None:
        self.config, self.device, self.precision = config, device, precision
        self.model, self.batch = model, batch
        self.is_gpu = device.type == "cuda"
        self.imgsz = config.imgsz or (640 if self.is_gpu else 160)
        self.names = make_records(1).names
        self.batches = make_batches(batch, self.imgsz, config.boxes, device)

    def rows(self) -> list[Row]:
        """A row for each variant; ratios are those of the medians."""
        wanted = {"ultralytics": self.config.rival, "eager": self.config.eager or not self.is_gpu}
        wanted |= {"graph": self.is_gpu, "graph+compile": self.is_gpu and self.config.compile}
        rows = [self._row(variant) for variant, is_wanted in wanted.items() if is_wanted]
        rival = next((row["step_ms"] for row in rows if row["variant"] == "ultralytics"), None)
        for row in rows:
            row["ratio"] = round(rival / row["step_ms"], 2) if rival else None
        return rows

    def _row(self, variant: str) -> Row:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        # Ultralytics does not ask cuDNN to measure its kernels, and is not slowed down by it here.
        torch.backends.cudnn.benchmark = not self.config.deterministic and variant != "ultralytics"
        call, close = self._rival() if variant == "ultralytics" else self._ours(variant)
        call(0)
        self._wait()
        ready_s = time.perf_counter() - begin
        for number in range(WARM_UP[self.device.type]):
            call(number)
        times = self._times(call)
        row: Row = {
            "model": self.model.removesuffix(".yaml"),
            "batch": self.batch,
            "variant": variant,
            "step_ms": round(statistics.median(times), 3),
            "spread": f"{min(times):.2f}-{max(times):.2f}",
            "images_per_s": round(self.batch / statistics.median(times) * 1e3, 1),
            "ready_s": round(ready_s, 1),
        }
        if self.is_gpu:
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            row |= profile(call, top=self.config.profile, title=f"{self.model} {variant}")
        close()
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    def _times(self, call: Callable[[int], None]) -> list[float]:
        """Milliseconds a step of every block."""
        steps = self.config.steps or (30 if self.is_gpu else 2)
        times = []
        for _ in range(self.config.blocks):
            self._wait()
            begin = time.perf_counter()
            for number in range(steps):
                call(number)
            self._wait()
            times.append((time.perf_counter() - begin) / steps * 1e3)
        return times

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def _ours(self, variant: str) -> tuple[Callable[[int], None], Callable[[], None]]:
        options = StepOptions(
            batch=self.batch, imgsz=self.imgsz, gains=(7.5, 0.5, 1.5), clip_norm=10.0,
            optimizer=self.config.optimizer, momentum=0.9, precision=self.precision,
            compile="model" if variant.endswith("compile") else "off",
        )  # fmt: skip
        detector = build_detector(self.model, self.names, imgsz=self.imgsz, seed=0)
        step = build_step(detector.to(self.device).train(), options)
        graphed = GraphedStep(step, mode="require" if variant.startswith("graph") else "off")
        return lambda number: run_step(
            graphed, self.batches[number % len(self.batches)]
        ), graphed.release

    def _rival(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        detector = build_detector(self.model, self.names, imgsz=self.imgsz, seed=0).to(self.device)
        pairs: list[tuple[Tensor, Batch]] = [(augment(b).byte(), b) for b in self.batches]
        return Rival(detector, pairs, bf16=self.precision == "bf16"), lambda: None


def run_step(step: Step, batch: Batch) -> None:
    """One step with an update, as the training loop calls it."""
    step.set_controls(CONTROLS, head_gains_at(0, 100, step.num_heads))
    step(batch, update=True)


def profile(call: Callable[[int], None], *, top: int, title: str, steps: int = 3) -> Row:
    """Milliseconds of kernels and the host's launches in one step; prints the ``top`` kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profiler:
        warnings.simplefilter("ignore")
        for number in range(steps):
            call(number)
        torch.cuda.synchronize()
    launches, kernels = 0, {}
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.key] = (event.self_device_time_total / 1e3 / steps, event.count // steps)
        elif "Launch" in event.key or "MemcpyAsync" in event.key or "MemsetAsync" in event.key:
            launches += event.count
    if top:
        print(f"--- {title}: {sum(n for _, n in kernels.values())} kernels", file=sys.stderr)
        for key, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:top]:
            print(f"{ms:8.3f} ms {count:5d} x {key[:110]}", file=sys.stderr)
    return {
        "kernel_ms": round(sum(ms for ms, _ in kernels.values()), 3),
        "launches": round(launches / steps),
    }


def _device(config: BenchConfig) -> torch.device:
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise UserError(
            "device=cuda, but torch sees no GPU: use device=auto or install the CUDA build of torch"
        )
    return torch.device("cuda" if found and config.device != "cpu" else "cpu")


def _conditions(config: BenchConfig, device: torch.device, precision: str) -> Row:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "precision": precision,
        "imgsz": config.imgsz or (640 if device.type == "cuda" else 160),
        "boxes": config.boxes,
        "optimizer": config.optimizer,
        "deterministic": config.deterministic,
        "blocks": config.blocks,
    }


def _write(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [", ".join(f"{key} {value}" for key, value in result["conditions"].items()), ""]
    lines += [f"| {' | '.join(COLUMNS.values())} |", "|" + " --- |" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in result["rows"]]
    (folder / "step.md").write_text("\n".join(lines) + "\n")


def _print(result: dict[str, Any]) -> None:
    table = Table(
        *COLUMNS.values(), title=", ".join(f"{k} {v}" for k, v in result["conditions"].items())
    )
    for row in result["rows"]:
        table.add_row(*_cells(row))
    Console(stderr=True, width=160).print(table)


def _cells(row: Row) -> list[str]:
    values = [row.get(key) for key in COLUMNS]
    return ["" if value is None else str(value) for value in values]
