"""results.csv, the tracked run and its delivery: real SQLite, and a real server that is killed."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from yolo_ray.errors import UserError
from yolo_ray.track import outbox
from yolo_ray.track.client import metric_names
from yolo_ray.track.run import NullRun, RunTracker, code_tags, finish, replay_pending, start_run
from yolo_ray.track.table import append_row, read_table
from yolo_ray.train.report import Tracker


def run_folder(tmp_path: Path, name: str = "train") -> Path:
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    return folder


def begin(run_dir: Path, uri: str | None = None, **options: object) -> RunTracker:
    values = {
        "experiment": "e",
        "params": {"lr0": 0.01},
        "tags": {},
        "names": ("a", "b"),
        **options,
    }
    return start_run(run_dir, uri=uri, **values)  # pyright: ignore[reportArgumentType]


def history(tracker: RunTracker, name: str) -> list[tuple[int, float]]:
    found = MlflowClient(tracker.uri).get_metric_history(tracker.run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


# --- results.csv


def test_table_appends_extends_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_row(path, {"box": 1.5, "lr": 0.01}, epoch=1)
    before = path.stat().st_ino
    append_row(path, {"box": 1.25, "lr": 0.02}, epoch=2)
    assert path.stat().st_ino == before  # an append, not a rewrite
    append_row(path, {"box": 1.0, "val/a, b\n/map50": math.nan}, epoch=3)
    assert path.read_text() == (
        'epoch,box,lr,"val/a, b /map50"\n1,1.5,0.01,\n2,1.25,0.02,\n3,1,,nan\n'
    )
    with path.open("a") as file:
        file.write("4,0.9")  # killed in the middle of a line; without its end it reads as 0.9
    assert read_table(path)["epoch"] == [1, 2, 3]
    append_row(path, {"box": 0.95}, epoch=4)
    assert read_table(path)["box"] == [1.5, 1.25, 1.0, 0.95]
    assert sorted(tmp_path.iterdir()) == [path]  # no temporary file is left


def test_table_replaces_epochs_run_again_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    for epoch in range(1, 6):
        append_row(path, {"box": float(epoch)}, epoch=epoch)
    append_row(path, {"box": 30.0}, epoch=3)
    append_row(path, {"box": 40.0}, epoch=4)
    assert read_table(path) == {"epoch": [1, 2, 3, 4], "box": [1, 2, 30, 40]}


def test_table_starts_anew_over_a_torn_header(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("epoch,bo")
    append_row(path, {"box": 1.0}, epoch=1)
    assert path.read_text() == "epoch,box\n1,1\n"
    assert read_table(tmp_path / "none.csv") == {}


# --- names and batches


def test_metric_names_are_what_mlflow_takes() -> None:
    names = ["val/a&b/map50", "val/a%b/map50", "/val//x", "val/../x", "é: ü/1.5", "x" * 300, ""]
    spelled = metric_names(names)
    assert spelled[:5] == ["val/a_b/map50", "val/a_b/map50_2", "val/x", "val/__/x", "é_ ü/1.5"]
    assert len(set(spelled)) == len(names)
    assert max(map(len, spelled)) == 250


def test_outbox_merges_neighbours_into_batches() -> None:
    one = [
        {"run_id": "r", "kind": "metrics", "values": [[f"m{i}", 0.0, 0, i]] * 400} for i in range(4)
    ]
    merged = outbox.merge([*one, {"run_id": "r", "kind": "file"}, one[0]])
    assert [len(op.get("values", [])) for op in merged] == [800, 800, 0, 400]
    assert len(one[0]["values"]) == 400  # what the caller holds is not changed
    assert [len(op["values"]) for op in outbox.merge([{**one[0], "values": [[0]] * 2500}])] == [
        1000,
        1000,
        500,
    ]


def test_outbox_keeps_order_drops_refusals_and_retries(tmp_path: Path) -> None:
    pending, got, warnings = tmp_path / "pending.jsonl", [], []
    answers = iter([None, outbox.Refused("bad name"), OSError("away"), OSError("away")])

    def send(operation: outbox.Operation) -> None:
        error = next(answers, None)
        if error is not None:
            raise error
        got.append(operation["n"])

    box = outbox.Outbox(send, pending, warnings.append)
    for n in range(5):
        box.put({"run_id": "r", "kind": "file", "n": n})
    assert not box.close(10)
    assert got == [0]  # 1 was refused, then the server was away for 2 and for the retry
    assert pending.read_text().count("\n") == 3
    with pending.open("a") as file:
        file.write('{"kind": "fi')  # killed while writing
    box = outbox.Outbox(send, pending, warnings.append)
    box.put({"run_id": "r", "kind": "file", "n": 5})
    assert box.close(10)
    assert got == [0, 2, 3, 4, 5]
    assert not pending.exists()
    assert ["refused" in text for text in warnings] == [True, False]


def test_outbox_gives_up_on_a_hanging_server_and_keeps_all(tmp_path: Path) -> None:
    pending, release, begun = tmp_path / "pending.jsonl", threading.Event(), threading.Event()

    def send(operation: outbox.Operation) -> None:
        begun.set()
        release.wait(20)

    box = outbox.Outbox(send, pending, lambda text: None)
    box.put({"run_id": "r", "kind": "file", "n": 0})
    assert begun.wait(10)
    box.put({"run_id": "r", "kind": "file", "n": 1})
    before = time.monotonic()
    assert not box.close(0.3)
    assert time.monotonic() - before < 5
    kept = [json.loads(line)["n"] for line in pending.read_text().splitlines()]
    assert kept == [0, 1]  # the one in flight too: it may never arrive
    release.set()  # a thread that comes back delivers the file, as long as its process lives
    deadline = time.monotonic() + 10
    while pending.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pending.exists()


# --- SQLite


def test_run_goes_from_driver_to_rank_0_and_back(tmp_path: Path) -> None:
    run_dir = run_folder(tmp_path, "my run")
    params = {"model": "yolo11n.yaml", "long": "x" * 7000} | {f"p{i}": i for i in range(120)}
    tracker = begin(run_dir, params=params, tags={"data.digest": "abc"})
    assert tracker.uri == f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    log = """
