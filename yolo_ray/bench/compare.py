"""Times training steps side by side: Ultralytics and ours, eager, as one graph, compiled."""

from __future__ import annotations

import gc
import itertools
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from yolo_ray.bench.cost import Cost, count_cost, shares
from yolo_ray.bench.measure import Clock, profile
from yolo_ray.bench.options import CPU_CASES, GPU_CASES, BenchConfig, split_case
from yolo_ray.bench.ratios import Row, add_ratios
from yolo_ray.bench.startup import startup_rows
from yolo_ray.bench.static import static_rows
from yolo_ray.bench.sweep import draw_sweep
from yolo_ray.bench.table import RESULT, show, write
from yolo_ray.bench.variants import (
    EAGER,
    GRAPH,
    GRAPH_COMPILE,
    ULTRALYTICS,
    ULTRALYTICS_COMPILE,
    Scene,
    Setting,
    build_variant,
    make_scene,
)
from yolo_ray.errors import EXIT_FAILURE, StopRequested, UserError
from yolo_ray.step.precision import resolve_precision, set_kernels


def compare(config: BenchConfig) -> dict[str, Any]:
    """Run the benchmark; write ``step.json`` and ``step.md`` after every case; return rows and conditions.

    A variant that fails is a row with its reason.

    Raises:
        UserError: device="cuda" without a GPU, no precision that this device has, an unknown model, or a folder that
            cannot be written.
        StopRequested: Ctrl-C or SIGTERM; the settings that were measured are kept.
    """
    bench = _Bench(config)
    folder = _new_folder(Path(config.out))
    result: dict[str, Any] = {"conditions": bench.conditions(), "rows": [], "sweep": []}
    try:
        _measure(bench, folder, result)
    except (KeyboardInterrupt, StopRequested) as stop:
        raise StopRequested(f"stopped; what was measured before is in {folder}") from stop
    write(folder, result)
    show(result)
    return result | {"folder": str(folder)} | _verdict(result)


def _measure(bench: _Bench, folder: Path, result: dict[str, Any]) -> None:
    """Everything that is asked for, one section after the other."""
    config = bench.config

    def keep(section: str, rows: Sequence[Row]) -> None:
        result.setdefault(section, []).extend(rows)
        write(folder, result)

    if config.table:
        for case in bench.cases:
            bench.time_case(case, lambda rows: keep("rows", rows))
    if config.sweep:
        for rows in bench.sweep():
            keep("sweep", rows)
            draw_sweep(result["sweep"], folder / "sweep.png")
    first = bench.settings(bench.cases[0])[0]
    if config.static_assignment:
        steps = config.static_steps or (200 if bench.is_gpu else 12)
        keep("static", bench.static_rows(first, steps))
    if config.startup:
        for row in startup_rows(first, bench.device.type, compile=config.compile):
            keep("startup", [row])


def _verdict(result: dict[str, Any]) -> Row:
    """A benchmark that measured nothing has failed; one that lost some variants has not."""
    rows = [row for section in result.values() if isinstance(section, list) for row in section]
    return {} if any("failed" not in row for row in rows) else {"exit": EXIT_FAILURE}


