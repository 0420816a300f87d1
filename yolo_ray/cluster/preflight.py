"""Connect to Ray and judge, before anything starts, whether the run fits the cluster."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from yolo_ray.config.schema import WorkersConfig
from yolo_ray.data.pipeline import StreamLimits
from yolo_ray.errors import UserError

MIN_WORKER_CPUS = 0.5
MIN_DATA_CPUS = 0.5
EPSILON = 1e-9
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2**26, 2**31
BUSY_WAIT_S = 30.0
# Written by `ray start` and by nothing else; Ray's own address="auto" also finds what other drivers started.
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
# What must be set before libraries are imported in workers and tasks; the doors explain each.
WORKER_ENV = {
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "YOLO_OFFLINE": "true",
    "YOLO_AUTOINSTALL": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic only so
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_DATA_LOG_LEVEL": "WARNING",  # by default 50 KB of its log for each chunk of photos
}


@dataclass(frozen=True)
class Placement:
    """What each worker takes and what is left for reading photos.

    Attributes:
        cpus: logical CPUs of one worker.
        threads: torch threads of one worker.
        data: the decode tasks' share of one worker.
        gpus: of one worker where there are GPUs; less than one: it shares its GPU with other runs.
    """

    workers: int
    use_gpu: bool
    cpus: float
    threads: int
    data: StreamLimits
    gpus: float = 1.0

    def sentence(self) -> str:
        """What was decided, for people."""
        kind = "GPU" if self.use_gpu else "CPU"
        part = f" on {self.gpus:g} of a GPU" if self.use_gpu and self.gpus < 1 else ""
        return (
            f"{self.workers} {kind} worker(s){part} with {self.cpus:g} CPUs each, "
            f"{self.data.cpus:g} CPUs each for reading photos"
        )


def connect(address: str | None) -> None:
    """Join the cluster at ``address`` (or RAY_ADDRESS, or one that ``ray start`` began here), or start a local one.

    A local cluster that another run started for itself is never joined: it would end with that run.

    Raises:
        UserError: no cluster answers there.
    """
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    # No secret: Ray writes these to its logs. Access to stores travels with the Records, to MLflow with the tracker.
    options["runtime_env"] = {"env_vars": WORKER_ENV}
    handled = callable(signal.getsignal(signal.SIGTERM))  # by entry.run, or who else calls this
    target = address or os.environ.get("RAY_ADDRESS") or _started_here()
    try:
        if target and target != "local":
            ray.init(address=target, **options)
        else:
            ray.init(
                address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **options
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        raise UserError(
            f"no Ray cluster answers at {target or 'this machine'} ({reason}): start one with `ray start --head`, "
            "correct cluster.address (local starts one of its own), or set RAY_AUTH_MODE as the cluster has it"
        ) from error
    if handled and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM while Ray is waited for, which passes on no other exception; its own handler aborts the process."""
    raise KeyboardInterrupt("stopped by SIGTERM; run again to go on")


def _started_here() -> str | None:
    """Where a cluster runs that ``ray start`` began on this machine: its address file, if somebody listens there."""
    try:
        host, port = CURRENT_CLUSTER.read_text().strip().rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=2):
            return f"{host}:{port}"
    except (OSError, ValueError):
        return None


def place(cluster: WorkersConfig) -> Placement:
    """Share the cluster's CPUs and GPUs between workers and photo reading.

    Raises:
        UserError: the cluster is too small, or other jobs hold what this run needs; the message says what is missing.
    """
    placement = place_on(living_nodes(), cluster)
    wait_for_cpus(placement.workers * (placement.cpus + placement.data.cpus))
    return placement


