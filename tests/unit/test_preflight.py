"""How a cluster's CPUs and GPUs are shared: a pure function of its nodes and the options."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from yolo_ray.cluster.folder import claimed
from yolo_ray.cluster.launch import check_device
from yolo_ray.cluster.preflight import place_on
from yolo_ray.cluster.worker import Here, _compile_option
from yolo_ray.config.load import load
from yolo_ray.config.schema import ClusterConfig, EvaluateConfig, TrainConfig
from yolo_ray.data.pipeline import StreamLimits
from yolo_ray.errors import UserError
from yolo_ray.train.events import EventLog

Nodes = list[dict[str, float]]


def cpu_nodes(*counts: float) -> Nodes:
    return [{"CPU": float(count), "memory": 1e9} for count in counts]


def shares(nodes: Nodes, workers: int, **options: Any) -> tuple[float, float]:
    """CPUs of one worker and of all photo reading."""
    placement = place_on(nodes, ClusterConfig(workers=workers, **options))
    return placement.cpus, placement.data.cpus * workers


@pytest.mark.parametrize(
    ("cpus", "workers", "expected"),
    [
        (1, 1, (0.5, 0.5)),
        (2, 1, (1.0, 1.0)),
        (2, 2, (0.5, 1.0)),
        (2, 3, (0.5, 0.5)),
        (4, 1, (3.0, 1.0)),
        (4, 2, (1.0, 2.0)),
        (4, 4, (0.5, 2.0)),
        (16, 1, (14.0, 2.0)),
        (16, 4, (3.0, 4.0)),
        (16, 16, (0.5, 8.0)),
        (64, 2, (28.0, 8.0)),
        (64, 64, (0.5, 32.0)),
    ],
)
def test_one_machine(cpus: int, workers: int, expected: tuple[float, float]) -> None:
    assert shares(cpu_nodes(cpus), workers) == pytest.approx(expected)


def test_nothing_is_idle_and_nothing_is_promised_twice() -> None:
    for cpus, workers in itertools.product((1, 2, 3, 4, 6, 16, 64), range(1, 20)):
        try:
            worker, data = shares(cpu_nodes(cpus), workers)
        except UserError:
            assert workers * 0.5 + 0.5 > cpus
            continue
        assert workers * worker + data == pytest.approx(cpus)
        assert worker >= 0.5 and data >= 0.5


def test_a_reading_task_finds_room_on_a_node() -> None:
    """Whatever node each worker lies on, some node has a task's CPUs left."""
    for counts in ((2, 2), (3, 1, 1, 1), (4, 1), (8, 2, 2), (1, 1, 1), (16, 4)):
        for workers in range(1, 6):
            placement = place_on(cpu_nodes(*counts), ClusterConfig(workers=workers))
            for nodes in itertools.product(range(len(counts)), repeat=workers):
                left = [count - nodes.count(i) * placement.cpus for i, count in enumerate(counts)]
                if min(left) >= 0:
                    assert max(left) >= placement.data.task_cpus - 1e-9


def test_a_worker_lies_on_one_node() -> None:
    assert shares(cpu_nodes(3, 1, 1, 1), 2) == (1.0, 4.0)  # two of 2 CPUs do not fit
    assert shares(cpu_nodes(4, 1), 2) == (2.0, 1.0)
    with pytest.raises(UserError, match=r"lower cluster.workers to 1 or add nodes"):
        shares(cpu_nodes(3, 1, 1, 1), 2, cpus_per_worker=2)


def test_given_numbers_stay() -> None:
    assert shares(cpu_nodes(16), 2, cpus_per_worker=3, data_cpus=1) == (3.0, 1.0)
    assert shares(cpu_nodes(16), 2, cpus_per_worker=7.5) == (7.5, 1.0)
    assert shares(cpu_nodes(16), 2, data_cpus=8) == (4.0, 8.0)
    with pytest.raises(UserError, match=r"needs 17 CPUs \(2 x 8 to train, 1 to read"):
        shares(cpu_nodes(16), 2, cpus_per_worker=8, data_cpus=1)


def test_gpus() -> None:
    machine = [{"CPU": 16.0, "GPU": 1.0}]
    assert shares(machine, 1) == (1.0, 15.0)
    assert place_on(machine, ClusterConfig(workers=1)).use_gpu
    assert not place_on(machine, ClusterConfig(workers=2)).use_gpu, "auto: not enough for all"
    assert not place_on(machine, ClusterConfig(workers=1, gpu=False)).use_gpu
    assert shares([{"CPU": 128.0, "GPU": 8.0}], 8, cpus_per_worker=2) == (2.0, 112.0)
    assert shares([{"CPU": 2.0, "GPU": 2.0}], 2) == (0.5, 1.0)
    with pytest.raises(
        UserError, match=r"need 2 GPUs, the cluster has 1: lower cluster.workers to 1"
    ):
        shares(machine, 2, gpu=True)
    with pytest.raises(UserError, match="has no GPU"):
        shares(cpu_nodes(4), 1, gpu=True)


