"""A real MLflow server on 127.0.0.1, and a door before it that asks for a token."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.stores import answers, free_port

TOKEN = "test-tracking-token-5T-do-not-print"


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """``mlflow server`` with SQLite in ``folder``; its address. It ends with the context, by its own pid."""
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination", (folder / "artifacts").as_uri(),
    ]  # fmt: skip
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # processes of no use here
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)
    try:
        end = time.monotonic() + 120
        while not answers(port):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(
                    f"the MLflow server did not start: {(folder / 'server.log').read_text()[-500:]}"
                )
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


@contextmanager
def locked_door(upstream: str) -> Iterator[str]:
    """A proxy that answers 401 to who does not bring TOKEN as a bearer token; its address."""
    host = upstream.removeprefix("http://")

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.send_error(401)
                return
            connection = http.client.HTTPConnection(host, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            connection.request(
                self.command, self.path, body=body, headers={**headers, "Host": host}
            )
            reply = connection.getresponse()
            content = reply.read()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                hop = ("transfer-encoding", "connection", "server", "date", "content-length")
                if name.lower() not in hop:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
