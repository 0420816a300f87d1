"""Whole epochs, ours and Ultralytics' with the same options on the same photos, one after the other on one card.

    python benchmarks/epochs.py --data PATH/data.yaml --out epochs.json --cases yolo11n.yaml:16 --photos 1640 \
        --options imgsz=640 --theirs workers=16 amp=true device=0 -- data.cache=off

The training photos are repeated (as files of their own) up to ``--photos``. An epoch lasts from one line of
results.csv to the next: steps, checkpoint and the start of the next one, without the validation, which is off.
The first epoch and the last, which is validated, do not count; the median of the rest does. GPU utilisation is the
mean of what NVML says during those epochs, sampled ten times a second, alike for both. ``--trainers`` may name
``cached`` too, ours with ``data.cache=memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from accuracy import ULTRALYTICS, number_of
from arguments import command_line

from yolo_ray.data.formats import label_path

FIRST, POLL_S = 1, 0.02


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ``ours`` holds what follows ``--``."""
    parser, own, rest = command_line(__doc__, argv)
    parser.add_argument("--photos", type=int, default=1640)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=["yolo11n.yaml:16"], help="model:batch")
    parser.add_argument("--trainers", nargs="+", default=["theirs", "ours"])
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--theirs", nargs="*", default=["workers=2"], help="for Ultralytics alone")
    arguments = parser.parse_args(own)
    arguments.ours = rest
    return arguments


def repeat_photos(data: Path, folder: Path, count: int) -> Path:
    """A data set in ``folder`` whose training part has at least ``count`` photos: the given ones again and again."""
    spec = yaml.safe_load(data.read_text())
    root = data.parent / (spec.get("path") or ".")
    for split in ("train", "val"):
        photos = sorted(path for path in (root / spec[split]).iterdir() if path.is_file())
        for part in ("images", "labels"):
            (folder / part / split).mkdir(parents=True)
        times = -(-count // len(photos)) if split == "train" else 1
        for number in range(times):
            for photo in photos:
                name = f"{number}_{photo.name}"
                shutil.copyfile(photo, folder / "images" / split / name)
                label = Path(label_path(str(photo)))
                if label.is_file():
                    shutil.copyfile(label, (folder / "labels" / split / name).with_suffix(".txt"))
    spec |= {"path": str(folder), "train": "images/train", "val": "images/val"}
    out = folder / "data.yaml"
    out.write_text(yaml.safe_dump(spec))
    return out


def utilization() -> int | None:
    """What NVML says now, percent; None without a GPU."""
    return torch.cuda.utilization() if torch.cuda.is_available() else None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it started; nothing if it has ended."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def watch(command: list[str], folder: Path, rows: int) -> dict[str, Any]:
    """Run a training until its results.csv has ``rows`` lines; times between them, and utilisation meanwhile."""
    folder.mkdir(parents=True)
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        times: list[float] = []
        samples: list[int] = []
        next_sample = begin = time.perf_counter()
        try:
            while len(times) < rows and process.poll() is None:
                time.sleep(POLL_S)
                now = time.perf_counter()
                table = next(folder.rglob("results.csv"), None)
                lines = table.read_text().count("\n") - 1 if table else 0
                times += [now] * (lines - len(times))
                if now < next_sample or len(times) < FIRST or (used := utilization()) is None:
                    continue
                samples.append(used)
                next_sample = now + 0.1
        finally:
            stop(process)
    if len(times) < rows:
        raise RuntimeError(f"{command[1:3]} failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    gaps = [
        after - before for before, after in zip(times[FIRST - 1 :], times[FIRST:], strict=False)
    ]
    return {
        "epoch_s": [round(gap, 3) for gap in gaps],
        "first_epoch_done_s": round(times[0] - begin, 1),
        "utilization": round(statistics.mean(samples) / 100, 3) if samples else None,
    }


def run(
    trainer: str, case: str, data: Path, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    model, batch = case.rsplit(":", 1)
    shared = {"epochs": str(arguments.epochs), "batch": batch, "val": "false", "close_mosaic": "0"}
    shared |= dict(option.split("=", 1) for option in arguments.options)
    if trainer == "theirs":
        theirs = dict(option.split("=", 1) for option in arguments.theirs)
        options: dict[str, Any] = {
            name: number_of(value) for name, value in (shared | theirs).items()
        }
        options |= {"model": model, "data": str(data), "plots": False, "verbose": False}
        options |= {"project": str(folder), "name": "train"}
        command = [sys.executable, "-c", ULTRALYTICS, json.dumps(options)]
    else:
        options = shared | {"model": model, "data": str(data), "project": str(folder)}
        given = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "pipelines.train", *given, *arguments.ours]
        command += ["data.cache=memory"] if trainer == "cached" else []
    row = {"case": case, "trainer": trainer, **watch(command, folder, arguments.epochs - 1)}
    photos = len(list((data.parent / "images" / "train").iterdir()))
    row["images_per_s"] = round(photos / statistics.median(row["epoch_s"]), 1)
    return row


def main(argv: list[str]) -> int:
    """Run all cases, print and write the rows."""
    arguments = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="epochs-") as temporary:
        folder = Path(temporary)
        data = repeat_photos(arguments.data.resolve(), folder / "photos", arguments.photos)
        for case in arguments.cases:
            for trainer in arguments.trainers:
                place = folder / f"{trainer}-{case.replace(':', '-')}"
                row = run(trainer, case, data, place, arguments)
                tables = list(place.rglob("results.csv"))
                if trainer != "theirs":
                    row["results_csv"] = tables[0].read_text().splitlines()
                    row["log"] = [
                        line
                        for line in (place / "log.txt").read_text().splitlines()
                        if "CPU" in line
                    ]
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if k != "results_csv"}), flush=True)
                result = {"command": " ".join(argv), "cpus": os.cpu_count(), "rows": rows}
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
