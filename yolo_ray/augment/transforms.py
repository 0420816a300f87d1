"""The user's albumentations: a chain of photo transforms built from options, seeded photo by photo.

The only import of albumentations.
"""

from __future__ import annotations

import difflib
import inspect
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cv2
import numpy as np

from yolo_ray.errors import UserError

DEFAULT_CHAIN: tuple[dict[str, Any], ...] = tuple(
    {"transform": name, "p": 0.01} for name in ("Blur", "MedianBlur", "ToGray", "CLAHE")
)
# Abstract classes, and ones that take functions, which no YAML file can hold.
_NOT_OFFERED = frozenset(
    {"BasicTransform", "DualTransform", "ImageOnlyTransform", "NoOp", "Lambda", "Transform3D"}
    | {"BaseCompose", "Compose", "ReplayCompose"}
)


@dataclass
class Transform:
    """Albumentations that may change pixels and move or drop boxes, never the photo's size.

    The same (photo, seed) gives the same pixels in any process and any order. Pickled by its
    steps. Each step is drawn here, so that a photo no step hits costs microseconds. Use one
    object per thread.
    """

    steps: tuple[Mapping[str, Any], ...]
    moves_boxes: bool = field(init=False)
    _chain: list[tuple[Any, float]] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        """Build the chain once, so that a wrong step is told at once."""
        self.moves_boxes = any(_moves_boxes(transform) for transform, _ in self._built())

    def __getstate__(self) -> dict[str, Any]:
        """The steps alone: unpickling must not import albumentations by itself."""
        return {**self.__dict__, "_chain": None}

    def _built(self) -> list[tuple[Any, float]]:
        """Every step's transform, set to run always, and its own probability."""
        if self._chain is None:
            self._chain = []
            for step in self.steps:
                transform = _build_step(step)
                self._chain.append((transform, float(transform.p)))
                transform.p = 1.0
        return self._chain

    def __call__(
        self, photo: np.ndarray, boxes: np.ndarray, classes: np.ndarray, seed: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Transform uint8 [h, w, 3] and xyxy fractions [n, 4].

        Returns the photo, the boxes left [k, 4], clipped, and their rows [k] among the given
        ones. Raises UserError when a transform fails or changes the size or type of the photo.
        """
        draw = random.Random(int(seed))
        hit = [transform for transform, p in self._built() if draw.random() < p]
        if not hit:
            return photo, boxes, np.arange(len(boxes))
        cv2.setNumThreads(1)
        boxed = any(_moves_boxes(transform) for transform in hit)
        result = _apply(hit, photo, (boxes, classes) if boxed else None, int(seed))
        changed = result["image"]
        if changed.shape != photo.shape or changed.dtype != np.uint8:
            name = _size_changer(hit, photo, int(seed))
            raise UserError(
                f"albumentations {name} turned a photo of {_kind(photo)} into {_kind(changed)}, "
                "but size and type must stay; take it out of augment.albumentations"
            )
        changed = np.ascontiguousarray(changed)
        if not boxed:
            return changed, boxes, np.arange(len(boxes))
        left = np.asarray(result["bboxes"], np.float32).reshape(-1, 4)
        return changed, left, np.asarray(result["index"], np.int64)


def build_transform(albumentations_option: bool | Sequence[Mapping[str, Any]]) -> Transform:
    """Transform of the option ``augment.albumentations``: true, false or a list of named steps.

    Raises UserError for an unknown name or argument, or a value that albumentations refuses.
    """
    if isinstance(albumentations_option, bool):
        return Transform(DEFAULT_CHAIN if albumentations_option else ())
    return Transform(tuple(dict(step) for step in albumentations_option))


def _albumentations() -> ModuleType:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network
    import albumentations

    return albumentations


def _moves_boxes(transform: Any) -> bool:
    library = _albumentations()
    if isinstance(transform, library.BaseCompose):
        return any(_moves_boxes(inner) for inner in transform.transforms)
    return isinstance(transform, library.DualTransform)


def _build_step(step: Mapping[str, Any]) -> Any:
    """One transform from {"transform": name, ...}; OneOf and its like take ``transforms``."""
    library = _albumentations()
    known = {
        name: value
        for name, value in vars(library).items()
        if isinstance(value, type)
        and issubclass(value, (library.BasicTransform, library.BaseCompose))
        and name not in _NOT_OFFERED
    }
    arguments = dict(step)
    name = arguments.pop("transform", None)
    if name not in known:
        hint = _did_you_mean(str(name), known)
        raise UserError(f"augment.albumentations: no transform {name!r}{hint}")
    allowed = [key for key in inspect.signature(known[name].__init__).parameters if key != "self"]
    for key in arguments:
        if key not in allowed:
            hint = _did_you_mean(key, allowed)
            raise UserError(f"augment.albumentations: {name} has no argument {key!r}{hint}")
    if issubclass(known[name], library.BaseCompose):
        arguments["transforms"] = [_build_step(inner) for inner in arguments.get("transforms", ())]
    try:
        with warnings.catch_warnings():
            # albumentations warns and goes on with another value than the one that was asked for
            warnings.simplefilter("error", UserWarning)
            return known[name](**arguments)
    except (ValueError, TypeError, UserWarning) as error:
        raise UserError(
            f"augment.albumentations: {name} refuses {arguments} ({_reason(error)}); correct it"
        ) from error


def _did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"; did you mean {lower[close[0]]!r}?" if close else "; see albumentations.ai/docs"


def _reason(error: Exception) -> str:
    """pydantic's report in one line: the field and what is wrong with it."""
    lines = [line.split(" [type=")[0].strip() for line in str(error).splitlines()]
    if "validation error" in lines[0] and len(lines) > 2:
        return f"{lines[1]}: {lines[2]}"
    return lines[0]


def _apply(
    transforms: list[Any], photo: np.ndarray, labels: tuple[np.ndarray, ...] | None, seed: int
) -> dict[str, Any]:
    """Run transforms in order on one photo, and on its boxes when there are labels."""
    library = _albumentations()
    data: dict[str, Any] = {"image": photo}
    params = None
    if labels is not None:
        data |= {"bboxes": labels[0], "classes": labels[1], "index": np.arange(len(labels[0]))}
        params = library.BboxParams(
            format="albumentations",
            label_fields=["classes", "index"],
            clip=True,
            filter_invalid_bboxes=True,
        )
    compose = library.Compose(transforms, bbox_params=params)
    # One stream for the chain: set_random_seed() would hand every transform the same draws.
    compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
    try:
        return compose(**data)
    except Exception as error:
        names = ", ".join(type(transform).__name__ for transform in transforms)
        raise UserError(
            f"albumentations {names} failed on a photo of {_kind(photo)} "
            f"({_reason(error)}); correct augment.albumentations"
        ) from error


def _kind(photo: np.ndarray) -> str:
    return f"{photo.shape[1]}x{photo.shape[0]} {photo.dtype}"


def _size_changer(transforms: list[Any], photo: np.ndarray, seed: int) -> str:
    for transform in transforms:
        changed = _apply([transform], photo, None, seed)["image"]
        if changed.shape != photo.shape or changed.dtype != np.uint8:
            return type(transform).__name__
    return ", ".join(type(transform).__name__ for transform in transforms)
