"""Training on several GPUs of one host: scaling, equality, kills. One table, and JSON.

    python benchmarks/multigpu.py --data PATH/data.yaml --out multigpu.json
    python benchmarks/multigpu.py --data PATH/data.yaml --out dry.json --ranks 1 2 --imgsz 96 --cases yolo11n.yaml:4 \\
        --parts step equality cycles kill

On as many GPUs as there are; without a GPU the ranks are gloo processes that share the CPUs, which says that the
script and the collectives work and nothing about speed. Parts:

step      ms of the step on made-up batches, weak (the case's batch on each rank) and strong (that batch on the most
          ranks, shared by fewer); ``exposed_ms`` is what the collectives add, against the same step without any
epochs    images/s of whole epochs on real photos, ours and ``yolo train device=0,1,...`` (benchmarks/epochs.py)
equality  the gradient of one global batch and the digests of its samples on every number of ranks, and the mAP of one
          weights file judged by every number of workers
cycles    starts and ends of the group with a captured step in it
kill      kill -9 of a rank in the middle of a run, then resume= on one worker
accuracy  per seed: the case's batch on one worker; that batch on all workers; that batch times the workers on all
          workers. mAP50-95 and seconds of each

What cannot be measured is a row with its reason, and the exit code is 1. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import epochs
import psutil
import torch
from arguments import command_line
from ranks import RanksFailed, case_of, gradient, on_ranks, start_and_end, step_ms

Row = dict[str, Any]
NO_TRACKING = ("mlflow.enabled=false", "cluster.address=local")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ``ours`` holds what follows ``--``, for our trainings alone."""
    parser, own, rest = command_line(__doc__, argv)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=rank_counts(), help="beginning at 1"
    )
    parser.add_argument(
        "--cases", nargs="+", default=["yolo11n.yaml:64", "yolo11m.yaml:32", "yolo26s.yaml:32"],
        help="model:batch of a rank",
    )  # fmt: skip
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--photos", type=int, default=6560, help="of an epoch of the part epochs")
    parser.add_argument(
        "--judged-epochs", type=int, default=30, help="of the weights of the part equality"
    )
    parser.add_argument("--epochs", type=int, default=100, help="of the part accuracy")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(own)
    arguments.ours = rest
    arguments.data = arguments.data.resolve()
    if arguments.ranks != sorted({1, *arguments.ranks}):
        parser.error("--ranks: ascending, beginning with 1, which the others are compared to")
    there = torch.cuda.device_count()
    if there and arguments.ranks[-1] > there:
        parser.error(f"--ranks: there are {there} GPU(s)")
    return arguments


def rank_counts() -> list[int]:
    """1, 2, 4 ... up to the number of GPUs; 1 and 2 without a GPU."""
    most = torch.cuda.device_count() or 2
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Model and batch of a rank."""
    for case in arguments.cases:
        model, batch = case.rsplit(":", 1)
        yield model, int(batch)


def step_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Weak and strong scaling of the step alone."""
    for model, batch in cases(arguments):
        for kind in ("weak", "strong"):
            first = 0.0
            for ranks in arguments.ranks:
                whole = batch * (ranks if kind == "weak" else arguments.ranks[-1])
                case = case_of(model, whole, arguments.imgsz)
                found = on_ranks(ranks, step_ms, case, arguments.blocks)
                # A step ends when the slowest rank has ended it.
                ms, alone = (
                    max(statistics.median(one[name]) for one in found) for name in ("step", "alone")
                )
                per_s = whole / ms * 1e3
                first = first or per_s
                yield {
                    "part": "step", "kind": kind, "model": model, "ranks": ranks, "batch": whole,
                    "step_ms": round(ms, 3), "exposed_ms": round(ms - alone, 3), "images_per_s": round(per_s, 1),
                    "efficiency": round(per_s / first / ranks, 3),
                }  # fmt: skip