def test_a_gpu_worker_needs_cpus_beside_its_gpu() -> None:
    nodes = [{"CPU": 4.0, "GPU": 8.0}, {"CPU": 64.0}]
    assert shares(nodes, 8) == (0.5, 64.0)
    with pytest.raises(UserError, match=r"on the nodes of the GPUs.*lower cluster.workers to 4"):
        shares(nodes, 8, cpus_per_worker=1)


def test_too_small_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"needs 5 CPUs .* has 2 on 1 node.*workers to 3"):
        shares(cpu_nodes(2), 9)
    with pytest.raises(UserError, match="add CPUs"):
        shares(cpu_nodes(1), 1, cpus_per_worker=1)


def test_the_option_that_takes_too_much_is_named() -> None:
    for given, remedy in (
        ({"data_cpus": 64}, "lower cluster.data_cpus or leave it out"),
        ({"cpus_per_worker": 9}, "lower cluster.cpus_per_worker or leave it out"),
        ({"data_cpus": 64, "cpus_per_worker": 9}, "lower cluster.data_cpus and cluster.cpus_per_"),
    ):
        with pytest.raises(UserError, match=remedy):
            shares(cpu_nodes(4), 1, **given)


def test_a_second_driver_stays_out(tmp_path: Path) -> None:
    claim = tmp_path / "driver.json"
    alive = subprocess.Popen(["sleep", "60"])
    try:
        claim.write_text(json.dumps({"host": socket.gethostname(), "pid": alive.pid}))
        with pytest.raises(UserError, match=f"in use by process {alive.pid}"), claimed(tmp_path):
            pass
        assert claim.exists()
    finally:
        alive.kill()
        alive.wait()
    with claimed(tmp_path):  # its holder is dead now
        assert json.loads(claim.read_text())["pid"] == os.getpid()
    assert not claim.exists()


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("precision", "bf16", "auto"),
        ("graph.mode", "require", "auto"),
        ("data.decode", "gpu", "cpu"),
    ],
)
def test_what_only_a_gpu_can_do_is_refused_without_one(
    option: str, value: str, instead: str
) -> None:
    config = TrainConfig().override({option: value, "albumentations": False})
    without = place_on(cpu_nodes(4), ClusterConfig())
    with pytest.raises(UserError, match=f"{option}={value} needs a GPU.*use {option}={instead}"):
        check_device(config, without)
    check_device(config, place_on([{"CPU": 4.0, "GPU": 1.0}], ClusterConfig()))
    check_device(EvaluateConfig(), without)


@pytest.mark.parametrize("cpus", [1.0, 2.0, 4.0, 5.0, 8.0, 15.0])
def test_chunks_that_are_decoded_together_keep_given_cpus(cpus: float) -> None:
    limits = StreamLimits(cpus, 1.0, 2**26, apart=True, strict=True)
    for first in range(7):
        together = [limits.of_chunk(first + number).tasks for number in range(limits.ahead)]
        assert sum(together) == cpus
        assert min(together) >= 1


def test_chunks_take_all_cpus_that_nobody_gave_a_number_of() -> None:
    nodes = [{"CPU": 16.0, "GPU": 1.0, "memory": 1e9, "object_store_memory": 2.0**33}]
    free = place_on(nodes, ClusterConfig(workers=1)).data
    given = place_on(nodes, ClusterConfig(workers=1, data_cpus=6)).data
    assert (free.ahead, free.of_chunk(1).tasks) == (3, free.tasks)
    assert (given.ahead, given.of_chunk(1).tasks) == (3, 2)


def test_all_chunks_of_a_stream_take_a_quarter_of_the_store() -> None:
    for gpus, chunks in ((0.0, 2), (1.0, 4)):
        node = {"CPU": 8.0, "GPU": gpus, "object_store_memory": 2.0**32}
        assert place_on([node], ClusterConfig()).data.chunk_bytes == 2**30 // chunks


@pytest.mark.parametrize(
    ("device", "mode", "steps", "used", "told"),
    [
        ("cpu", "auto", 10**6, "off", "no GPU"),
        ("cuda", "auto", 999, "off", "only 999 steps"),
        ("cuda", "require", 999, "model", ""),
        ("cuda", "auto", 10**6, "model", ""),
    ],
)
def test_compiling_is_left_out_aloud(
    device: str, mode: str, steps: int, used: str, told: str, tmp_path: Path
) -> None:
    config = load(["data=x.yaml", "graph.compile=model", f"graph.mode={mode}"])
    events = EventLog(tmp_path / "events.jsonl")
    here = Here(0, 1, torch.device(device))
    assert _compile_option(config, here, steps, events) == used
    log = tmp_path / "events.jsonl"
    text = log.read_text() if log.exists() else ""
    assert told in text and bool(told) == bool(text)
