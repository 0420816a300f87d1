"""Real stores on 127.0.0.1 for tests: an S3 server, a web server, and a proxy that makes either flaky."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUCKET = "photos"
KEYS = {
    "AWS_ACCESS_KEY_ID": "test-access-key-7Q",
    "AWS_SECRET_ACCESS_KEY": "test-secret-key-9Z-do-not-print",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server of its own process; its address. It ends with the context, by its own pid."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    # Far from the network: moto would ask for the account it runs in.
    env = {**os.environ, **KEYS}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not answers(port):
            if process.poll() is not None or time.monotonic() > end:
                text = process.stderr.read().decode() if process.stderr else ""
                pytest.fail(f"the S3 server did not start: {text[-500:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def use_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The environment of a user of that server, and nothing of this machine's own."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "FSSPEC_")):
            monkeypatch.delenv(name)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def upload(endpoint: str, folder: Path, prefix: str, bucket: str = BUCKET) -> str:
    """Put every file of a folder into the bucket; the address of what was the folder."""
    import boto3

    keys = {name.lower(): value for name, value in KEYS.items() if "KEY" in name}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(
            str(file), bucket, f"{prefix}/{file.relative_to(folder).as_posix()}".lstrip("/")
        )
    return f"s3://{bucket}/{prefix}".rstrip("/")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Locked(_Quiet):
    """403 for who does not send the key."""

    key = "test-header-key-3K-do-not-print"

    def do_GET(self) -> None:
        if self.headers.get("X-Key") == self.key:
            super().do_GET()
        else:
            self.send_error(403)


WEB_KEY = _Locked.key


@contextmanager
def web_server(folder: Path, *, locked: bool = False) -> Iterator[str]:
    """``http.server`` over a folder, ``locked`` for all who do not send WEB_KEY as X-Key; its address."""
    with _served(partial(_Locked if locked else _Quiet, directory=str(folder))) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"


@dataclass
class Flaky:
    """A proxy in front of a server: how many requests it fails, with what, and what it has seen."""

    address: str = ""
    failures: int = 0
    status: int = 503  # 0: the connection is cut instead of an answer
    only: str = ""  # fail only requests whose path holds this
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self, path: str) -> bool:
        with self.lock:
            self.seen.append(path)
            if self.failures and self.only in path:
                self.failures -= 1
                return True
            return False


@contextmanager
def flaky_proxy(upstream: str) -> Iterator[Flaky]:
    """A proxy on a free port that passes GET and HEAD on, but for ``failures`` of them."""
    flaky = Flaky()
    host = upstream.removeprefix("http://")

    class Proxy(_Quiet):
        def do_GET(self) -> None:
            if flaky.fails(self.path):
                if flaky.status == 0:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(flaky.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            _pass_on(self, host)

        do_HEAD = do_GET

    with _served(Proxy) as server:
        flaky.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield flaky


def _pass_on(handler: BaseHTTPRequestHandler, host: str) -> None:
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(handler.command, handler.path, headers=dict(handler.headers))
    reply = connection.getresponse()
    body = reply.read()
    handler.send_response(reply.status)
    for name, value in reply.getheaders():
        if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
            handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
    connection.close()


@contextmanager
def _served(handler: object) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