def epoch_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Whole epochs on real photos, ours and Ultralytics', at the case's batch on each rank."""
    gpu = torch.cuda.is_available()
    with TemporaryDirectory(prefix="multigpu-") as temporary:
        data = epochs.repeat_photos(arguments.data, Path(temporary) / "photos", arguments.photos)
        for model, batch in cases(arguments):
            first: dict[str, float] = {}
            for ranks in arguments.ranks:
                devices = ",".join(map(str, range(ranks))) if gpu else "cpu"
                rest = ["--", f"cluster.workers={ranks}", *NO_TRACKING, *arguments.ours]
                theirs = ["--theirs", f"device={devices}", "workers=8", f"amp={str(gpu).lower()}"]
                given = epochs.parse([
                    "--data", str(data), "--out", os.devnull, "--options", f"imgsz={arguments.imgsz}", *theirs, *rest,
                ])  # fmt: skip
                for trainer in ("ours", "theirs") if gpu or ranks == 1 else ("ours",):
                    place = Path(temporary) / f"{trainer}-{model}-{ranks}"
                    row = epochs.run(trainer, f"{model}:{batch * ranks}", data, place, given)
                    per_s = row["images_per_s"]
                    efficiency = per_s / first.setdefault(trainer, per_s) / ranks
                    yield {
                        "part": "epochs", "model": model, "ranks": ranks, "batch": batch * ranks, "trainer": trainer,
                        "images_per_s": per_s, "utilization": row["utilization"], "efficiency": round(efficiency, 3),
                    }  # fmt: skip


def equality_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """How far a gradient of several ranks is from that of one; whether samples and mAP are the same."""
    for model, batch in cases(arguments):
        for precision in ("fp32", "bf16") if torch.cuda.is_available() else ("fp32",):
            one: Row = {}
            for ranks in arguments.ranks:
                whole = batch - batch % arguments.ranks[-1] or arguments.ranks[-1]
                case = case_of(model, whole, arguments.imgsz, precision)
                found = on_ranks(ranks, gradient, case, arguments.data)
                samples = {
                    slot: digest for part in found for slot, digest in part["samples"].items()
                }
                result = {"gradient": found[0]["gradient"].double(), "samples": samples}
                one = one or result
                gap = (result["gradient"] - one["gradient"]).norm() / one["gradient"].norm()
                bound = 1e-5 if precision == "fp32" else 1e-3
                yield {
                    "part": "equality", "model": model, "precision": precision, "ranks": ranks, "batch": whole,
                    "relative_difference": float(gap), "same_samples": samples == one["samples"],
                    "ranks_agree": all(torch.equal(found[0]["gradient"], other["gradient"]) for other in found),
                    "holds": bool(gap <= bound) and samples == one["samples"],
                }  # fmt: skip
    yield from _judged_rows(arguments)


def _judged_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The mAP of one weights file by every number of workers."""
    with TemporaryDirectory(prefix="multigpu-") as folder:
        model, batch = next(cases(arguments))
        trained = train(
            arguments, Path(folder), model, batch, 1, f"epochs={arguments.judged_epochs}"
        )
        first = None
        for ranks in arguments.ranks:
            result = pipeline(
                "evaluate", f"weights={trained['weights']}", f"data={arguments.data}",
                f"imgsz={arguments.imgsz}", f"cluster.workers={ranks}", "cluster.address=local",
            )  # fmt: skip
            found = (result["map50"], result["map50_95"])
            first = first or found
            yield {
                "part": "equality", "kind": "mAP", "ranks": ranks, "map50": found[0],
                "map50_95": found[1],
                "holds": found == first and found[0] > 0,  # two that find nothing agree for no reason
            }  # fmt: skip


