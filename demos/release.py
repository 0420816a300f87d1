"""From training to a served champion on this machine, every step a Ray job: make demo.

    python -m demos.release [--data datasets/trees/data.yaml] [--out runs/demo] [--only train,register] [--wait]

Train, search, register (the first champion), train better, register (promoted), train worse, register (refused), and
predict by the alias; some fifteen minutes on two cores. Nets this small learn little: what is shown is the way, not a
detector. ``--wait`` leaves Ray and MLflow running until Ctrl-C, to look at them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from demos.services import ROOT, DemoFailed, Services, services

NAME = "tree-detector"
TINY = ("model=yolo11n.yaml", "imgsz=160", "batch=13", "nbs=13", "val_batch=8", "cluster.workers=1")
# Two of four photos differ in latency by more than a tenth on a machine that does other things besides.
GATE = (f"name={NAME}", "max_latency=2", "max_class_drop=0.05", "cluster.workers=1", "val_batch=8")


@dataclass(frozen=True)
class Step:
    """A pipeline, its options, and what its last JSON line must say."""

    name: str
    pipeline: str
    options: tuple[str, ...]
    check: Callable[[dict[str, Any]], bool] = lambda result: result["exit"] == 0


def steps(out: Path, data: Path, mlflow: str) -> list[Step]:
    """The way of three models."""
    here = (f"data={data}", f"project={out}", f"mlflow.uri={mlflow}")

    def train(name: str, *options: str) -> Step:
        return Step(f"train-{name}", "train", (f"name={name}", *here, *TINY, *options))

    def register(run: str, exit_code: int) -> Step:
        options = (f"run={out / run}", f"mlflow.uri={mlflow}", *GATE)
        return Step(
            f"register-{run}", "register", options, lambda result: result["exit"] == exit_code
        )

    search = ("num_samples=3", "max_concurrent=1", "space.lr0={loguniform: [1e-3, 1e-1]}")
    return [
        train("first", "epochs=3"),
        Step("tune", "tune", ("name=study", *here, *TINY, "epochs=2", *search)),
        register("first", 0),
        train("better", "epochs=25", "val_period=5"),
        register("better", 0),
        train("worse", "epochs=1"),
        register("worse", 3),
        Step("predict", "predict", (
            f"weights=models:/{NAME}@champion", f"mlflow.uri={mlflow}", f"source={data.parent / 'images' / 'val'}",
            f"out={out / 'predictions'}",
        )),
    ]  # fmt: skip


def play(running: Services, todo: list[Step], out: Path) -> None:
    """Submit the steps one after the other; summary.json in ``out`` grows with each.

    Raises:
        DemoFailed: one ends otherwise than it should.
    """
    done: dict[str, Any] = {}
    for number, step in enumerate(todo, 1):
        say(
            f"--- {number}/{len(todo)} {step.name}: python -m pipelines.{step.pipeline} {' '.join(step.options)}"
        )
        begin = time.monotonic()
        result = running.submit(f"{step.name}-{number}", step.pipeline, step.options)
        done[step.name] = {"seconds": round(time.monotonic() - begin, 1), **result}
        (out / "summary.json").write_text(json.dumps(done, indent=2))
        if not step.check(result):
            raise DemoFailed(f"step {step.name} ended with {json.dumps(result)}")


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Play the demo; 0, or 1 where a step ended otherwise, or 75 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m demos.release", description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "datasets" / "trees" / "data.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="a folder to make")
    parser.add_argument("--only", default="", help="pipelines to run, such as train,register; all")
    parser.add_argument("--wait", action="store_true", help="keep the services until Ctrl-C")
    arguments = parser.parse_args(argv)
    data, out = arguments.data.resolve(), arguments.out.resolve()
    if not data.is_file() or (out / "summary.json").exists():
        missing = f"{data} is not there: run make data"
        say(f"error: {f'{out} holds an earlier demo: remove it' if data.is_file() else missing}")
        return 2
    out.mkdir(parents=True, exist_ok=True)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        with services(out) as running:
            say(f"Ray: {running.dashboard} (token of this demo), MLflow: {running.mlflow}")
            only = set(filter(None, arguments.only.split(",")))
            todo = [s for s in steps(out, data, running.mlflow) if not only or s.pipeline in only]
            play(running, todo, out)
            say(f"done; {out / 'summary.json'} holds what each step printed last")
            while arguments.wait:
                time.sleep(1)
    except KeyboardInterrupt:
        say("stopped; Ray and MLflow are ended")
        return 75
    except DemoFailed as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
