"""The registry and its gate against a real MLflow server, and the champion where nothing of ours is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.register import main
from tests.integration.conftest import SMALL, Head
from tests.integration.test_store import files_of
from tests.registered import NAMES, SIDE, detector_of, save_run, truth_data
from tests.tracking import TOKEN, locked_door, mlflow_server
from yolo_ray.errors import UserError
from yolo_ray.export.check import images_of, made_up_photos
from yolo_ray.model.detect import decode, detect_nms

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# The latency of a network this small is noise on a busy machine.
GATE = ("name=pcb", "max_class_drop=0.05", "max_latency=null", "cluster.workers=1", "val_batch=4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow behind a door; only its own environment lets a client in."""
    with (
        mlflow_server(tmp_path_factory.mktemp("server")) as upstream,
        locked_door(upstream) as door,
    ):
        before = os.environ.get("MLFLOW_TRACKING_TOKEN")
        os.environ["MLFLOW_TRACKING_TOKEN"] = TOKEN
        yield door
        os.environ.pop("MLFLOW_TRACKING_TOKEN")
        if before is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = before


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return truth_data(tmp_path_factory.mktemp("truth") / "data")


def client_of(server: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server)


def test_the_way_of_a_champion(head: Head, server: str, data: Path, tmp_path: Path) -> None:
    def register(noise: float) -> Any:
        run = save_run(tmp_path / f"noise{noise}", data, noise)
        return head.run("register", f"run={run}", f"mlflow.uri={server}", *GATE, cwd=cwd)

    cwd = tmp_path / "cwd"
    cwd.mkdir()
    first = register(0.5)
    assert first.code == 0, first.stderr
    assert (first.result["version"], first.result["alias"]) == ("1", "champion")
    better = register(0.0)
    assert better.code == 0, better.stderr
    assert better.result["champion"] == "2"
    assert better.result["map50_95"] > better.result["before"]["map50_95"] > 0
    assert "promoted to @champion" in better.stderr
    worse = register(1.0)
    assert worse.code == 3 and worse.result["exit"] == 3, worse.stderr
    assert worse.result["alias"] == "challenger" and worse.result["champion"] == "2"
    assert "better is asked" in worse.stderr and "Traceback" not in worse.stderr

    client = client_of(server)
    assert str(client.get_model_version_by_alias("pcb", "champion").version) == "2"
    refused = client.get_model_version_by_alias("pcb", "challenger")
    assert str(refused.version) == "3" and refused.tags["gate.result"] == "refused"
    assert "refused by the gate" in refused.description and "| mAP50-95 |" in refused.description
    assert list(cwd.iterdir()) == [], "MLflow makes a database where it is called, unless told"
    check_described(server)
    check_served(server)

    where = ["name=pcb", f"mlflow.uri={server}"]
    back = main([*where, "rollback=true"])
    assert (back["before"], back["champion"]) == ("2", "1")
    assert str(client.get_model_version_by_alias("pcb", "champion").version) == "1"
    with pytest.raises(UserError, match="pass to=VERSION"):
        main([*where, "rollback=true"])
    assert main([*where, "to=2"])["champion"] == "2"


def check_described(server: str) -> None:
    """What a version tells of itself."""
    import mlflow
    from mlflow.models import get_model_info

    mlflow.set_tracking_uri(server)
    info = get_model_info("models:/pcb@champion")
    assert info.metadata is not None
    assert tuple(info.metadata["names"]) == NAMES and info.metadata["imgsz"] == SIDE
    assert set(info.metadata) >= {"metrics", "val_digest", "data_digest", "git_commit", "config"}
    assert info.signature is not None and "uint8" in str(info.signature.inputs)


def predictions(server: str) -> tuple[np.ndarray, list[dict[str, Any]], list[dict[str, Any]]]:
    """Photos, and what the champion finds in them as an array and as encoded images."""
    import cv2
    import mlflow

    mlflow.set_tracking_uri(server)
    model = mlflow.pyfunc.load_model("models:/pcb@champion")
    photos = made_up_photos(SIDE, 3)
    params = {"conf": 0.05}
    encoded = np.array(
        [cv2.imencode(".png", photo[..., ::-1])[1].tobytes() for photo in photos], object
    )
    return (
        photos,
        model.predict(photos, params),
        model.unwrap_python_model().predict(None, encoded, params),
    )


