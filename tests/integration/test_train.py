"""Training runs on a real Ray cluster, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tests.integration.conftest import BIN, ROOT, SMALL, Head, Outcome, digest_of, wait_for
from tests.synthetic import make_dataset
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.records import load_records

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def runs_of(project: Path) -> list[Any]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments))


def events_of(run: Path) -> Iterator[dict[str, Any]]:
    path = run / "events.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        yield json.loads(line)


def steps_done(run: Path) -> int:
    return sum(event["kind"] == "step" for event in events_of(run))


def test_a_run_leaves_everything(trained: tuple[Path, Outcome, str], data: Path) -> None:
    run, outcome, before = trained
    assert outcome.result["exit"] == 0 and outcome.result["run"] == str(run)
    assert 0 <= outcome.result["map50_95"] <= outcome.result["map50"] <= 1
    for name in (
        "config.yaml", "results.csv", "result.json", "weights/best.pt", "weights/last.pt", "train_batch0.jpg",
        "train_batch2.jpg", "predictions.jpg", "results.png", "pr_curves.png",
        "checkpoints/step_000000006.pt", "checkpoints/best.pt",
    ):  # fmt: skip
        assert (run / name).is_file(), name
    assert len((run / "results.csv").read_text().splitlines()) == 3
    assert digest_of(data.parent) == before, "the user's data was written to"


def test_one_tracking_run_with_everything(trained: tuple[Path, Outcome, str]) -> None:
    run, outcome, _ = trained
    (tracked,) = runs_of(run.parent)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["optim.lr0"] == "0.01" and tracked.data.params["batch"] == "5"
    assert tracked.data.metrics["val/map50_95"] == pytest.approx(outcome.result["map50_95"], abs=1)
    assert {"train/box", "lr", "speed/images_per_s"} <= tracked.data.metrics.keys()
    assert tracked.data.tags["data_digest"]
    client = MlflowClient(f"sqlite:///{run.parent}/mlflow.db")
    history = client.get_metric_history(tracked.info.run_id, "train/box")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]
    files = {
        f.path
        for folder in ("weights", "pictures")
        for f in client.list_artifacts(tracked.info.run_id, folder)
    }
    assert {"weights/best.pt", "pictures/predictions.jpg", "pictures/train_batch0.jpg"} <= files


def test_ultralytics_opens_the_weights(trained: tuple[Path, Outcome, str], data: Path) -> None:
    from ultralytics import YOLO

    run, _, _ = trained
    model = YOLO(run / "weights" / "best.pt")
    assert list(model.names.values()) == ["circle", "square", "triangle"]
    photo = next((data.parent / "images" / "val").iterdir())
    found: Any = model.predict(photo, imgsz=64, conf=0.0, verbose=False)
    assert len(found) == 1 and len(found[0].boxes) > 0


def test_evaluate_prints_the_same_metrics_also_from_a_cache(
    trained: tuple[Path, Outcome, str], head: Head, data: Path, tmp_path: Path
) -> None:
    run, outcome, _ = trained
    judged = head.run(
        "evaluate", f"weights={run / 'weights' / 'best.pt'}", f"data={data}", "cluster.workers=2",
        "cache=disk", f"cache_dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert judged.code == 0, judged.stderr
    assert "data.cache=disk" in judged.stderr
    assert len(list((tmp_path / "cache").glob("*.photos"))) == 1
    same = ("map50", "map50_95", "map75", "precision", "recall", "circle/map50_95")
    assert {k: judged.result[k] for k in same} == {k: outcome.result[k] for k in same}


def test_a_killed_worker_is_survived(head: Head, data: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch: the run ends by itself, on the plan, in one tracking run."""
    options = (
        "epochs=6",
        "save_steps=2",
        "log_samples=true",
        "val_period=3",
        "mosaic=1.0",
        "close_mosaic=0",
    )
    process = head.start("train", f"data={data}", f"project={tmp_path}", *options, *SMALL)
    run = tmp_path / "train"
    wait_for(lambda: steps_done(run) >= 5 or process.poll() is not None, 120, "five steps")
    victims = head.train_workers()
    assert len(victims) >= 2
    os.kill(victims[-1], signal.SIGKILL)
    outcome = head.finish(process)
    assert outcome.code == 0, outcome.stderr
    resumed = [
        event["text"] for event in events_of(run) if "going on from step" in event.get("text", "")
    ]
    assert resumed, "the run did not restart from a checkpoint"
    step = int(resumed[-1].rsplit(" ", 1)[1])
    assert 0 < step < 18

    records = load_records(data, "train", max_bad=0.0)
    plan = Plan(records, seed=0, epochs=6, batch=5, imgsz=64, augment=AugmentConfig(close_mosaic=0))
    for rank in range(2):
        slots = slots_of(rank, 2, 5)
        lines = (run / "samples" / f"rank_{rank}.csv").read_text().splitlines()
        used = {
            int(line.split(",")[0]): [int(i) for i in line.split(",")[1].split()] for line in lines
        }
        assert sorted(used) == list(range(18)), "every step was trained"
        for number, ids in used.items():
            assert ids == plan.images_at(number)[0][slots.start : slots.stop].tolist()
        assert [int(line.split(",")[0]) for line in lines][-(18 - step) :] == list(range(step, 18))
    (tracked,) = runs_of(tmp_path)
    assert tracked.info.status == "FINISHED"