import pickle, sys
import numpy as np
tracker = pickle.loads(sys.stdin.buffer.read())
for step in range(1, 31):
    tracker.metrics({"train/box": 1.0 / step, "lr": 0.1}, step=step)
tracker.metrics({"nan": float("nan"), "inf": float("inf")}, step=31)
tracker.row({"train/box": 0.5, "val/map50": 0.25, "val/a?b/map50": 0.5}, epoch=1)
images = np.full((2, 64, 64, 3), 90, np.uint8)
tracker.photos("first", images, [np.array([[5., 5, 40, 40]]), np.zeros((0, 4))],
               [np.array([1]), np.zeros(0, int)], step=0)
tracker.file(tracker.run_dir / "results.csv", "")
tracker.close()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", log], input=pickle.dumps(tracker), check=True, timeout=60)
    finish(tracker, "FINISHED")
    finish(tracker, "FAILED", "too late: the first status stays")

    client = MlflowClient(tracker.uri)
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "my run")
    assert len(run.data.params) == 122
    assert len(run.data.params["long"]) == 6000
    assert run.data.tags["data.digest"] == "abc"
    assert run.data.tags["version.torch"]
    assert "end.reason" not in run.data.tags
    assert history(tracker, "train/box") == [(step, 1.0 / step) for step in range(1, 31)]
    assert history(tracker, "val/a_b/map50") == [(1, 0.5)]
    assert math.isnan(run.data.metrics["nan"])
    assert run.data.metrics["inf"] > 1e300
    assert read_table(run_dir / "results.csv")["train/box"] == [0.5]
    assert (run_dir / "first.jpg").stat().st_size > 1000
    assert run.info.artifact_uri is not None
    assert (tmp_path / "runs" / "mlartifacts").as_uri() in run.info.artifact_uri
    assert [file.path for file in client.list_artifacts(run.info.run_id, "pictures")] == [
        "pictures/first.jpg"
    ]
    assert not (run_dir / "mlflow_pending.jsonl").exists()


def test_resume_goes_on_with_the_same_run(tmp_path: Path) -> None:
    run_dir = run_folder(tmp_path)
    first = begin(run_dir, params={"epochs": 5, "lr0": 0.01})
    finish(first, "KILLED", "stopped by Ctrl-C")
    client = MlflowClient(first.uri)
    killed = client.get_run(first.run_id)
    assert (killed.info.status, killed.data.tags["end.reason"]) == ("KILLED", "stopped by Ctrl-C")
    left = {"kind": "metrics", "values": [["late", 1.0, 1, 7]], "run_id": first.run_id}
    outbox.append(run_dir / "mlflow_pending.jsonl", [left])

    again = begin(run_dir, params={"epochs": 9, "lr0": 0.01, "new": 1}, run_id=first.run_id)
    run = client.get_run(again.run_id)
    assert again.run_id == first.run_id
    assert run.info.status == "RUNNING"
    assert run.data.params == {"epochs": "5", "lr0": "0.01", "new": "1"}
    assert run.data.tags["changed.epochs"] == "9"
    assert "end.reason" not in run.data.tags
    assert history(again, "late") == [(7, 1.0)]
    finish(again, "FAILED", None)
    assert client.get_run(again.run_id).info.status == "FAILED"
    assert len(client.search_runs([run.info.experiment_id])) == 1
    with pytest.raises(UserError, match=r"mlflow\.uri=.*does not hold run 0123abc"):
        begin(run_dir, run_id="0123abc")