def check_served(server: str) -> None:
    """The champion's boxes are those of our own evaluation."""
    photos, found, of_encoded = predictions(server)
    assert found == of_encoded
    detector = detector_of(0.0)
    with torch.inference_mode():
        boxes, scores = decode(
            detector(torch.from_numpy(images_of(photos)))[0],
            detector.strides,
            detector.reg_max,
            SIDE,
        )
        wanted = detect_nms(boxes, scores, conf=0.05, iou=0.7, max_det=300)
    assert sum(len(rows) for rows in wanted) > 10
    for rows, answer in zip(wanted, found, strict=True):
        rows = rows.numpy()
        order = np.argsort(-rows[:, 4], kind="stable")
        assert len(answer["boxes"]) == len(rows)
        np.testing.assert_allclose(answer["boxes"], rows[order, :4].clip(0, SIDE), atol=0.1)
        np.testing.assert_allclose(answer["scores"], rows[order, 4], atol=1e-3)


@pytest.mark.slow
def test_nothing_is_left_of_what_fails(head: Head, server: str, data: Path, tmp_path: Path) -> None:
    """Other classes than the champion's, and a server that does not answer: a sentence, no version."""
    names = ("other", "dent", "stain")
    other = truth_data(tmp_path / "other", names=names)
    first = save_run(tmp_path / "first", data, 0.0)
    strange = save_run(tmp_path / "strange", other, 0.0, names)
    where = ("name=left", *GATE[1:])
    assert head.run("register", f"run={first}", f"mlflow.uri={server}", *where).code == 0
    outcome = head.run("register", f"run={strange}", f"mlflow.uri={server}", *where)
    assert outcome.code == 2 and "register it under another name=" in outcome.stderr
    versions = client_of(server).search_model_versions("name='left'")
    assert [str(version.version) for version in versions] == ["1"]
    dead = head.run("register", f"run={first}", "mlflow.uri=http://127.0.0.1:9", *where)
    assert dead.code == 2 and "does not answer" in dead.stderr and "Traceback" not in dead.stderr


@pytest.mark.slow
def test_a_token_reaches_rank_0_and_no_log(
    head: Head, server: str, tmp_path: Path, data: Path
) -> None:
    """Metrics by step come from a worker: it has the token, which Ray and the run write nowhere."""
    outcome = head.run(
        "train", f"data={data}", f"project={tmp_path}", "epochs=1", *SMALL, "cluster.workers=1",
        "batch=2", f"mlflow.uri={server}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    run_id = json.loads((tmp_path / "train" / "mlflow.json").read_text())["run_id"]
    logged = client_of(server).get_run(run_id)
    assert logged.info.status == "FINISHED" and "train/box" in logged.data.metrics
    assert not (tmp_path / "train" / "mlflow_pending.jsonl").exists()
    seen = list(files_of(head, tmp_path))
    assert any(b"YOLO_AUTOINSTALL" in path.read_bytes() for path in seen), "Ray logs environments"
    assert [path for path in seen if TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in outcome.stderr + str(outcome.result)


ELSEWHERE = """
import json, sys
import mlflow, numpy as np
assert "yolo_ray" not in sys.modules
photos = np.load(sys.argv[2])
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/pcb@champion")
found = model.predict(photos, {"conf": 0.05})
try:
    import yolo_ray
except ImportError:
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_fresh_environment_finds_the_same_boxes(
    head: Head, server: str, data: Path, tmp_path: Path
) -> None:
    """Only the logged requirements are installed. Downloads some 200 MB."""
    import mlflow

    run = save_run(tmp_path / "run", data, 0.0)
    name = head.run("register", f"run={run}", f"mlflow.uri={server}", *GATE, "min_gain=-1")
    assert name.code == 0, name.stderr
    photos, found, _ = predictions(server)
    mlflow.set_tracking_uri(server)
    needed = Path(mlflow.pyfunc.get_model_dependencies("models:/pcb@champion"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", needed], check=True)
    np.save(tmp_path / "photos.npy", photos)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "elsewhere.py", server, "photos.npy"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    elsewhere = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum(len(answer["boxes"]) for answer in found) > 10
    assert elsewhere == found