def cycle_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Whether every start of the group, with a captured step in it, comes to an end."""
    model, batch = next(cases(arguments))
    ranks = arguments.ranks[-1]
    case = case_of(model, batch * ranks, arguments.imgsz)
    begin, replays = time.perf_counter(), []
    for _ in range(arguments.cycles):
        replays.append(min(on_ranks(ranks, start_and_end, case, limit_s=180)))
    yield {
        "part": "cycles", "model": model, "ranks": ranks, "cycles": len(replays), "fewest_replays": min(replays),
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def pipeline(name: str, *options: str) -> Row:
    """The last JSON line of a pipeline.

    Raises:
        RanksFailed: it failed.
    """
    command = [sys.executable, "-m", f"pipelines.{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RanksFailed(f"pipelines.{name} ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(
    arguments: argparse.Namespace, folder: Path, model: str, batch: int, ranks: int, *options: str
) -> Row:
    """One training; the JSON of its end."""
    return pipeline("train", *training_options(arguments, folder, model, batch, ranks), *options)


def training_options(
    arguments: argparse.Namespace, folder: Path, model: str, batch: int, ranks: int
) -> list[str]:
    """What all trainings here have."""
    mode = "require" if torch.cuda.is_available() else "auto"
    return [
        f"data={arguments.data}", f"model={model}", f"batch={batch}", f"imgsz={arguments.imgsz}",
        f"project={folder}", f"cluster.workers={ranks}", f"graph.mode={mode}", *NO_TRACKING, *arguments.ours,
    ]  # fmt: skip


def kill_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """kill -9 of a rank: the run goes on by itself; Ctrl-C later, it is resumed on one worker."""
    model, batch = next(cases(arguments))
    ranks = arguments.ranks[-1]
    with TemporaryDirectory(prefix="multigpu-") as folder:
        place = Path(folder)
        options = training_options(arguments, place, model, batch * ranks, ranks)
        command = [
            sys.executable, "-m", "pipelines.train", *options, "epochs=12", "val=false", "save_steps=2",
        ]  # fmt: skip
        with open(place / "log.txt", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                wait_for(lambda: epochs_done(place) >= 2, process, 600)
                begin, before = time.perf_counter(), epochs_done(place)
                family = psutil.Process(process.pid).children(recursive=True)
                victims = [one for one in family if "RayTrainWorker" in " ".join(one.cmdline())]
                os.kill(victims[-1].pid, signal.SIGKILL)
                wait_for(lambda: epochs_done(place) >= before + 2, process, 300)
                went_on_s = time.perf_counter() - begin
                process.send_signal(signal.SIGINT)
                code = process.wait(120)
            finally:
                epochs.stop(process)
            restarted = "going on from step" in (place / "log.txt").read_text()
        resumed = pipeline("train", f"resume={place / 'train'}", "cluster.workers=1", *NO_TRACKING)
        yield {
            "part": "kill", "model": model, "ranks": ranks, "two_epochs_later_s": round(went_on_s, 1),
            "restarted": restarted, "interrupted_with": code, "resumed_on_one": resumed["exit"] == 0,
            "epochs": epochs_done(place), "holds": code == 75 and resumed["exit"] == 0 and epochs_done(place) == 12,
        }  # fmt: skip


def epochs_done(folder: Path) -> int:
    """Lines of results.csv."""
    table = next(folder.rglob("results.csv"), None)
    return table.read_text().count("\n") - 1 if table else 0


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Until something is true.

    Raises:
        RanksFailed: the process ended before, or the time is up.
    """
    end = time.monotonic() + limit_s
    while not reached():
        if process.poll() is not None or time.monotonic() > end:
            raise RanksFailed(f"the run ended ({process.poll()}) or hung")
        time.sleep(0.1)


def accuracy_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One worker, all workers with the same batch, all workers with the batch of each."""
    model, batch = next(cases(arguments))
    most = arguments.ranks[-1]
    for ranks, whole in ((1, batch), (most, batch), (most, batch * most)):
        for seed in arguments.seeds:
            with TemporaryDirectory(prefix="multigpu-") as folder:
                begin = time.perf_counter()
                place, epochs_ = Path(folder), f"epochs={arguments.epochs}"
                result = train(
                    arguments, place, model, whole, ranks, epochs_, f"seed={seed}", "val_period=10"
                )
                judged = pipeline(
                    "evaluate", f"weights={result['weights']}", f"data={arguments.data}",
                    f"imgsz={arguments.imgsz}", "cluster.address=local",
                )  # fmt: skip
            yield {
                "part": "accuracy", "model": model, "ranks": ranks, "batch": whole, "seed": seed,
                "map50_95": judged["map50_95"], "seconds": round(time.perf_counter() - begin, 1),
            }  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "step": step_rows, "equality": equality_rows, "cycles": cycle_rows, "kill": kill_rows,
    "epochs": epoch_rows, "accuracy": accuracy_rows,
}  # fmt: skip


def table(rows: list[Row]) -> str:
    """All rows, a table a part."""
    lines: list[str] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        names = list(dict.fromkeys(name for row in mine for name in row if name != "part"))
        lines += [
            "",
            f"## {part}",
            "",
            "| " + " | ".join(names) + " |",
            "|" + " --- |" * len(names),
        ]
        lines += [
            "| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in mine
        ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the parts, one after the other; 1 if one failed or an equality does not hold."""
    arguments = parse(argv)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        report = {
            "command": " ".join(argv),
            "device": device,
            "torch": torch.__version__,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")

    for part in arguments.parts:
        try:
            for row in PARTS[part](arguments):
                keep(row)
        except Exception as error:  # one part that fails must not hide the others
            keep({"part": part, "failed": f"{type(error).__name__}: {error}"[-1500:]})
    print(table(rows))
    return int(any("failed" in row or not row.get("holds", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
