"""Weights by every name, exported and predicted with, on a real Ray cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from tests.integration.conftest import Head, Outcome, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
SAME = ("map50", "map50_95", "map75", "precision", "recall", "circle/map50_95")


def test_a_run_by_every_name_gives_the_same_metrics(
    trained: tuple[Path, Outcome, str], head: Head, data: Path, tmp_path: Path
) -> None:
    run, outcome, _ = trained
    uri = f"sqlite:///{run.parent}/mlflow.db"
    client = MlflowClient(uri)
    experiments = [found.experiment_id for found in client.search_experiments()]
    (tracked,) = client.search_runs(experiments)
    exported = head.run("export", f"weights={run}", f"out={tmp_path}/x.onnx", f"source={data}")
    assert exported.code == 0, exported.stderr
    assert exported.result["check"]["max_score"] < 1e-3
    for weights, tolerance in (
        (tracked.info.run_id, 0.0),
        (exported.result["file"], 0.01),
    ):
        judged = head.run("evaluate", f"weights={weights}", f"data={data}", f"mlflow.uri={uri}")
        assert judged.code == 0, judged.stderr
        for name in SAME:
            expected = pytest.approx(outcome.result[name], abs=tolerance)
            assert judged.result[name] == expected, (weights, name)


def test_a_killed_prediction_goes_on_to_the_same_result(
    trained: tuple[Path, Outcome, str], head: Head, data: Path, tmp_path: Path
) -> None:
    run, _, _ = trained
    photos = data.parent / "images"
    options = (
        f"weights={run}",
        f"source={photos}",
        "conf=0.001",
        "shard=2",
        "save=parquet,coco,pictures",
    )
    whole = head.run("predict", *options, f"out={tmp_path}/whole")
    assert whole.code == 0, whole.stderr
    process = head.start("predict", *options, f"out={tmp_path}/killed")
    parts = tmp_path / "killed" / "predictions"
    wait_for(lambda: len(list(parts.glob("*.parquet"))) >= 1, 120, "a part")
    process.kill()
    process.wait()
    again = head.run("predict", *options, f"out={tmp_path}/killed")
    assert again.code == 0, again.stderr
    assert again.result["kept_parts"] >= 1
    counts = ("photos", "boxes", "bad", "parts")
    assert {key: again.result[key] for key in counts} == {key: whole.result[key] for key in counts}
    assert again.result["photos"] == len(list(photos.rglob("*.*"))) and again.result["boxes"] > 0
    for part in sorted((tmp_path / "whole" / "predictions").iterdir()):
        assert pq.read_table(part).equals(pq.read_table(parts / part.name)), part.name
    files = [
        sorted(p.name for p in (tmp_path / n / "pictures").iterdir()) for n in ("whole", "killed")
    ]
    assert files[0] == files[1] and len(files[0]) == again.result["photos"]
    coco = json.loads((tmp_path / "killed" / "coco.json").read_text())
    assert len(coco["annotations"]) == again.result["boxes"]
    shutil.rmtree(tmp_path / "killed" / "pictures")
    other = head.run("predict", *options[:2], f"out={tmp_path}/killed", "conf=0.5")
    assert other.code == 2 and "other options" in other.stderr
