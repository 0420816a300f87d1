"""One Ray head for all integration tests, and pipelines run as a user runs them: as processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.synthetic import make_dataset

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_JOB_STOP_WAIT_TIME_S": "90",  # for the checkpoint, when `ray job stop` sends SIGTERM
    "PYTHONPATH": str(ROOT),
    "PATH": f"{BIN}:{os.environ['PATH']}",  # a job's `python` is what the head finds: the environment is activated
}

SMALL = (
    "model=yolo11n.yaml",
    "imgsz=64",
    "batch=5",
    "cluster.workers=2",
    "log_steps=1",
    "val_batch=4",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Outcome:
    """What a pipeline left: exit code, the JSON of the last line of stdout, and stderr."""

    code: int
    result: dict[str, Any]
    stderr: str


@dataclass(frozen=True)
class Head:
    """A running Ray head with two CPUs."""

    address: str
    dashboard: str
    pid: int

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client."""
        return {**os.environ, **SETTINGS, "RAY_ADDRESS": self.address}

    def start(
        self, pipeline: str, *arguments: str, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """``python -m pipelines.<pipeline>`` as a process."""
        command = [sys.executable, "-m", f"pipelines.{pipeline}", *arguments]
        return subprocess.Popen(
            command, env=self.env, cwd=cwd or "/", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        """Wait for a pipeline."""
        try:
            stdout, stderr = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        lines = stdout.strip().splitlines()
        return Outcome(process.returncode, json.loads(lines[-1]) if lines else {}, stderr)

    def run(self, pipeline: str, *arguments: str, cwd: Path | None = None) -> Outcome:
        """Run a pipeline to its end."""
        return self.finish(self.start(pipeline, *arguments, cwd=cwd))

    def train_workers(self) -> list[int]:
        """Process ids of this head's training workers, and of no other cluster's."""
        family = psutil.Process(self.pid).children(recursive=True)
        return sorted(p.pid for p in family if is_train_worker(p))


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """Ray with its dashboard on free ports of 127.0.0.1, ended by its own process."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(
        prefix="yr", dir="/tmp"
    ) as folder:  # socket paths must be short
        command = [
            str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
            f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--num-cpus=2", "--num-gpus=0",
            # Another head on this machine may have the usual port of the agent, which takes the jobs.
            f"--dashboard-agent-listen-port={free_port()}",
            f"--temp-dir={folder}", "--object-store-memory=500000000",
        ]  # fmt: skip
        with open(Path(folder) / "start.log", "w") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **SETTINGS}, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
        try:
            wait_for(
                lambda: answers(f"http://127.0.0.1:{dashboard}/api/version"), 90, "the Ray head"
            )
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("shapes"), train=13, val=5, size=(64, 96))


@pytest.fixture(scope="session")
def trained(
    head: Head, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome, str]:
    """A finished run of two epochs, its outcome, and the digest of the user's data before it."""
    before = digest_of(data.parent)
    project = tmp_path_factory.mktemp("project")
    outcome = head.run("train", f"data={data}", f"project={project}", "epochs=2", *SMALL)
    assert outcome.code == 0, outcome.stderr
    return project / "train", outcome, before


def is_train_worker(process: psutil.Process) -> bool:
    """One that has ended meanwhile is none."""
    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def digest_of(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(f"{path}{path.stat().st_mtime_ns}".encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    pytest.fail(f"waited {seconds} s for {what}")