def _new_folder(wanted: Path) -> Path:
    """The folder, or the next free number appended where it holds an earlier result.

    Raises:
        UserError: it cannot be written.
    """
    folder = wanted
    for number in itertools.count(2):
        if not (folder / RESULT).exists():
            break
        folder = wanted.with_name(f"{wanted.name}{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).touch()
    except OSError as error:
        raise UserError(
            f"out={wanted} cannot be written ({error.strerror}): name a folder that is yours"
        ) from error
    return folder


class _Bench:
    """What every case shares: the device, the clock and the precisions."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.device = _device(config)
        self.is_gpu = self.device.type == "cuda"
        self.gpu = torch.cuda.get_device_name() if self.is_gpu else ""
        self.clock = Clock(self.device, config.steps, config.blocks)
        self.cases = config.cases or (GPU_CASES if self.is_gpu else CPU_CASES)
        self.imgsz = config.imgsz or (640 if self.is_gpu else 160)
        self.precisions = _precisions(config.precision, self.device)
        models = {split_case(case)[0] for case in self.cases}
        self.costs = {model: _cost_of(model, self.imgsz) for model in models}

    def settings(self, case: str) -> list[Setting]:
        """Every optimizer and precision of a case."""
        model, batch = split_case(case)
        shared = (model, batch, self.imgsz, self.config.boxes)
        return [
            Setting(*shared, precision, optimizer, self.config.deterministic)
            for optimizer in self.config.optimizer
            for precision in self.precisions
        ]

    def time_case(self, case: str, keep: Callable[[Sequence[Row]], None]) -> None:
        """Hand ``keep`` the rows of one setting after the other."""
        settings = self.settings(case)
        variants = self._variants()
        scene, failed = self._scene(settings[0])
        for setting in settings:
            rows = self._rows(setting, scene, variants) if scene else []
            keep(rows or _failed_rows(setting, variants, failed))

    def sweep(self) -> Iterator[list[Row]]:
        """Yields rows of the first case's model by batch size; a variant that failed is not tried at a larger one."""
        config = self.config
        wanted = {ULTRALYTICS: config.rival, EAGER: True, GRAPH: self.is_gpu}
        variants = [variant for variant, is_wanted in wanted.items() if is_wanted]
        model, _ = split_case(self.cases[0])
        batch = 1
        while batch <= config.sweep_max and variants:
            setting = self.settings(f"{model}:{batch}")[0]
            scene, failed = self._scene(setting)
            rows = self._rows(setting, scene, variants) if scene else []
            yield rows or _failed_rows(setting, variants, failed)
            alive = {row["variant"] for row in rows if "step_ms" in row}
            variants = [variant for variant in variants if variant in alive]
            batch *= 2

    def static_rows(self, setting: Setting, steps: int) -> Sequence[Row]:
        """The exact and the frozen assignment, or why that failed."""
        found: list[Row] = []
        failed = _attempt(lambda: found.extend(static_rows(setting, self.clock, steps)))
        return found or [setting.named() | failed]

    def conditions(self) -> Row:
        """What the numbers depend on."""
        return {
            "date": time.strftime("%Y-%m-%d"),
            "device": self.gpu or f"CPU, {torch.get_num_threads()} threads",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ultralytics": metadata.version("ultralytics"),
            "imgsz": self.imgsz,
            "boxes": self.config.boxes,
            "deterministic": self.config.deterministic,
            "blocks": self.config.blocks,
        }

    def _variants(self) -> list[str]:
        config = self.config
        wanted = {
            ULTRALYTICS: config.rival,
            ULTRALYTICS_COMPILE: config.rival and config.compile,
            EAGER: config.eager or not self.is_gpu,
            GRAPH: self.is_gpu,
            GRAPH_COMPILE: self.is_gpu and config.compile,
        }
        return [variant for variant, is_wanted in wanted.items() if is_wanted]

    def _scene(self, setting: Setting) -> tuple[Scene | None, Row]:
        made: list[Scene] = []
        failed = _attempt(lambda: made.append(make_scene(setting, self.device)))
        return (made[0] if made else None), failed

    def _rows(self, setting: Setting, scene: Scene, variants: Sequence[str]) -> list[Row]:
        """A row for each variant, compared with each other."""
        set_kernels(setting.precision, deterministic=setting.deterministic)
        rows = []
        for variant in variants:
            row = setting.named() | {"variant": variant}
            row |= _attempt(
                lambda row=row, variant=variant: self._time(row, variant, setting, scene)
            )
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
        add_ratios(rows)
        return rows

    def _time(self, row: Row, variant: str, setting: Setting, scene: Scene) -> None:
        """Build a variant, measure it and write what was found into its row."""
        is_ours = variant not in (ULTRALYTICS, ULTRALYTICS_COMPILE)
        memory = _Memory(scene.ring_bytes if is_ours else 0) if self.is_gpu else None
        clock, built = self.clock, []
        build_s = clock.seconds(lambda: built.append(build_variant(variant, setting, scene)))
        with closing(built.pop()) as subject:
            kernels_s = clock.seconds(subject.first)
            has_graph = variant.startswith(GRAPH)
            capture_s = clock.seconds(lambda: subject.call(0)) if has_graph else 0.0
            times = clock.blocks_ms(subject.call)
            step_ms = statistics.median(times)
            row |= {
                "step_ms": round(step_ms, 3),
                "spread": f"{min(times):.2f}-{max(times):.2f}",
                "images_per_s": round(setting.batch / step_ms * 1e3, 1),
                "host_ms": round(clock.host_ms(subject.call), 3),
                "build_s": round(build_s, 2),
                "kernels_s": round(kernels_s, 2),
                "start_s": round(build_s + kernels_s + capture_s, 2),
            }
            row |= {"capture_s": round(capture_s, 2)} if has_graph else {}
            cost = self.costs[setting.model]
            row |= shares(cost, self.gpu, setting.precision, (setting.batch, step_ms))
            if memory:
                row |= memory.taken()
                found = profile(
                    subject.call, top=self.config.profile, title=f"{setting.model} {variant}"
                )
                row |= found | {"wall_ratio": round(step_ms / max(found["kernel_ms"], 1e-6), 2)}


class _Memory:
    """What a variant takes of the GPU, beside what was there before; ``own_bytes`` of that are its own."""

    def __init__(self, own_bytes: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.others = torch.cuda.memory_allocated() - own_bytes

    def taken(self) -> Row:
        """GiB that tensors took at most, and that the allocator holds now."""
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        return {
            "peak_gib": round((peak - self.others) / 2**30, 2),
            "reserved_gib": round((reserved - self.others) / 2**30, 2),
        }


def _attempt(measure: Callable[[], object]) -> Row:
    """Call it; nothing, or the reason why it failed, with the traceback on stderr.

    One variant that runs out of memory or does not compile must not cost the others their rows.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        measure()
        return {}
    except StopRequested:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
        traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed step
        return {"failed": reason}


def _cost_of(model: str, imgsz: int) -> Cost | None:
    """None where it cannot be counted.

    Raises:
        UserError: an unknown model, told before anything is measured.
    """
    try:
        return count_cost(model, imgsz)
    except (NotImplementedError, RuntimeError) as error:  # a layer without a rule for meta tensors
        print(f"operations of {model} are not counted: {error}", file=sys.stderr)
        return None


def _failed_rows(setting: Setting, variants: Sequence[str], failed: Row) -> list[Row]:
    return [setting.named() | {"variant": variant} | failed for variant in variants]


def _precisions(wanted: Sequence[str], device: torch.device) -> list[str]:
    """With ``auto`` decided, each once.

    Raises:
        UserError: the device or the step has none of them.
    """
    chosen, refused = [], []
    for precision in wanted:
        try:
            chosen.append(resolve_precision(precision, device))
        except UserError as error:  # Ultralytics may have it, and ours gets a row that says this
            refused.append(error)
            chosen.append(precision)
    if len(refused) == len(wanted):
        raise refused[0]
    return list(dict.fromkeys(chosen))


def _device(config: BenchConfig) -> torch.device:
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise UserError(
            "device=cuda, but torch sees no GPU: use device=auto or install the CUDA build of torch"
        )
    return torch.device("cuda" if found and config.device != "cpu" else "cpu")
