"""What the sections of the configuration are made of: their class, and the types of single options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from yolo_ray.config.options import refuse_lookalikes

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Name = Annotated[str, Field(min_length=1)]
Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
Layer = Annotated[int, Field(ge=0, strict=True)]  # strict: [true] is no layer
AUTO_BATCH = -1  # what ``batch=auto`` is until a GPU was measured


CacheKind = Literal["off", "memory", "disk"]
# Ultralytics' spellings; YAML reads a bare `off` as false.
_CACHE_KINDS = {False: "off", True: "memory", "ram": "memory"}


def cache_kind(value: Any) -> Any:
    """``data.cache`` in any of its spellings."""
    value = value.lower() if isinstance(value, str) else value
    return _CACHE_KINDS.get(value, value) if isinstance(value, bool | str) else value


def batch_number(value: Any) -> Any:
    """``batch`` as it is kept; ``auto`` and -1 are the same."""
    if value == "auto":
        return AUTO_BATCH
    if value == 0 and not isinstance(value, bool):
        raise ValueError("expected a whole number >= 1, or auto")
    return value


def local_folder(value: str) -> str:
    """A folder on a disk."""
    if "://" in value:
        raise ValueError("expected a folder on a disk of each node, not an address")
    return value


class Section(BaseModel):
    """Frozen; unknown keys, infinite numbers, ``true`` as a number or ``1`` as a switch fail."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_lookalike(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool | int | float) and info.field_name:
            refuse_lookalikes(cls, info.field_name, value)
        return value
