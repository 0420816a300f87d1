"""The demo's plan, and the services that end with it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from demos.release import main, steps
from demos.services import DemoFailed, free_ports, last_json, process
from yolo_ray.config.load import load
from yolo_ray.config.register import RegisterConfig


def test_every_step_is_a_pipeline_that_takes_its_options(tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    planned = steps(tmp_path, data, "http://127.0.0.1:5000")
    for step in planned:
        if step.pipeline == "train":
            assert load(step.options).name == step.name.removeprefix("train-")
        if step.pipeline == "register":
            config = load(step.options, RegisterConfig)
            assert any(f"name={Path(config.run or '').name}" in other.options for other in planned)
    refused = [step.name for step in planned if step.check({"exit": 3})]
    assert refused == ["register-worse"]


def test_the_last_json_of_a_log() -> None:
    log = '{"exit": 1}\nsome text\n{"exit": 3, "name": "x"}\nlater text\n'
    assert last_json(log) == {"exit": 3, "name": "x"}
    with pytest.raises(DemoFailed, match="no JSON"):
        last_json("nothing")


def test_a_service_ends_with_its_context(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with process(command, {}, tmp_path / "log"):
        (running,) = [p for p in psutil.Process().children() if p.cmdline() == command]
        assert running.is_running()
    assert not running.is_running()
    assert len(set(free_ports(4))) == 4


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "no.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "run make data" in capsys.readouterr().err
    (tmp_path / "data.yaml").touch()
    (tmp_path / "summary.json").touch()
    assert main(["--data", str(tmp_path / "data.yaml"), "--out", str(tmp_path)]) == 2
    assert "earlier demo" in capsys.readouterr().err
