"""Photos judged by Ray tasks: the records, the sentences and the exit codes of judging in the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Head
from tests.integration.test_bad_input import (
    class_out_of_range,
    labels,
    nan_box,
    no_labels,
    no_photos,
    no_split,
    photos,
    truncated_photo,
)
from tests.stores import WEB_KEY, web_server
from tests.synthetic import make_dataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
ACCESS = json.dumps({"client_kwargs": {"headers": {"X-Key": WEB_KEY}}})

# In a process of its own, as a user's driver is: runs of two photos, by tasks or here.
SCAN = """
import hashlib, io, json, os, signal, sys, threading, time
from contextlib import nullcontext, redirect_stderr, suppress
import psutil
from yolo_ray.cluster import scan
from yolo_ray.config.schema import WorkersConfig
from yolo_ray.data import records
from yolo_ray.entry import run

head, access, whole, stuck, locked, *damaged = sys.argv[1:]
records.RUN = 2
counts = []

def counted(what, total):
    counts.append([total, 0])
    return nullcontext(lambda number: counts.append([total, counts.pop()[1] + number]))

def told(one):
    arrays = b"".join(getattr(one, name).tobytes() for name in
                      ("sizes", "offsets", "boxes", "classes", "num_bytes", "tails"))
    return [one.digest, hashlib.sha256(arrays).hexdigest(), list(one.paths), list(map(str, one.bad)), dict(one.counts)]

def load(data, judge):
    return told(records.load_records(data, "train", max_bad=0.2, judge=judge))

def by_tasks(cpus, under_way):
    return lambda runs, classes: scan.judge_by_tasks(runs, classes, cpus=cpus, under_way=under_way)

def ended(data, fewest):
    scan.FEWEST_RUNS = fewest
    judge, said = scan.judge_on(WorkersConfig(), counted), io.StringIO()

    def pipeline(argv):
        for split in ("train", "val"):
            records.load_records(data, split, max_bad=0.01, judge=judge)

    with redirect_stderr(said):
        code = run(pipeline, [])
    return [code, said.getvalue()]

def judging():
    for process in psutil.Process(int(head)).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::judge_apart" in " ".join(process.cmdline()):
                return process

def once_stuck(act):
    # Who reads this label waits, until somebody ends it.
    os.rename(stuck, stuck + ".txt")
    os.mkfifo(stuck)

    def watch():
        end = time.monotonic() + 60
        while (process := judging()) is None and time.monotonic() < end:
            time.sleep(0.05)
        act(process)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread

answers = {"here": load(whole, None)}
watch = once_stuck(lambda process: os.kill(os.getpid(), signal.SIGTERM))
answers["stopped"] = ended(whole, 0)
watch.join()
os.replace(stuck + ".txt", stuck)
counts.clear()
answers["there"] = [load(whole, by_tasks(*case)) for case in ((1, 1), (0.5, 3), (1, 100))]
scan.FEWEST_RUNS = 0
answers["there"].append(load(whole, scan.judge_on(WorkersConfig(), counted)))
answers["counts"] = counts
answers["refused"] = [[ended(data, fewest) for fewest in (10**9, 0)] for data in damaged]
os.environ["FSSPEC_HTTP"] = access
answers["locked"] = [load(locked, judge) for judge in (None, by_tasks(1, 2))]

def kill(process):
    os.replace(stuck + ".txt", stuck)
    process.kill()

watch = once_stuck(kill)
answers["after"] = load(whole, by_tasks(1, 1))
watch.join()
print(json.dumps(answers))
"""


def two_classes_out_of_range(data: Path) -> None:
    class_out_of_range(data)
    with open(labels(data)[4], "a") as file:
        file.write("9 0.5 0.5 0.1 0.1\n")


def of_no_folder(data: Path) -> None:
    data.write_text(data.read_text().replace("images/train", "images/trian"))


DAMAGE = [
    class_out_of_range, two_classes_out_of_range, nan_box, truncated_photo, no_labels, no_photos, no_split, of_no_folder
]  # fmt: skip


def logs_of(head: Head) -> list[Path]:
    command = psutil.Process(head.pid).cmdline()
    (session,) = [word.partition("=")[2] for word in command if word.startswith("--temp-dir=")]
    return [path for path in Path(session).rglob("logs/**/*") if path.is_file()]


def test_tasks_judge_as_the_driver_does(head: Head, tmp_path: Path) -> None:
    """Any number of tasks, mistakes of every kind, a locked web server, and a process that is killed."""
    whole = make_dataset(tmp_path / "whole", train=9, val=3, size=64)
    photos(whole)[3].write_bytes(b"no photo")
    damaged = []
    for damage in DAMAGE:
        damaged.append(make_dataset(tmp_path / damage.__name__, train=6, val=4, size=64))
        damage(damaged[-1])
    with web_server(tmp_path, locked=True) as address:
        locked = tmp_path / "locked.yaml"
        places = [f"{address}/whole/images/train/{path.name}" for path in photos(whole)]
        (tmp_path / "locked.txt").write_text("\n".join(places))
        locked.write_text("train: locked.txt\nval: locked.txt\nnames: [a, b, c]\n")
        arguments = [head.pid, ACCESS, whole, labels(whole)[0], locked, *damaged, locked]
        done = subprocess.run(
            [sys.executable, "-c", SCAN, *map(str, arguments)], cwd="/", text=True, capture_output=True,
            check=False, env=head.env,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(answers["here"][2]) == 8 and answers["there"] == [answers["here"]] * 4
    assert answers["counts"][0] == [9, 9]
    assert answers["stopped"][0] == 75 and "Traceback" not in answers["stopped"][1]
    for here, there in answers["refused"]:
        assert here == there and here[0] == 2 and here[1].startswith("error: "), here
    assert "1 more label files like it" in answers["refused"][1][1][1]
    assert f"{address}/whole/" in answers["refused"][-1][0][1], "and without the key"
    assert answers["locked"][0] == answers["locked"][1] and len(answers["locked"][0][2]) == 8
    assert answers["after"] == answers["here"]
    assert [path for path in logs_of(head) if WEB_KEY.encode() in path.read_bytes()] == []
    assert os.path.exists(labels(whole)[0]) and WEB_KEY not in done.stderr
