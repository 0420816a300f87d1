"""The same study twice: N trials at a time on parts of a GPU, and one at a time on the whole of it.

    python benchmarks/tune.py --data PATH/data.yaml --out tune.json --trials 8 --at-a-time 4 -- epochs=5 batch=16

The trials are the same in both (random search with the same seed, nobody is stopped early). What follows ``--`` goes
to both. Without a GPU the trials share the CPUs, which says that the script works and nothing about a GPU. Each
study's time is that of its process, with the start of Ray; the time of its trials is shown beside it, from the first
trial's order to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from arguments import command_line

SPACE = ("space.lr0={loguniform: [1e-4, 1e-2]}", "space.mosaic={uniform: [0.0, 1.0]}")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ``options`` holds what follows ``--``."""
    parser, own, rest = command_line(__doc__, argv)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="leave both studies in this folder")
    arguments = parser.parse_args(own)
    arguments.options = rest
    return arguments


def run_study(arguments: argparse.Namespace, folder: Path, at_a_time: int) -> dict[str, Any]:
    """One study in a process; its times in seconds and what it came to."""
    command = [
        sys.executable, "-m", "pipelines.tune", f"data={arguments.data.resolve()}", f"project={folder}",
        f"num_samples={arguments.trials}", f"max_concurrent={at_a_time}", "tune.search=random", "tune.scheduler=none",
        *SPACE, *arguments.options,
    ]  # fmt: skip
    if torch.cuda.is_available():
        command.append(f"gpu_per_trial={1 / at_a_time:g}")
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.perf_counter() - begin
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if lines else {}
    if done.returncode != 0 or result.get("finished") != arguments.trials:
        raise SystemExit(
            f"the study with {at_a_time} at a time did not finish its trials: {result}"
        )
    trials = sorted((folder / "study" / "trials").iterdir())
    each = [json.loads((trial / "result.json").read_text())["elapsed_s"] for trial in trials]
    begun = min((trial / "config.yaml").stat().st_mtime for trial in trials)
    ended = max((trial / "result.json").stat().st_mtime for trial in trials)
    return {
        "at_a_time": at_a_time, "wall_s": round(wall_s, 1), "trials_s": round(ended - begun, 1),
        "one_trial_s": round(sum(each) / len(each), 1), "objective": result["objective"],
    }  # fmt: skip


def main(argv: list[str]) -> None:
    """Run both, the shared one first, and print the ratio."""
    arguments = parse(argv)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    rows = []
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="yolo_ray-tune-"))
    try:
        for at_a_time in (arguments.at_a_time, 1):
            rows.append(run_study(arguments, folder / str(at_a_time), at_a_time))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    shared, alone = rows
    report = {
        "device": device, "torch": torch.__version__, "trials": arguments.trials, "options": arguments.options,
        "shared": shared, "alone": alone,
        "ratio": round(alone["wall_s"] / shared["wall_s"], 2),
        "ratio_of_trials": round(alone["trials_s"] / shared["trials_s"], 2),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=2))
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
