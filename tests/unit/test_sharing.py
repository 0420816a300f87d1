"""How a cluster is shared by the trials of a study: a pure function of its nodes and the options."""

from __future__ import annotations

from typing import Any

import pytest

from yolo_ray.cluster.preflight import gpu_places, place_on
from yolo_ray.cluster.sharing import ACTOR_CPUS, Sharing, share_on
from yolo_ray.config.schema import ClusterConfig
from yolo_ray.config.tune import TuneOptions
from yolo_ray.errors import UserError

TWO_CORES = [{"CPU": 2.0}]
H200 = [{"CPU": 16.0, "GPU": 1.0}]
EIGHT = [{"CPU": 128.0, "GPU": 8.0}]


def share(
    nodes: list[dict[str, float]], workers: int = 1, gpu: Any = "auto", **options: Any
) -> Sharing:
    return share_on(nodes, ClusterConfig(workers=workers, gpu=gpu), TuneOptions(**options))


def test_two_trials_on_two_cores_leave_room_for_photos_and_tune() -> None:
    sharing = share(TWO_CORES, max_concurrent=2)
    assert (sharing.concurrent, sharing.placement.workers, sharing.placement.cpus) == (2, 1, 0.5)
    assert sharing.placement.data.cpus == pytest.approx((2 - 1 - 2 * ACTOR_CPUS) / 2)
    assert sharing.cpus + 2 * ACTOR_CPUS == pytest.approx(2.0)
    assert "2 trial(s) at a time" in sharing.sentence()


def test_nothing_is_promised_twice() -> None:
    for cpus in (1, 2, 3, 4, 8, 16, 64):
        for workers in (1, 2, 3):
            for wanted in (1, 2, 4, 9):
                try:
                    one = share([{"CPU": float(cpus)}], workers, max_concurrent=wanted)
                except UserError:
                    assert wanted * workers * 0.5 + 0.5 + wanted * ACTOR_CPUS > cpus
                    continue
                assert one.concurrent == wanted
                assert one.cpus + wanted * ACTOR_CPUS <= cpus + 1e-9


def test_auto_takes_what_fits_well() -> None:
    assert share(TWO_CORES).concurrent == 1
    assert share([{"CPU": 16.0}]).concurrent == 4
    assert share([{"CPU": 16.0}], num_samples=3).concurrent == 3
    assert share(EIGHT).concurrent == 8
    assert share(EIGHT, workers=2).concurrent == 4
    assert share(EIGHT, gpu=False).concurrent == 20


def test_parts_of_a_gpu() -> None:
    sharing = share(H200, gpu_per_trial=0.25)
    assert (sharing.concurrent, sharing.placement.gpus, sharing.placement.use_gpu) == (
        4,
        0.25,
        True,
    )
    assert sharing.placement.cpus + sharing.placement.data.cpus == pytest.approx((16 - 0.04) / 4)
    assert "on 0.25 of a GPU" in sharing.sentence()
    assert share(EIGHT, gpu_per_trial=0.3, num_samples=99).concurrent == 24, "three of 0.3 a GPU"
    assert share(EIGHT, workers=2, gpu_per_trial=2).placement.gpus == 1.0
    assert gpu_places([{"GPU": 1.0}, {"CPU": 3.0}, {"GPU": 2.0}], 0.5) == 6
    assert place_on(H200, ClusterConfig(workers=4), 0.25).gpus == 0.25


@pytest.mark.parametrize(
    ("nodes", "workers", "options", "message"),
    [
        (
            TWO_CORES,
            1,
            {"max_concurrent": 4},
            r"4 trials at a time .* has 2 CPUs on 1 node.*max_concurrent to 2",
        ),
        (TWO_CORES, 9, {}, r"cluster.workers=9 need"),
        (H200, 1, {"max_concurrent": 2}, r"has 16 CPUs and 1 GPUs .*tune.max_concurrent to 1"),
        (H200, 1, {"gpu_per_trial": 0.5, "max_concurrent": 3}, r"tune.max_concurrent to 2"),
        (TWO_CORES, 1, {"gpu_per_trial": 0.5}, r"GPUs hold 0 worker\(s\).*leave it out"),
        (EIGHT, 2, {"gpu_per_trial": 0.5}, r"less than a GPU for each of the 2 workers"),
        (EIGHT, 1, {"gpu_per_trial": 2}, "more than a GPU for each worker"),
        (
            EIGHT,
            1,
            {"scheduler": "pbt", "max_concurrent": 4},
            r"trains all its 20 trials .*num_samples=4",
        ),
        (TWO_CORES, 1, {"scheduler": "pbt"}, r"lower tune.num_samples to 2"),
    ],
)
def test_what_does_not_fit_says_what_would(
    nodes: list[dict[str, float]], workers: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        share(nodes, workers, **options)


def test_population_runs_at_a_time() -> None:
    assert share([{"CPU": 16.0}], scheduler="pbt", num_samples=6).concurrent == 6
    with pytest.raises(UserError, match="leave one of them out"):
        share(H200, gpu=False, gpu_per_trial=0.5)
