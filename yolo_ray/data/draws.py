"""The random numbers of a step: uniform ones, as arrays over the whole global batch.

They come from one counter-based generator for each (seed, stream, number), in the order of the fields
below, so nothing depends on the worker count or on the steps before. A new option draws AFTER these, or
from a stream of its own as mixup does, so that old streams stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WINDOW = 8  # steps whose photos a step may use, its own among them
ORDER_STREAM, STEP_STREAM, MIX_STREAM = 0, 1, 2


@dataclass(frozen=True)
class Draws:
    """Uniform numbers in [0,1) for one image of each of B slots."""

    mosaic_B: np.ndarray
    partners_BA: np.ndarray  # A = W-1 ages
    centre_B2: np.ndarray
    motion_B6: np.ndarray  # angle, scale, shear x, shear y, translate x, translate y
    hsv_B3: np.ndarray
    flips_B2: np.ndarray  # (up-down, left-right)
    side: float


@dataclass(frozen=True)
class MixDraws:
    """What mixup needs: a coin, the share of the slot's own image, and the second image's numbers."""

    coin_B: np.ndarray
    ratio_B: np.ndarray  # Beta(32, 32)
    image: Draws


def generator_of(seed: int, stream: int, number: int) -> np.random.Generator:
    """The generator of one stream at one number (of a step or an epoch, possibly negative)."""
    folded = int(number) % 2**64  # numbers may be negative, entropy may not
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, folded])))


def draw_seeds(generator: np.random.Generator, batch: int) -> np.ndarray:
    """Seeds of albumentations, int64 [B]; a step draws them first."""
    return (generator.random(batch) * 2**31).astype(np.int64)


def draw(generator: np.random.Generator, batch: int) -> Draws:
    """The numbers of one image a slot."""
    return Draws(
        mosaic_B=generator.random(batch),
        partners_BA=generator.random((batch, WINDOW - 1)),
        centre_B2=generator.random((batch, 2)),
        motion_B6=generator.random((batch, 6)),
        hsv_B3=generator.random((batch, 3)),
        flips_B2=generator.random((batch, 2)),
        side=generator.random(),
    )


def draw_mix(generator: np.random.Generator, batch: int) -> MixDraws:
    """The numbers of mixup."""
    return MixDraws(
        coin_B=generator.random(batch),
        # The 32nd smallest of 63 uniform numbers is Beta(32, 32): always as many draws, nothing rejected.
        ratio_B=np.partition(generator.random((batch, 63)), 31, axis=1)[:, 31],
        image=draw(generator, batch),
    )
