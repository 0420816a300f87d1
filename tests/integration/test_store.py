"""Training from an object store on a real cluster: keys reach the tasks, and nothing that is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import Head
from tests.stores import KEYS, s3_server, upload, use_s3
from tests.synthetic import make_dataset
from yolo_ray.data.packing import PackConfig, pack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def files_of(head: Head, project: Path) -> Iterator[Path]:
    """Every file of the run and its tracking, and every log of the cluster."""
    command = psutil.Process(head.pid).cmdline()
    (session,) = [word.partition("=")[2] for word in command if word.startswith("--temp-dir=")]
    yield from (path for path in project.rglob("*") if path.is_file())
    yield from (path for path in Path(session).rglob("logs/**/*") if path.is_file())


def test_a_run_from_a_store_whose_keys_only_the_driver_has(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``head`` was started without any key. Loose photos to train on, packed ones to validate on."""
    data = make_dataset(tmp_path / "set", train=8, val=4, size=(64, 96))
    pack(PackConfig(data=str(data), out=str(tmp_path / "pack")), lambda line: None)
    with s3_server() as endpoint:
        loose = upload(endpoint, data.parent, "loose", bucket="loose-photos")
        packed = upload(endpoint, tmp_path / "pack", "packed", bucket="packed-photos")
        mixed = tmp_path / "mixed.yaml"
        names = data.read_text()[data.read_text().index("names:") :]
        mixed.write_text(
            f"path: {loose}\ntrain: images/train\nval: {packed}/val.index.npz\n{names}"
        )
        use_s3(monkeypatch, endpoint)
        project = tmp_path / "project"
        outcome = head.run(
            "train", f"data={mixed}", f"project={project}", "epochs=1", "model=yolo11n.yaml",
            "imgsz=64", "batch=4", "cluster.workers=1", "log_steps=1", "val_batch=4",
        )  # fmt: skip
        assert outcome.code == 0, outcome.stderr
        assert (project / "train" / "predictions.jpg").is_file(), "pictures read the store too"
    secret = KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    seen = list(files_of(head, project))
    environments = [path for path in seen if path.name.startswith("runtime_env")]
    logged = b"YOLO_AUTOINSTALL"  # of WORKER_ENV: what Ray is given, it logs
    assert any(logged in path.read_bytes() for path in environments)
    assert [path for path in seen if secret in path.read_bytes()] == []
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in outcome.stderr + str(outcome.result)
    assert any(b"mixed.yaml" in path.read_bytes() for path in seen), "the search finds text"
