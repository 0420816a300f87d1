"""The gate's arithmetic, champions in a real SQLite registry, what a failure leaves, and the served code."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from tests.registered import SIDE, detector_of, save_run
from tests.synthetic import make_dataset
from yolo_ray.config.load import load
from yolo_ray.config.register import RegisterConfig
from yolo_ray.errors import UserError
from yolo_ray.gate.compare import Bounds, Judged, Verdict, decide, markdown
from yolo_ray.gate.latency import alternating_medians
from yolo_ray.gate.parts import Comparison, Package
from yolo_ray.model.build import load_detector
from yolo_ray.model.detect import detect_nms
from yolo_ray.track import aliases, served_model
from yolo_ray.track.client import absolute_uri, access_of, connect
from yolo_ray.track.registry import ModelRegistry
from yolo_ray.track.run import RunTracker


def judged(
    score: float, classes: dict[str, float] | None = None, ms: float | None = None
) -> Judged:
    return Judged("1", 96, {"map50_95": score, "map50": score}, classes or {}, ms)


# --- the gate


def test_a_first_version_needs_the_floor_only() -> None:
    assert decide(None, judged(0.0), Bounds()).promoted
    refused = decide(None, judged(0.2), Bounds(min_map=0.3))
    assert not refused.promoted and "0.2000, >= 0.3" in refused.reasons[0]


@pytest.mark.parametrize(
    ("before", "after", "bounds", "promoted"),
    [
        (0.5, 0.5001, Bounds(), True),
        (0.5, 0.5, Bounds(), False),  # not better
        (0.5, 0.505, Bounds(min_gain=0.01), False),
        (0.5, 0.52, Bounds(min_gain=0.01), True),
        (0.5, 0.49, Bounds(min_gain=-0.02), True),
    ],
)
def test_the_gain_decides(before: float, after: float, bounds: Bounds, promoted: bool) -> None:
    assert decide(judged(before), judged(after), bounds).promoted is promoted


def test_one_class_or_the_latency_refuses_a_better_version() -> None:
    old = judged(0.5, {"a": 0.5, "b": 0.5, "unseen": float("nan")}, ms=10.0)
    lost = decide(old, judged(0.6, {"a": 0.45, "b": 0.9}, ms=10.0), Bounds())
    assert not lost.promoted and [reason[:1] for reason in lost.reasons] == ["a"]
    slow = decide(old, judged(0.6, {"a": 0.5, "b": 0.7}, ms=11.5), Bounds())
    assert not slow.promoted and "latency" in slow.reasons[0]
    assert decide(
        old, judged(0.6, {"a": 0.5, "b": 0.7}, ms=11.5), Bounds(max_latency=None)
    ).promoted
    text = markdown(old, judged(0.6, {"a": 0.45, "b|c": 0.9}), lost, "data.yaml")
    assert "refused" in text and "**no**" in text


def test_latencies_are_medians_of_blocks_in_turn() -> None:
    """A machine that slows down from call to call slows both; an outlier in a block is no matter."""
    now, order = [0.0], []

    def costs(name: str, seconds: float) -> Any:
        def call(photo: int) -> None:
            order.append(name)
            now[0] += seconds * (1 + len(order) / 1000) * (50 if len(order) == 5 else 1)

        return call

    found = alternating_medians(
        {"old": costs("old", 1.0), "new": costs("new", 2.0)}, [1, 2, 3, 4], lambda: now[0]
    )
    assert found["new"] / found["old"] == pytest.approx(2.0, rel=0.02)
    assert order[:18] == ["old", "new", *["old"] * 8, *["new"] * 8] and order[18:20] == ["new"] * 2


# --- options


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["name=pcb"], "nothing to register"),
        (["run=r"], "pass name="),
        (["run=r", "name=../../x"], "without / :"),
        (["run=r", "name=a:b"], "without / :"),
        (["run=r", "name=x", "rollback=true"], "pass one of them"),
        (["name=x", "rollback=true", "to=2"], "exclude each other"),
        (["run=r", "name=x", "min_gian=0.1"], "min_gain"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        load(arguments, RegisterConfig)


# --- champions, in SQLite


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    yield f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def client(database: str, request: pytest.FixtureRequest) -> MlflowClient:
    client = connect(database, create=True)
    client.create_registered_model(request.node.name)
    for _ in range(4):
        client.create_model_version(request.node.name, "file:///nowhere")
    return client


def test_the_way_back_passes_over_what_was_deleted(
    client: MlflowClient, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    assert aliases.crown(client, name, "1", None)
    assert aliases.crown(client, name, "2", "1")
    assert not aliases.crown(client, name, "3", "1"), "somebody was quicker"
    assert aliases.version_of(client, name) == "2"
    assert aliases.crown(client, name, "3", "2") and aliases.crown(client, name, "4", "3")
    client.delete_model_version(name, "3")
    assert aliases.uncrown(client, name) == ("4", "2")
    assert aliases.uncrown(client, name) == ("2", "1")
    with pytest.raises(UserError, match="first champion"):
        aliases.uncrown(client, name)


def test_a_champion_set_by_hand_is_part_of_the_history(
    client: MlflowClient, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    aliases.crown(client, name, "1", None)
    client.set_registered_model_alias(name, aliases.CHAMPION, "3")
    assert aliases.crown(client, name, "4", "3")
    assert aliases.uncrown(client, name) == ("4", "3")


def test_a_lease_is_one_holder_s(client: MlflowClient, request: pytest.FixtureRequest) -> None:
    name, inside, most = request.node.name, [0], [0]

    def work() -> None:
        own = connect(str(client.tracking_uri), create=False)
        with aliases.lease(own, name):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.2)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most[0], inside[0]) == (1, 0)
    assert aliases.LEASE not in client.get_registered_model(name).tags


# --- nothing half-registered


def registry_of(database: str, run: Path) -> ModelRegistry:
    return ModelRegistry(
        load([f"run={run}", "name=undone", f"mlflow.uri={database}"], RegisterConfig)
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return save_run(folder / "run", make_dataset(folder / "data"), 0.0)


def test_a_failure_takes_the_version_back(database: str, run_folder: Path, tmp_path: Path) -> None:
    registry = registry_of(database, run_folder)
    onnx = tmp_path / "model.onnx"
    onnx.write_bytes(b"not looked into")
    made = Package(registry.candidate(tmp_path / "run"), onnx, ("a", "b", "c"), "digest")
    comparison = Comparison(None, judged(0.5), Verdict(True), "data.yaml")
    client = connect(database, create=False)
    with (
        pytest.raises(ZeroDivisionError),
        registry.registered(made, comparison, tmp_path / "p") as version,
    ):
        (pending,) = client.search_model_versions("name='undone'")
        assert pending.tags["gate.result"] == "pending" and str(pending.version) == version.number
        raise ZeroDivisionError
    assert client.search_registered_models("name='undone'") == []
    experiment = client.get_experiment_by_name("yolo_ray")
    assert experiment is not None
    assert client.search_logged_models([experiment.experiment_id]).to_list() == []
    assert client.search_runs([experiment.experiment_id]) == []


def test_a_store_that_refuses_files_is_named(run_folder: Path, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'db' / 'mlflow.db'}"
    registry = registry_of(database, run_folder)
    onnx = tmp_path / "model.onnx"
    onnx.write_bytes(b"not looked into")
    made = Package(registry.candidate(tmp_path / "run"), onnx, ("a", "b", "c"), "digest")
    comparison = Comparison(None, judged(0.5), Verdict(True), "data.yaml")
    connect(database, create=True).create_experiment("yolo_ray", "file:///proc/no-room-here")
    with pytest.raises(UserError, match="nothing was registered"):
        with registry.registered(made, comparison, tmp_path / "p"):
            pytest.fail("it was registered")
    assert MlflowClient(database).search_registered_models() == []


@pytest.mark.parametrize(
    ("run", "text"), [("nowhere", "neither the folder"), ("empty", "config.yaml")]
)
def test_what_is_no_run(run: str, text: str, tmp_path: Path, database: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=text):
        registry_of(database, tmp_path / run)


# --- the code that serves


def test_served_suppression_and_letterbox_are_ours() -> None:
    generator = np.random.default_rng(0)
    centre, extent = generator.uniform(10, 80, (2, 400)), generator.uniform(5, 30, (2, 400))
    answer = np.concatenate([centre, extent, generator.uniform(0, 1, (3, 400))]).astype(np.float32)
    boxes = np.concatenate([centre - extent / 2, centre + extent / 2]).T.astype(np.float32)[None]
    scores = torch.from_numpy(answer[4:].T.copy())[None]
    wanted = detect_nms(torch.from_numpy(boxes), scores, conf=0.3, iou=0.5, max_det=50)[0].numpy()
    found = served_model.suppress(*served_model.candidates(answer, 0.3), iou=0.5, max_det=50)
    assert len(found) == 50
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    square, scale, padding = served_model.letterbox(np.zeros((50, 100, 3), np.uint8), SIDE)
    assert square.shape == (SIDE, SIDE, 3) and padding.tolist() == [0, 24]
    assert scale.tolist() == [0.96, 0.96] and (square[:24] == 114).all()


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (np.zeros((4, 4), np.uint8), "photo 7 is uint8"),
        (np.zeros((4, 4, 3), np.float32), "photo 7 is float32"),
        (b"no jpeg", "photo 7 cannot be decoded"),
        ("~", "no base64"),
        (b"", "cannot be decoded"),
    ],
)
def test_what_is_no_photo_is_named(item: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        served_model.as_photo(item, 7)


# --- secrets and strangers' files


def test_secrets_travel_pickled_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in access_of(os.environ):  # this machine's own
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hush")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    tracker = RunTracker("http://127.0.0.1:9", "r", tmp_path)
    assert "hush" not in repr(tracker)
    assert access_of(os.environ) == {"MLFLOW_TRACKING_TOKEN": "hush"}
    content = pickle.dumps(tracker)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    there = pickle.loads(content)
    there.warn = lambda text: None
    there.metrics({"x": 1.0}, step=1)
    assert os.environ["MLFLOW_TRACKING_TOKEN"] == "hush"
    there.close(timeout_s=0.1)


def test_access_to_server_and_its_store_travels_and_nothing_else() -> None:
    travels = {
        "MLFLOW_TRACKING_TOKEN": "t",
        "MLFLOW_S3_ENDPOINT_URL": "http://store",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AZURE_STORAGE_ACCESS_KEY": "a",
    }
    stays = {"MLFLOW_TRACKING_URI": "http://x", "AWS_PROFILE": "mine", "HOME": "/root", "PATH": ""}
    assert access_of(travels | stays) == travels


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="MLFLOW_TRACKING_USERNAME") as told:
        absolute_uri("https://me:hush@server/mlflow", Path("runs"))
    assert "hush" not in str(told.value)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_strangers_weights_run_no_code(tmp_path: Path) -> None:
    trap = tmp_path / "trap.pt"
    torch.save({"model": Trap(tmp_path / "sprung")}, trap)
    with pytest.raises(UserError):
        load_detector(trap)
    assert not (tmp_path / "sprung").exists()
    assert detector_of(0.0).names == ("scratch", "dent", "stain")