def test_ctrl_c_then_resume_when_the_weights_file_has_gone(
    trained: tuple[Path, Outcome, str], head: Head, data: Path, tmp_path: Path
) -> None:
    model = tmp_path / "mine.pt"
    shutil.copyfile(trained[0] / "weights" / "best.pt", model)
    options = ("epochs=40", "val_period=40", *SMALL, f"model={model}")
    process = head.start("train", f"data={data}", f"project={tmp_path}", *options)
    run = tmp_path / "train"
    wait_for(lambda: steps_done(run) >= 2 or process.poll() is not None, 120, "two steps")
    process.send_signal(signal.SIGINT)
    stopped = head.finish(process)
    assert stopped.code == 75, stopped.stderr
    assert "resume=" in stopped.stderr and "Traceback" not in stopped.stderr
    assert runs_of(tmp_path)[0].info.status == "KILLED"
    newest = max((run / "checkpoints").glob("step_*.pt"))
    step = int(newest.stem.split("_")[1])

    epochs = -(-step // 3) + 1
    record = (run / "config.yaml").read_bytes()
    wrong = head.run("train", f"resume={run}", "model=yolov8n.yaml")
    assert wrong.code == 2 and "another model" in wrong.stderr
    assert (run / "config.yaml").read_bytes() == record, "a refused resume leaves the run as it was"
    assert runs_of(tmp_path)[0].info.status == "KILLED"
    model.unlink()
    again = head.run("train", f"resume={run}", f"epochs={epochs}")
    assert again.code == 0, again.stderr
    assert again.result["steps"] == epochs * 3 and again.result["run"] == str(run)
    (tracked,) = runs_of(tmp_path)
    assert tracked.info.status == "FINISHED"
    said = [event.get("text", "") for event in events_of(run)]
    assert f"going on from step {step}" in said
    assert any(f"the architecture is that of {run}/model/mine.pt" in text for text in said)
    assert any(text.startswith("train: 13 photos with") for text in said)


def test_ray_job_submit(head: Head, data: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "yolo_ray", tmp_path / "code" / "yolo_ray")
    shutil.copytree(ROOT / "pipelines", tmp_path / "code" / "pipelines")

    def submit(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(BIN / "ray"),
            "job",
            "submit",
            "--address",
            head.dashboard,
            "--working-dir",
            ".",
        ]
        command += ["--", "python", "-m", "pipelines.train", *arguments]
        env = {k: v for k, v in head.env.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}
        return subprocess.run(
            command, cwd=tmp_path / "code", env=env, capture_output=True, text=True, timeout=240, check=False
        )  # fmt: skip

    good = submit(
        f"data={data}", f"project={tmp_path}/runs", "epochs=1", *SMALL, "cluster.workers=1"
    )
    assert good.returncode == 0, good.stdout + good.stderr
    assert '"exit": 0' in good.stdout
    assert (tmp_path / "runs" / "train" / "result.json").is_file()
    bad = submit("data=nowhere.yaml", *SMALL)
    assert bad.returncode != 0
    assert '"exit": 2' in bad.stdout


def test_batch_auto_needs_a_gpu(head: Head, data: Path, tmp_path: Path) -> None:
    outcome = head.run("train", f"data={data}", f"project={tmp_path}", *SMALL, "batch=auto")
    assert outcome.code == 2 and "this run has none: set batch" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_the_cluster_has(head: Head, data: Path, tmp_path: Path) -> None:
    outcome = head.run(
        "train", f"data={data}", f"project={tmp_path}", "cluster.workers=9", "batch=9"
    )
    assert outcome.code == 2 and "lower cluster.workers to" in outcome.stderr
    assert "Traceback" not in outcome.stderr and not (tmp_path / "train").exists()


def test_a_photo_lost_during_training(head: Head, tmp_path: Path) -> None:
    """Named in one sentence, exit 2, nothing left RUNNING, checkpoints intact."""
    data = make_dataset(tmp_path / "d", train=13, val=5, size=64)
    options = ("epochs=2000", "val_period=2000", "augment.mosaic=0", "save_steps=2")
    process = head.start("train", f"data={data}", f"project={tmp_path}", *options, *SMALL)
    run = tmp_path / "train"
    wait_for(lambda: steps_done(run) >= 3 or process.poll() is not None, 120, "three steps")
    lost = sorted((tmp_path / "d" / "images" / "train").iterdir())[4]
    lost.unlink()
    outcome = head.finish(process)
    assert outcome.code == 2, outcome.stderr
    assert lost.name in outcome.stderr and "Traceback" not in outcome.stderr
    assert runs_of(tmp_path)[0].info.status == "FAILED"
    assert list((run / "checkpoints").glob("step_*.pt"))


def test_tiny_sets_and_more_ranks_than_validation_photos(head: Head, tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", train=2, val=1, size=64)
    outcome = head.run("train", f"data={data}", f"project={tmp_path}", "epochs=1", *SMALL)
    assert outcome.code == 0, outcome.stderr
    assert np.isfinite(outcome.result["map50"])