def test_folder_copied_away_from_its_database_is_refused_and_none_is_made(tmp_path: Path) -> None:
    first = begin(run_folder(tmp_path))
    finish(first, "KILLED", "stopped by Ctrl-C")
    copied = tmp_path / "elsewhere" / "run"
    copied.mkdir(parents=True)
    with pytest.raises(UserError, match=r"bring mlflow\.db and mlartifacts along"):
        begin(copied, run_id=first.run_id)
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists()
    again = begin(copied, uri=first.uri, run_id=first.run_id)
    assert again.run_id == first.run_id
    finish(again, "FINISHED")


def test_database_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    run_dir = run_folder(tmp_path)
    (tmp_path / "text.db").write_text("no database at all, but a text of some length" * 50)
    (tmp_path / "folder.db").mkdir()
    begun = time.monotonic()
    for name in ("text.db", "folder.db", "text.db/below.db"):
        with pytest.raises(UserError, match=r"mlflow\.uri=.*mlflow\.enabled=false"):
            begin(run_dir, f"sqlite:///{tmp_path / name}")
    assert time.monotonic() - begun < 15


def test_database_that_is_not_on_the_workers_machine_waits(tmp_path: Path) -> None:
    run_dir = run_folder(tmp_path)
    warnings: list[str] = []
    tracker = RunTracker(f"sqlite:///{tmp_path / 'elsewhere.db'}", "abc", run_dir)
    tracker.warn = warnings.append
    tracker.metrics({"x": 1.0}, step=1)
    tracker.close()
    assert len(warnings) == 1
    assert "not on this machine" in warnings[0]
    assert not (tmp_path / "elsewhere.db").exists()
    assert '"x"' in (run_dir / "mlflow_pending.jsonl").read_text()


def test_null_run_writes_files_and_no_mlflow(tmp_path: Path) -> None:
    null = NullRun(tmp_path, ("a",))
    both: list[Tracker] = [null, RunTracker("sqlite:///x", "id", tmp_path)]  # pyright checks it
    assert len(both) == 2
    run = pickle.loads(pickle.dumps(null))
    run.metrics({"x": 1.0}, step=1)
    run.row({"x": 1.0}, epoch=1)
    run.photos("p", np.zeros((1, 32, 32, 3), np.uint8), [np.zeros((0, 4))], [np.zeros(0)], step=1)
    run.file(tmp_path / "p.jpg", "")
    run.close()
    finish(run, "FINISHED")
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "p.jpg"}


def test_full_disk_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    run = NullRun(tmp_path / "gone")
    run.warn = warnings.append
    run.row({"x": 1.0}, epoch=1)
    assert "results.csv is not written" in warnings[0]


def test_code_tags_name_versions() -> None:
    tags = code_tags()
    assert tags["version.ray"][0].isdigit()
    assert ("git.dirty" in tags) == ("mlflow.source.git.commit" in tags)


# --- a server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """``mlflow server`` in its own process group, ended by that group's id."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, free_port())
    yield server
    server.kill()


def test_server_killed_in_the_middle_loses_nothing(tmp_path: Path, server: Server) -> None:
    run_dir = run_folder(tmp_path)
    uri = f"http://127.0.0.1:{server.port}"
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=rf"mlflow\.uri={uri} .*does not answer.*mlflow\.enabled=false"
    ):
        begin(run_dir, uri)  # not started yet
    assert time.monotonic() - begun < 15

    server.start()
    tracker = begin(run_dir, uri)
    warnings: list[str] = []
    tracker.warn = warnings.append
    tracker.metrics({"box": 1.0}, step=1)
    deadline = time.monotonic() + 20
    while not history(tracker, "box") and time.monotonic() < deadline:
        time.sleep(0.2)
    server.kill()
    slowest = 0.0
    for step in range(2, 40):
        before = time.monotonic()
        tracker.metrics({"box": 1.0 / step, "bad": math.nan}, step=step)
        slowest = max(slowest, time.monotonic() - before)
        time.sleep(0.02)
    tracker.row({"val/map50": 0.5}, epoch=1)
    tracker.file(run_dir / "results.csv", "")
    tracker.close()
    finish(tracker, "FINISHED", "all epochs done")
    assert slowest < 0.5
    assert len([text for text in warnings if "does not answer" in text]) <= 2  # close() began anew
    assert warnings
    with pytest.raises(Exception, match=r"Max retries|refused"):
        replay_pending(tracker)
    assert (run_dir / "mlflow_pending.jsonl").exists()

    server.start()
    assert replay_pending(tracker) > 0
    run = MlflowClient(uri).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert history(tracker, "box") == [(step, 1.0 / step) for step in range(1, 40)]
    assert history(tracker, "val/map50") == [(1, 0.5)]
    assert math.isnan(run.data.metrics["bad"])
    files = [file.path for file in MlflowClient(uri).list_artifacts(tracker.run_id)]
    assert files == ["results.csv"]
    assert not (run_dir / "mlflow_pending.jsonl").exists()
