"""The captured step inside Ray Train on a real GPU."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.gpu.steps import BATCH, BOXES, CUDA, IMGSZ, assert_equal, make_step, run, state_of
from yolo_ray.bench.scene import make_batches
from yolo_ray.step.graph import GraphedStep
from yolo_ray.step.precision import set_kernels
from yolo_ray.step.reduce import distributed_reduce

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ray.init(
        address="local", include_dashboard=False, num_gpus=1, runtime_env={"env_vars": environment}
    )
    yield
    ray.shutdown()


def three_steps(settings: dict[str, Any]) -> dict[str, Any]:
    """With one rank's own NCCL group: batch statistics and gradients go through captured collectives."""
    set_kernels("fp32", deterministic=True)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl", init_method=f"file://{settings['store']}", rank=0, world_size=1
        )
    batches = make_batches(BATCH, IMGSZ, BOXES, CUDA)
    graphed = GraphedStep(make_step(reduce=distributed_reduce), mode="require")
    eager = make_step()
    for number in range(3):
        run(graphed, batches[number])
        run(eager, batches[number])
    assert_equal(state_of(graphed), state_of(eager))
    graphed.release()
    return {"backend": dist.get_backend(), "replays": graphed.replays}


def test_one_rank_of_nccl_in_ray_train(cluster: None, tmp_path: Path) -> None:
    trainer = TorchTrainer(
        three_steps,
        train_loop_config={"store": str(tmp_path / "store")},
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    found = trainer.fit().return_value
    assert found is not None and found["replays"] == 3 and "nccl" in found["backend"]


def last_json(command: list[str]) -> dict[str, Any]:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_batch_auto_leaves_room_for_all_that_follows(
    tiny_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    """As many photos as there are, here; two kinds of step and the evaluation run with it."""
    data = tiny_dataset(train=24, val=6, size=96)
    command = [sys.executable, "-m", "pipelines.train", f"data={data}", f"project={tmp_path}/runs"]
    command += ["epochs=2", "imgsz=128", "batch=auto", "nbs=48", "graph.mode=require"]
    result = last_json([*command, "mlflow.enabled=false"])
    config = (tmp_path / "runs" / "train" / "config.yaml").read_text()
    assert "batch: 24\n" in config and result["steps"] == 2


@pytest.mark.parametrize(
    "options",
    [
        ["precision=fp16", "micro_batch=3", "freeze=2"],
        ["multi_scale=0.5", "mixup=0.5"],
        # One shape: each takes torch.compile a minute or more.
        ["graph.compile=step", "optimizer=MuSGD", "nbs=6", "mosaic=0"],
        ["data.decode=gpu", "augment.albumentations=false"],
    ],
)
def test_every_step_of_a_run_is_a_replay(
    options: list[str], tiny_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data = tiny_dataset(train=24, val=6, size=96)
    command = [sys.executable, "-m", "pipelines.train", f"data={data}", f"project={tmp_path}/runs"]
    command += ["epochs=3", "imgsz=128", "batch=6", "graph.mode=require", "mlflow.enabled=false"]
    result = last_json([*command, *options])
    with open(tmp_path / "runs" / "train" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert result["steps"] == 12 and int(float(rows[-1]["graph/replays"])) == 12
    assert torch.isfinite(torch.tensor([float(row["train/box"]) for row in rows])).all()
