"""Train ours and Ultralytics with the same options on the same photos; judge both with our evaluator.

    python benchmarks/accuracy.py --data PATH/data.yaml --out docs/benchmarks/accuracy.json \
        --seeds 0 1 --options epochs=60 imgsz=320 batch=16 -- cluster.workers=2

``--options`` go to both, what follows ``--`` to ours alone. The photos are copied first, since Ultralytics
writes cache files beside the labels. ``--trainers`` may name ``eager`` too, ours with
``graph.mode=off``. Wall times of trainings that run side by side say little: this is about accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from arguments import command_line

# Left out: its check of amp, for which it would download a model, and the copy of its table in the weights file,
# which needs polars.
ULTRALYTICS = """
import json, sys
from ultralytics import YOLO
from ultralytics.engine import trainer
trainer.check_amp = lambda model: True
trainer.BaseTrainer.read_results_csv = lambda self: {}
options = json.loads(sys.argv[1])
YOLO(options.pop("model")).train(**options)
"""
EAGER = "eager"  # ours without a graph


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ``ours`` holds what follows ``--``."""
    parser, own, rest = command_line(__doc__, argv)
    parser.add_argument("--model", default="yolo11n.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--trainers", nargs="+", default=["ours", "theirs"])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--theirs", nargs="*", default=["workers=2"], help="for Ultralytics alone")
    arguments = parser.parse_args(own)
    arguments.ours = rest
    arguments.data = arguments.data.resolve()
    root = arguments.data.parent
    spec = yaml.safe_load(arguments.data.read_text())
    if not (root / (spec.get("path") or ".")).resolve().is_relative_to(root):
        parser.error(
            f"{arguments.data}: path: leads out of {root}, and only that folder is copied for Ultralytics"
        )
    return arguments


def last_json(command: list[str], log: Path, cwd: Path | None = None) -> dict[str, Any]:
    """Run a command, keep its output, and return the JSON of its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"{command[2:4]} failed, see {log}:\n{done.stderr[-2000:]}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def train_ours(arguments: argparse.Namespace, seed: int, folder: Path, kind: str = "ours") -> Path:
    """The best weights of our run."""
    command = [
        sys.executable,
        "-m",
        "pipelines.train",
        f"data={arguments.data}",
        f"model={arguments.model}",
    ]
    command += [*arguments.options, *arguments.ours]
    command += [f"seed={seed}", f"project={folder}/{kind}{seed}"]
    if kind == EAGER:
        command.append("graph.mode=off")
    return Path(last_json(command, folder / f"{kind}{seed}.log")["weights"])


def train_eager(arguments: argparse.Namespace, seed: int, folder: Path) -> Path:
    """The best weights of our run without a graph."""
    return train_ours(arguments, seed, folder, EAGER)


def train_theirs(arguments: argparse.Namespace, seed: int, folder: Path) -> Path:
    """The best weights of Ultralytics' run."""
    copy = folder / f"photos{seed}"
    shutil.copytree(arguments.data.parent, copy)
    data = copy / arguments.data.name
    data.chmod(0o644)
    # Ultralytics takes a relative `path` as relative to its own settings, not to the file.
    lines = [line for line in data.read_text().splitlines() if not line.startswith("path:")]
    data.write_text("\n".join([f"path: {copy}", *lines]) + "\n")
    given = dict(option.split("=", 1) for option in [*arguments.options, *arguments.theirs])
    options: dict[str, Any] = {"amp": False}
    options |= {name: number_of(value) for name, value in given.items()}
    options |= {"model": arguments.model, "data": str(data), "seed": seed}
    options |= {"project": str(folder), "name": f"theirs{seed}", "plots": False, "verbose": False}
    command = [sys.executable, "-c", ULTRALYTICS, json.dumps(options)]
    last_json(command, folder / f"theirs{seed}.log", copy)  # it writes an mlflow.db where it runs
    return folder / f"theirs{seed}" / "weights" / "best.pt"


def number_of(text: str) -> Any:
    """An option's value: JSON if it is, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def judge(arguments: argparse.Namespace, weights: Path, log: Path) -> dict[str, float]:
    """Our evaluator's numbers for a weights file."""
    imgsz = [option for option in arguments.options if option.startswith("imgsz=")]
    command = [
        sys.executable,
        "-m",
        "pipelines.evaluate",
        f"weights={weights}",
        f"data={arguments.data}",
        *imgsz,
        "cluster.cpus_per_worker=1",
        "data_cpus=1",
    ]
    result = last_json(command, log)
    return {name: result[name] for name in ("map50", "map50_95")}


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean of each number by trainer."""
    kinds = dict.fromkeys(row["trainer"] for row in rows)
    return {
        f"mean_{name}": {
            kind: statistics.mean(row[name] for row in rows if row["trainer"] == kind)
            for kind in kinds
        }
        for name in ("map50", "map50_95")
    }


def main(argv: list[str]) -> int:
    """Train, judge, write and print the table."""
    arguments = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="accuracy-"))
    jobs = [(kind, seed) for seed in arguments.seeds for kind in arguments.trainers]
    trainers = {"ours": train_ours, EAGER: train_eager, "theirs": train_theirs}

    def work(job: tuple[str, int]) -> dict[str, Any]:
        kind, seed = job
        begin = time.perf_counter()
        weights = trainers[kind](arguments, seed, folder)
        seconds = round(time.perf_counter() - begin, 1)
        numbers = judge(arguments, weights, folder / f"judge_{kind}{seed}.log")
        row = {"trainer": kind, "seed": seed, **numbers, "train_s": seconds}
        print(json.dumps(row), flush=True)
        return row

    rows: list[dict[str, Any]] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"logs and runs are in {folder} until all went well", file=sys.stderr)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(work, jobs):  # written as they come: the next one may fail
            rows.append(row)
            result = {
                "command": " ".join(argv),
                "cpus": os.cpu_count(),
                "rows": rows,
                **means(rows),
            }
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)
    print(arguments.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
