"""Pipelines as Ray jobs: the code goes along, the last JSON line is in the log, a stopped job leaves all it has."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.conftest import BIN, ROOT, SMALL, Head, Outcome, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Jobs = Callable[..., str]
PIPELINES = sorted(path.stem for path in (ROOT / "pipelines").glob("[!_]*.py"))


@pytest.fixture(scope="module")
def jobs(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """``ray job X ...`` of a user in a checkout, who is told the dashboard's address; what it printed."""
    code = tmp_path_factory.mktemp("checkout")
    for name in ("yolo_ray", "pipelines", "configs"):
        shutil.copytree(ROOT / name, code / name)
    shutil.copyfile(ROOT / ".rayignore", code / ".rayignore")
    (code / "datasets").mkdir()
    (code / "datasets" / "large.bin").write_bytes(bytes(2**20))
    env = {k: v for k, v in head.env.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}

    def call(verb: str, *arguments: str) -> str:
        command = [str(BIN / "ray"), "job", verb, "--address", head.dashboard, *arguments]
        done = subprocess.run(
            command, cwd=code, env=env, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        return done.stdout + done.stderr

    return call


def last_json(log: str) -> dict[str, Any]:
    return json.loads([line for line in log.splitlines() if line.startswith("{")][-1])


@pytest.mark.slow
def test_a_stopped_job_leaves_a_checkpoint_and_a_killed_run(
    jobs: Jobs, data: Path, tmp_path: Path
) -> None:
    options = (f"data={data}", f"project={tmp_path}", "epochs=2000", "val_period=2000", *SMALL)
    submit = ("--no-wait", "--submission-id", "stopped", "--working-dir", ".", "--")
    jobs("submit", *submit, "python", "-m", "pipelines.train", *options, "cluster.workers=1")
    run = tmp_path / "train"

    def steps() -> int:
        path = run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum('"step"' in line for line in lines)

    wait_for(lambda: steps() >= 3, 180, "three steps")
    assert "Job 'stopped' was stopped" in jobs("stop", "stopped")
    assert last_json(jobs("logs", "stopped"))["exit"] == 75
    assert list((run / "checkpoints").glob("step_*.pt"))
    tracked = json.loads((run / "mlflow.json").read_text())
    assert MlflowClient(tracked["uri"]).get_run(tracked["run_id"]).info.status == "KILLED"


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_is_a_job(jobs: Jobs, pipeline: str) -> None:
    """Each starts from the uploaded code and tells of a mistake in its last JSON line."""
    name = f"mistake-{pipeline}"
    wrong = ("--out", "/proc/no") if pipeline == "fetch" else ("nonsense=1",)
    submit = ("--submission-id", name, "--working-dir", ".", "--", "python", "-m")
    told = jobs("submit", *submit, f"pipelines.{pipeline}", *wrong)
    assert "FAILED" in told or "failed" in told
    result = last_json(jobs("logs", name))
    assert result["exit"] in (1, 2) and result["error"]
    assert (result["exit"] == 2) == (pipeline != "fetch")


@pytest.mark.slow
def test_the_pipelines_that_follow_a_training(
    jobs: Jobs, data: Path, trained: tuple[Path, Outcome, str], tmp_path: Path
) -> None:
    """The folder of data is ignored; nothing is written but where paths say so."""
    run, _, _ = trained
    calls = {
        "pack": (f"data={data}", f"out={tmp_path / 'pack'}"),
        "evaluate": (f"weights={run / 'weights' / 'best.pt'}", f"data={data}", "val_batch=4"),
        "register": (f"run={run}", "name=job", "val_batch=4"),
        "export": (f"weights={run}", f"out={tmp_path / 'x.onnx'}"),
        "predict": (f"weights={run}", f"source={data}", f"out={tmp_path / 'found'}"),
    }
    for pipeline, options in calls.items():
        submit = ("--submission-id", pipeline, "--working-dir", ".", "--", "python", "-m")
        jobs("submit", *submit, f"pipelines.{pipeline}", *options)
        result = last_json(jobs("logs", pipeline))
        assert result["exit"] == 0, result
    place = ("import os", "print('{\"large\": %d}' % os.path.exists('datasets/large.bin'))")
    ls = ("--submission-id", "ls", "--working-dir", ".", "--", "python", "-c")
    jobs("submit", *ls, f'"{"; ".join(place)}"')
    assert last_json(jobs("logs", "ls")) == {"large": 0}
