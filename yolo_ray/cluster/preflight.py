"""Connect to Ray and judge, before anything starts, whether the run fits the cluster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import ray

from yolo_ray.config.schema import ClusterConfig
from yolo_ray.data.pipeline import StreamLimits
from yolo_ray.errors import UserError

MIN_WORKER_CPUS = 0.5
# What must be set before libraries are imported in workers and tasks; the doors explain each.
WORKER_ENV = {
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "YOLO_OFFLINE": "true",
    "YOLO_AUTOINSTALL": "false",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}


@dataclass(frozen=True)
class Placement:
    """What each worker takes and what is left for reading photos.

    Attributes:
        cpus: logical CPUs of one worker.
        threads: torch threads of one worker.
        data: the decode tasks' share of one worker.
    """

    workers: int
    use_gpu: bool
    cpus: float
    threads: int
    data: StreamLimits

    def sentence(self) -> str:
        """What was decided, for people."""
        kind = "GPU" if self.use_gpu else "CPU"
        return (
            f"{self.workers} {kind} worker(s) with {self.cpus:g} CPUs each, "
            f"{self.data.cpus:g} CPUs each for reading photos"
        )


def connect(address: str | None) -> None:
    """Join the cluster at ``address`` (or RAY_ADDRESS, or the one on this machine), or start a local one.

    Raises:
        UserError: no cluster answers there.
    """
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    options["runtime_env"] = {"env_vars": WORKER_ENV | _carried_env()}
    target = address or os.environ.get("RAY_ADDRESS")
    try:
        if target:
            ray.init(address=target, **options)
            return
        try:
            ray.init(address="auto", **options)
        except ConnectionError:
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = (
            str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        )
        raise UserError(
            f"no Ray cluster answers at {target or 'this machine'} ({reason}): start one with `ray start --head`, "
            "correct cluster.address, or set RAY_AUTH_MODE as the cluster has it"
        ) from error


def _carried_env() -> dict[str, str]:
    """Settings of the caller's that workers on other nodes need too."""
    return {name: os.environ[name] for name in ("MLFLOW_TRACKING_TOKEN",) if name in os.environ}


def place(cluster: ClusterConfig, *, batch: int) -> Placement:
    """Share the cluster's CPUs and GPUs between workers and photo reading.

    Raises:
        UserError: the cluster is too small; the message says what is missing.
    """
    if batch < cluster.workers:
        raise UserError(
            f"batch={batch} is smaller than cluster.workers={cluster.workers}: each worker needs a photo a step; "
            "raise batch or lower cluster.workers"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return place_on(nodes, cluster)


def place_on(nodes: list[dict[str, float]], cluster: ClusterConfig) -> Placement:
    """``place`` for given node resources: a pure function."""
    total_cpus = sum(node.get("CPU", 0.0) for node in nodes)
    total_gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    workers = cluster.workers
    use_gpu = total_gpus >= workers if cluster.gpu == "auto" else bool(cluster.gpu)
    if use_gpu and total_gpus < workers:
        raise UserError(
            f"cluster.workers={workers} with cluster.gpu=true need {workers} GPUs, the cluster has {total_gpus}: "
            f"lower cluster.workers to {total_gpus}, add nodes, or set cluster.gpu=false"
            if total_gpus
            else "cluster.gpu=true but the cluster has no GPU: set cluster.gpu=auto to train on CPUs"
        )
    # On CPUs training is the bottleneck and reading photos a trifle; on GPUs it is the other way round.
    data_cpus = cluster.data_cpus
    if data_cpus == "auto":
        data_cpus = total_cpus - workers if use_gpu else max(1.0, total_cpus // 8)
        data_cpus = max(1.0, min(data_cpus, total_cpus - workers * MIN_WORKER_CPUS))
    cpus = cluster.cpus_per_worker
    if cpus == "auto":
        share = (total_cpus - data_cpus) / workers
        cpus = min(1.0, share) if use_gpu else share
        cpus = (
            float(math.floor(cpus))
            if cpus >= 1
            else (MIN_WORKER_CPUS if share >= MIN_WORKER_CPUS else 0.0)
        )
    fits = sum(math.floor(node.get("CPU", 0.0) / cpus + 1e-9) for node in nodes) if cpus else 0
    needed = workers * max(cpus, MIN_WORKER_CPUS) + data_cpus
    if fits < workers or needed > total_cpus + 1e-9:
        possible = max(0, math.floor((total_cpus - 1) / max(cpus, MIN_WORKER_CPUS)))
        remedy = f"lower cluster.workers to {possible} or add nodes" if possible else "add CPUs"
        raise UserError(
            f"cluster.workers={workers} need {needed:g} CPUs ({workers} x {max(cpus, MIN_WORKER_CPUS):g} to train, "
            f"{data_cpus:g} to read photos), the cluster has {total_cpus:g}: {remedy}"
        )
    each = data_cpus / workers
    task = min(1.0, each)
    return Placement(workers, use_gpu, cpus, max(1, int(cpus)), StreamLimits(each, task))
