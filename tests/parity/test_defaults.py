"""Option names and defaults are Ultralytics'; every exception has its reason here."""

from __future__ import annotations

import pytest
from ultralytics.utils import DEFAULT_CFG_DICT

from yolo_ray.config.options import options_of, sections_of
from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.unsupported import UNSUPPORTED

EXCEPTIONS = {
    "model": "Ultralytics has none and asks; here the smallest YOLO11, from scratch",
    "workers": "loader threads there, training processes here",
    "project": "none means runs/detect there; runs here",
    "name": "none means train there",
    "resume": "a switch there; the folder of the run here",
    "cache": "a switch or ram or disk there; off, memory or disk here, theirs are understood",
    "conf": "none means 0.001 in validation there",
    "mode": "which command runs there; how the graph is used here",
    "compile": "a switch or a mode of torch.compile there; what is compiled here",
    "nms": "none means by the head there; here the one-to-many head with NMS",
}
OURS = {option.leaf: option for option in options_of(TrainConfig).values()}
SHARED = sorted(set(OURS) & set(DEFAULT_CFG_DICT) - set(EXCEPTIONS))


@pytest.mark.parametrize("leaf", SHARED)
def test_default_is_that_of_ultralytics(leaf: str) -> None:
    assert OURS[leaf].default == DEFAULT_CFG_DICT[leaf]
    assert isinstance(OURS[leaf].default, bool) == isinstance(DEFAULT_CFG_DICT[leaf], bool)


def test_the_parity_list_is_not_empty() -> None:
    assert len(SHARED) >= 30
    assert {"lr0", "momentum", "box", "mosaic", "hsv_h", "imgsz", "batch", "epochs"} <= set(SHARED)
    assert {"multi_scale", "freeze", "mixup"} <= set(SHARED)


@pytest.mark.parametrize("leaf", sorted(EXCEPTIONS))
def test_an_exception_is_still_one(leaf: str) -> None:
    assert leaf in OURS
    assert OURS[leaf].default != DEFAULT_CFG_DICT[leaf]


def test_every_option_of_ultralytics_is_known() -> None:
    known = set(OURS) | set(UNSUPPORTED) | set(sections_of(TrainConfig))
    assert sorted(set(DEFAULT_CFG_DICT) - known) == []


def test_the_cache_options_of_ultralytics_mean_the_same() -> None:
    default = TrainConfig()
    assert default.override({"cache": DEFAULT_CFG_DICT["cache"]}).data.cache == default.data.cache
    spellings = {False: "off", True: "memory", "ram": "memory", "RAM": "memory", "disk": "disk"}
    for theirs, ours in spellings.items():
        assert default.override({"cache": theirs}).data.cache == ours