def living_nodes() -> list[dict[str, float]]:
    """The resources of every node that is there."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def wait_for_cpus(needed: float) -> None:
    """Until that many CPUs are free.

    Raises:
        UserError: other jobs hold them for longer than what has ended may.
    """
    end = time.monotonic() + BUSY_WAIT_S  # what ended a moment ago still holds its CPUs
    while (free := ray.available_resources().get("CPU", 0.0)) < needed - EPSILON:
        if time.monotonic() > end:
            raise UserError(
                f"this run takes {needed:g} CPUs and other jobs leave {free:g} free: two runs that share CPUs would "
                "starve each other of photos; wait for them, set cluster.cpus_per_worker and cluster.data_cpus lower, "
                "or give this run a cluster of its own with cluster.address=local"
            )
        time.sleep(0.5)


def place_on(nodes: list[dict[str, float]], cluster: WorkersConfig, gpus: float = 1.0) -> Placement:
    """``place`` for given node resources: a pure function. ``gpus``: what a worker takes where there are any."""
    workers, use_gpu = cluster.workers, _uses_gpu(nodes, cluster, gpus)
    # 0: the nodes are asked for no GPUs
    shares = _shares(nodes, cluster, workers, gpus if use_gpu else 0.0)
    if shares is None:
        raise UserError(_missing(nodes, cluster, gpus if use_gpu else 0.0))
    cpus, data_cpus = shares
    each = data_cpus / workers
    store = sum(node.get("object_store_memory", 0.0) for node in nodes)
    limits = StreamLimits(
        each, min(1.0, each), MIN_CHUNK_BYTES, apart=use_gpu, strict=cluster.data_cpus != "auto"
    )
    # All chunks of a stream then take a quarter of the store at most: an evaluation has a stream too, while that of
    # training holds what it read ahead, and the rest is for what else is in flight.
    share = store / (4 * (1 + limits.ahead) * workers)
    chunk_bytes = int(min(max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES))
    limits = replace(limits, chunk_bytes=chunk_bytes)
    return Placement(workers, use_gpu, cpus, max(1, int(cpus)), limits, gpus)


def _uses_gpu(nodes: list[dict[str, float]], cluster: WorkersConfig, gpus: float) -> bool:
    # How many workers the GPUs hold: as many as there are GPUs, if each takes one.
    workers, total_gpus = cluster.workers, gpu_places(nodes, gpus)
    if cluster.gpu == "auto":
        return total_gpus >= workers
    if cluster.gpu and total_gpus < workers:
        raise UserError(
            f"cluster.workers={workers} with cluster.gpu=true need {workers} GPUs, the cluster has {total_gpus}: "
            f"lower cluster.workers to {total_gpus}, add nodes, or set cluster.gpu=false"
            if total_gpus
            else "cluster.gpu=true but the cluster has no GPU: set cluster.gpu=auto to train on CPUs"
        )
    return cluster.gpu


def _shares(
    nodes: list[dict[str, float]], cluster: WorkersConfig, workers: int, gpus: float
) -> tuple[float, float] | None:
    """CPUs of one worker and of all photo reading; None if they do not fit.

    A worker's CPUs (and GPU) lie on one node. What they leave is spread over at most as many nodes as there are
    workers, or a node is empty: so a reading task, which takes no more than one worker's part, always finds room.
    """
    total, use_gpu = sum(node.get("CPU", 0.0) for node in nodes), gpus > 0
    least_cpus, least_data = _least(cluster)
    # On CPUs training is the bottleneck and reading photos a trifle; on GPUs it is the other way round.
    data_cpus = float(total - workers if use_gpu else max(1.0, total // 8))
    data_cpus = max(least_data, min(data_cpus, total - workers * least_cpus))
    if cluster.data_cpus != "auto":
        data_cpus = least_data
    choices = [least_cpus]
    if cluster.cpus_per_worker == "auto":
        share = (total - data_cpus) / workers
        whole = math.floor(min(1.0, share) if use_gpu else share)
        choices = [float(number) for number in range(whole, 0, -1)] + choices
    for cpus in choices:
        left = total - workers * cpus
        if _fitting(nodes, cpus, gpus) >= workers and left >= data_cpus - EPSILON:
            return cpus, left if cluster.data_cpus == "auto" else data_cpus
    return None


def _least(cluster: WorkersConfig) -> tuple[float, float]:
    """The fewest CPUs of one worker and of all photo reading that the options allow."""
    cpus = MIN_WORKER_CPUS if cluster.cpus_per_worker == "auto" else cluster.cpus_per_worker
    return cpus, MIN_DATA_CPUS if cluster.data_cpus == "auto" else cluster.data_cpus


def gpu_places(nodes: list[dict[str, float]], gpus: float) -> int:
    """How many workers of ``gpus`` GPUs each the nodes hold, whatever their CPUs."""
    return sum(_held(node, gpus) for node in nodes)


def _held(node: dict[str, float], gpus: float) -> int:
    """How many workers of ``gpus`` GPUs a node holds; those of a part of one do not lie across two."""
    whole = math.floor(node.get("GPU", 0.0) + EPSILON)
    return whole * math.floor(1 / gpus + EPSILON) if gpus < 1 else math.floor(whole / gpus)


def _fitting(nodes: list[dict[str, float]], cpus: float, gpus: float) -> int:
    """How many workers of ``cpus`` CPUs and ``gpus`` GPUs the nodes hold."""
    by_cpus = ((node, math.floor(node.get("CPU", 0.0) / cpus + EPSILON)) for node in nodes)
    return sum(min(count, _held(node, gpus)) if gpus else count for node, count in by_cpus)


def _fits_without(
    name: str, nodes: list[dict[str, float]], cluster: WorkersConfig, gpus: float
) -> bool:
    free = cluster.model_copy(update={name: "auto"})
    return _shares(nodes, free, cluster.workers, gpus) is not None


def _missing(nodes: list[dict[str, float]], cluster: WorkersConfig, gpus: float) -> str:
    """Why the workers do not fit, and what would."""
    workers, (cpus, data_cpus) = cluster.workers, _least(cluster)
    total = sum(node.get("CPU", 0.0) for node in nodes)
    fewer = (w for w in range(workers - 1, 0, -1) if _shares(nodes, cluster, w, gpus))
    possible = next(fewer, 0)
    remedies = [f"lower cluster.workers to {possible} or add nodes" if possible else "add CPUs"]
    given = [name for name in ("data_cpus", "cpus_per_worker") if getattr(cluster, name) != "auto"]
    if enough := [name for name in given if _fits_without(name, nodes, cluster, gpus)]:
        remedies.insert(0, f"lower cluster.{enough[0]} or leave it out")
    elif given:
        remedies.append(f"lower {' and '.join(f'cluster.{name}' for name in given)}")
    remedy = ", or ".join(remedies)
    beside = ", those to train on the nodes of the GPUs" if gpus else ""
    return (
        f"cluster.workers={workers} needs {workers * cpus + data_cpus:g} CPUs ({workers} x {cpus:g} to train, "
        f"{data_cpus:g} to read photos{beside}), the cluster has {total:g} on {len(nodes)} node(s): {remedy}"
    )
