"""What the registry and the driver of a registration tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from yolo_ray.gate.compare import Judged, Verdict


@dataclass(frozen=True)
class Candidate:
    """A run that asks to be registered.

    Attributes:
        source: what the user named it.
        weights: its best weights, here.
        data: the data.yaml that it was trained on, if that is known.
        run_id: its run in MLflow; None: it has none there.
        config: its options, as YAML text.
        facts: data digests, git commit and versions.
    """

    source: str
    weights: Path
    data: str | None
    run_id: str | None
    config: str
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Champion:
    """The registered version that serves now, its files here."""

    version: str
    weights: Path
    onnx: Path


@dataclass(frozen=True)
class Package:
    """A version ready to be registered.

    Attributes:
        candidate: the run it comes from.
        onnx: the network as served.
        names: class names by id.
        val_digest: digest of the photos that it was judged on.
    """

    candidate: Candidate
    onnx: Path
    names: tuple[str, ...]
    val_digest: str


@dataclass(frozen=True)
class Comparison:
    """How a challenger did."""

    champion: Judged | None
    challenger: Judged
    verdict: Verdict
    data: str
