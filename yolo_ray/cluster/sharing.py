"""How many trials of a study run at a time, and what each takes of the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from yolo_ray.cluster.preflight import Placement, gpu_places, place_on
from yolo_ray.config.schema import ClusterConfig
from yolo_ray.config.tune import TuneOptions
from yolo_ray.errors import UserError

# What Ray Tune's own process of a trial holds while its workers train: it waits. Ray refuses zero.
ACTOR_CPUS = 0.01
CPUS_OF_A_TRIAL = 4  # on CPUs, for each worker: fewer and larger trials learn sooner whom to stop


@dataclass(frozen=True)
class Sharing:
    """``concurrent`` trials at a time, each with a ``placement`` of its own."""

    concurrent: int
    placement: Placement

    @property
    def cpus(self) -> float:
        """Of everything that runs at a time."""
        one = self.placement.workers * (self.placement.cpus + self.placement.data.cpus)
        return self.concurrent * one

    def sentence(self) -> str:
        """What was decided, for people."""
        return f"{self.concurrent} trial(s) at a time, each with {self.placement.sentence()}"


def share_on(
    nodes: list[dict[str, float]], cluster: ClusterConfig, options: TuneOptions
) -> Sharing:
    """Share given nodes between trials: a pure function. ``cluster.workers`` are those of one trial.

    Raises:
        UserError: what was asked for does not fit, with what would.
    """
    gpus = _gpus_of_a_worker(cluster, options)
    places = gpu_places(nodes, gpus)
    use_gpu = cluster.gpu is True or (cluster.gpu == "auto" and places >= cluster.workers)
    if options.gpu_per_trial != "auto" and places < cluster.workers:
        raise UserError(
            f"tune.gpu_per_trial={options.gpu_per_trial:g}: the cluster's GPUs hold {places} worker(s) of that size, a "
            f"trial has {cluster.workers}: add GPUs, or leave it out to train on CPUs"
        )
    cluster = cluster.model_copy(update={"gpu": use_gpu})
    wanted = _wanted(nodes, cluster, options, places)
    most = next((n for n in range(wanted, 0, -1) if _fits(nodes, cluster, n, gpus)), 0)
    if most == 0:
        _placed(nodes, cluster, 1, gpus)  # says what one trial lacks
    if most < wanted and (options.max_concurrent != "auto" or options.scheduler == "pbt"):
        raise UserError(_too_many(nodes, cluster, wanted, most, options))
    return Sharing(most, _placed(nodes, cluster, most, gpus))


def _gpus_of_a_worker(cluster: ClusterConfig, options: TuneOptions) -> float:
    wanted = options.gpu_per_trial
    if wanted == "auto":
        return 1.0
    if cluster.gpu is False:
        raise UserError(
            f"tune.gpu_per_trial={wanted:g} with cluster.gpu=false: leave one of them out"
        )
    each = wanted / cluster.workers
    if each < 1 and cluster.workers > 1:  # NCCL takes no two ranks on one GPU
        raise UserError(
            f"tune.gpu_per_trial={wanted:g} is less than a GPU for each of the {cluster.workers} workers of a trial: "
            f"use tune.workers_per_trial=1, or tune.gpu_per_trial={cluster.workers}"
        )
    if each > 1:
        raise UserError(
            f"tune.gpu_per_trial={wanted:g} is more than a GPU for each worker, which trains on one: use "
            f"tune.gpu_per_trial={cluster.workers}, or more tune.workers_per_trial"
        )
    return each


def _wanted(
    nodes: list[dict[str, float]], cluster: ClusterConfig, options: TuneOptions, places: int
) -> int:
    """Trials at a time before it is known whether their CPUs fit."""
    trials = options.num_samples
    if options.scheduler == "pbt":
        if options.max_concurrent != "auto" and options.max_concurrent < trials:
            raise UserError(
                f"tune.scheduler=pbt trains all its {trials} trials (tune.num_samples) at a time: set "
                f"tune.max_concurrent={trials}, or tune.num_samples={options.max_concurrent}"
            )
        return trials
    if options.max_concurrent != "auto":
        return min(options.max_concurrent, trials)
    if cluster.gpu:
        return max(1, min(trials, places // cluster.workers))
    total = sum(node.get("CPU", 0.0) for node in nodes)
    return max(1, min(trials, math.floor(total / (CPUS_OF_A_TRIAL * cluster.workers))))


def _fits(nodes: list[dict[str, float]], cluster: ClusterConfig, trials: int, gpus: float) -> bool:
    try:
        _placed(nodes, cluster, trials, gpus)
    except UserError:
        return False
    return True


def _placed(
    nodes: list[dict[str, float]], cluster: ClusterConfig, trials: int, gpus: float
) -> Placement:
    """The placement of one of so many trials."""
    # A trial's own process may lie on any node.
    left = [node | {"CPU": node.get("CPU", 0.0) - trials * ACTOR_CPUS} for node in nodes]
    update: dict[str, object] = {"workers": trials * cluster.workers}
    if cluster.data_cpus != "auto":
        update["data_cpus"] = trials * cluster.data_cpus
    together = place_on(left, cluster.model_copy(update=update), gpus)
    data = replace(together.data, strict=together.data.strict or trials > 1)
    return replace(together, workers=cluster.workers, data=data)


def _too_many(
    nodes: list[dict[str, float]],
    cluster: ClusterConfig,
    wanted: int,
    most: int,
    options: TuneOptions,
) -> str:
    cpus = sum(node.get("CPU", 0.0) for node in nodes)
    total_gpus = sum(node.get("GPU", 0.0) for node in nodes)
    has = f"{cpus:g} CPUs" + (f" and {total_gpus:g} GPUs" if total_gpus else "")
    name = "tune.num_samples" if options.scheduler == "pbt" else "tune.max_concurrent"
    return (
        f"{wanted} trials at a time with {cluster.workers} worker(s) each do not fit the cluster, which has {has} on "
        f"{len(nodes)} node(s): lower {name} to {most}, or add nodes"
    )
