"""A Ray head with its dashboard and an MLflow server on free ports of 127.0.0.1, ended by their own process ids."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
START_S = 120.0


class DemoFailed(RuntimeError):
    """A step did not end as it should."""


@dataclass(frozen=True)
class Services:
    """Where both answer, and the environment of whoever talks to them."""

    dashboard: str
    mlflow: str
    env: dict[str, str]

    def submit(self, name: str, pipeline: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Run a pipeline as a job; the JSON of the last line of its log.

        Ctrl-C and SIGTERM stop the job too.

        Raises:
            DemoFailed: the log does not end in JSON.
        """
        job = ("job", "submit", "--address", self.dashboard, "--submission-id", name)
        command = [*job, "--working-dir", str(ROOT), "--", "python", "-m", f"pipelines.{pipeline}"]
        try:
            _ray(self.env, *command, *arguments)
        except BaseException:
            _ray(self.env, "job", "stop", "--address", self.dashboard, name, quiet=True)
            raise
        log = _ray(self.env, "job", "logs", "--address", self.dashboard, name, quiet=True)
        return last_json(log)


def last_json(log: str) -> dict[str, Any]:
    """What a pipeline printed last, from the log of its job.

    Raises:
        DemoFailed: no line of it is a JSON object.
    """
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise DemoFailed(f"the job's log has no JSON: {log[-500:]}")


def _ray(env: dict[str, str], *arguments: str, quiet: bool = False) -> str:
    """Ray's command line; what it printed. It fails with a job, so its exit code says nothing more."""
    done = subprocess.run(
        [str(BIN / "ray"), *arguments], env=env, cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE if quiet else sys.stderr, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout or ""


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    """Both, while the context is open; MLflow keeps its database and artifacts in ``folder``."""
    ray_port, dashboard, agent, tracking = free_ports(4)
    env = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # a job's `python` is what the head finds
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this demo alone
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # half a dozen processes for what is not used here
    }
    env.pop("RAY_ADDRESS", None)
    # The path of a socket may have 107 characters: Ray's folder is a short one.
    with TemporaryDirectory(prefix="yr", dir="/tmp", ignore_cleanup_errors=True) as short:
        head = [
            str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={ray_port}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
            f"--temp-dir={short}", "--num-cpus=2", "--num-gpus=0", "--object-store-memory=500000000",
        ]  # fmt: skip
        server = [
            str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(tracking), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
            "--artifacts-destination", (folder / "artifacts").as_uri(),
        ]  # fmt: skip
        with process(head, env, folder / "ray.log"), process(server, env, folder / "server.log"):
            found = Services(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{tracking}", env)
            wait_for(f"{found.dashboard}/api/version", "the Ray head", folder / "ray.log")
            wait_for(f"{found.mlflow}/health", "the MLflow server", folder / "server.log")
            yield found


@contextmanager
def process(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[None]:
    """A service in a process group of its own, which Ctrl-C does not reach; ended with the context."""
    with open(log, "w") as file:
        running = subprocess.Popen(
            command, env=env, cwd=log.parent, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def wait_for(url: str, what: str, log: Path) -> None:
    """Until something answers, if only that a token is missing.

    Raises:
        DemoFailed: nothing does in two minutes.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.3)
    raise DemoFailed(f"{what} does not answer at {url} after {START_S:.0f} s; see {log}")
