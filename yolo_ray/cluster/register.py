"""The driver of a registration: judge a run and the champion on the same photos, then register what was found."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from yolo_ray.augment.images import read_photo
from yolo_ray.cluster.judge import check_classes, evaluate_on, load_validation
from yolo_ray.cluster.scan import Counted
from yolo_ray.config.address import checked_place, is_remote
from yolo_ray.config.register import RegisterConfig
from yolo_ray.config.schema import EvaluateConfig
from yolo_ray.data.records import Records
from yolo_ray.errors import EXIT_GATE, EXIT_OK, UserError
from yolo_ray.export.check import CheckFailed
from yolo_ray.export.network import check_imgsz
from yolo_ray.export.write import export_onnx
from yolo_ray.gate.compare import Bounds, Judged, decide
from yolo_ray.gate.latency import alternating_medians
from yolo_ray.gate.parts import Candidate, Champion, Comparison, Package
from yolo_ray.model.build import Detector, load_detector

SUMMARY = ("map50_95", "map50", "map75", "precision", "recall")
LATENCY_PHOTOS = 8
ATTEMPTS = 3  # against champions that change while this one is judged

Detect = Callable[[np.ndarray], object]


class Version(Protocol):
    """A registered version."""

    @property
    def number(self) -> str:
        """As MLflow counts."""
        ...


class Registry(Protocol):
    """What the pipelines plug in from track/."""

    @property
    def uri(self) -> str:
        """Where it is."""
        ...

    def candidate(self, folder: Path) -> Candidate:
        """The run to register."""
        ...

    def champion(self, folder: Path) -> Champion | None:
        """The version that serves now."""
        ...

    def serve(self, onnx: Path) -> tuple[int, Detect]:
        """An ONNX file as it is served: its side in px, and what detects in one photo."""
        ...

    def registered(
        self, made: Package, comparison: Comparison, folder: Path
    ) -> AbstractContextManager[Any]:
        """A new ``Version``, taken back if something fails inside."""
        ...

    def settle(self, version: Any, comparison: Comparison) -> bool:
        """Describe a version and give it its alias; False: another champion was quicker."""
        ...

    def overtaken(self, version: Any) -> None:
        """Leave a version as @challenger."""
        ...

    def go_back(self, to: int | None) -> dict[str, Any]:
        """Give @champion to an earlier version."""
        ...

    def show(self, comparison: Comparison) -> None:
        """Show a comparison to the user."""
        ...


def register(config: RegisterConfig, registry: Registry, counted: Counted) -> dict[str, Any]:
    """Register a run as a version and let the gate judge it, or go back to an earlier version; what is printed.

    ``exit`` of the result is 3 where the gate refused. A failure leaves no version behind.

    Raises:
        UserError: anything wrong with the run, the data, the champion, the registry or the cluster.
    """
    if config.rollback or config.to is not None:
        return registry.go_back(config.to)
    with tempfile.TemporaryDirectory(prefix="yolo_ray-register-") as folder:
        return _register(config, registry, counted, Path(folder))


def _register(
    config: RegisterConfig, registry: Registry, counted: Counted, folder: Path
) -> dict[str, Any]:
    candidate = registry.candidate(folder / "run")
    champion = registry.champion(folder / "champion")
    gate = _Gate(config, registry, counted, candidate, folder)
    comparison = gate.compare(champion)
    made = Package(candidate, gate.onnx, tuple(gate.detector.names), gate.val.digest)
    registry.show(comparison)
    with registry.registered(made, comparison, folder / "package") as version:
        for _ in range(ATTEMPTS):
            if registry.settle(version, comparison):
                break
            comparison = gate.compare(registry.champion(folder / "champion"))
            registry.show(comparison)
        else:
            registry.overtaken(version)
            raise UserError(
                f"the champion of {config.name} changed {ATTEMPTS} times while version {version.number} was judged: "
                f"it stays @challenger; run again, or crown it with to={version.number}"
            )
    return _result(config, registry, comparison, version.number)


class _Gate:
    """A challenger, judged once, and whatever champions it is compared with."""

    def __init__(
        self,
        config: RegisterConfig,
        registry: Registry,
        counted: Counted,
        candidate: Candidate,
        folder: Path,
    ) -> None:
        self._config, self._registry = config, registry
        self._data = _data_of(config, candidate)
        self.detector = load_detector(candidate.weights)
        self._imgsz = config.imgsz or self.detector.trained_imgsz or 640
        check_imgsz(self._imgsz, self.detector.strides)
        self.val = load_validation(self._evaluation(candidate.weights, self.detector, 640), counted)
        check_classes(self.detector.names, self.val, candidate.source)
        self._photos = _photos_of(self.val)
        self.onnx = folder / "model.onnx"
        _export(self.detector, self.onnx, self._imgsz, candidate.source)
        self._candidate = candidate
        self._challenger: Judged | None = None

    def compare(self, champion: Champion | None) -> Comparison:
        """Judge both on the same photos, in this process; the challenger once."""
        before = None if champion is None else self._champion(champion)
        if self._challenger is None:
            weights = self._candidate.weights
            self._challenger = self._judged("new", weights, self.detector, self._imgsz)
        challenger = self._challenger
        calls = {"new": self._registry.serve(self.onnx)[1]}
        if champion is not None:
            calls["old"] = self._registry.serve(champion.onnx)[1]
        latency = alternating_medians(calls, self._photos)
        challenger = replace(challenger, latency_ms=latency["new"])
        before = before and replace(before, latency_ms=latency["old"])
        options = self._config
        bounds = Bounds(
            options.min_gain, options.max_class_drop, options.max_latency, options.min_map
        )
        return Comparison(before, challenger, decide(before, challenger, bounds), self._data)

    def _champion(self, champion: Champion) -> Judged:
        detector = load_detector(champion.weights)
        if tuple(detector.names) != tuple(self.detector.names):
            raise UserError(
                f"the champion, version {champion.version} of {self._config.name}, knows the classes "
                f"{list(detector.names)[:5]}, this run {list(self.detector.names)[:5]}: register it under another name="
            )
        imgsz, _ = self._registry.serve(champion.onnx)
        return self._judged(champion.version, champion.weights, detector, imgsz)

    def _judged(self, name: str, weights: Path, detector: Detector, imgsz: int) -> Judged:
        found = evaluate_on(self._evaluation(weights, detector, imgsz), self.val)
        classes = {
            label: float(found[key])
            for label in detector.names
            if (key := f"{label}/map50_95") in found
        }
        summary = {key: float(found[key]) for key in SUMMARY}
        if not math.isfinite(summary["map50_95"]):
            raise UserError(
                f"{self._data} has no box to validate with, so nothing can be compared: pass data= with labelled photos"
            )
        return Judged(name, imgsz, summary, classes)

    def _evaluation(self, weights: Path, detector: Detector, imgsz: int) -> EvaluateConfig:
        """The evaluation of weights as they are served: the NMS-free head where there is one."""
        config = self._config
        changes: dict[str, Any] = {
            "weights": str(weights), "imgsz": imgsz, "data.path": self._data, "eval.nms": not detector.dual,
            "eval.val_batch": config.val_batch,
        }  # fmt: skip
        plain = EvaluateConfig(data=config.data, cluster=config.cluster, graph=config.graph)
        return plain.override(changes)


def _data_of(config: RegisterConfig, candidate: Candidate) -> str:
    """The data.yaml to judge on."""
    given = config.data.path or candidate.data
    if given is None:
        raise UserError(
            f"{candidate.source} does not say what it was trained on: pass data=path/to/data.yaml"
        )
    place = checked_place(given)
    return place if is_remote(place) else str(Path(place).expanduser().resolve())


def _photos_of(val: Records) -> list[np.ndarray]:
    """A few validation photos, for the clock."""
    step = max(1, len(val) // LATENCY_PHOTOS)
    return [read_photo(str(val.paths[index])) for index in range(0, len(val), step)][
        :LATENCY_PHOTOS
    ]


def _export(detector: Detector, path: Path, imgsz: int, source: str) -> None:
    try:
        export_onnx(detector, path, imgsz=imgsz, nms=False, dynamic_batch=True)
    except (UserError, CheckFailed):  # a file that is not as torch is no mistake of the user's
        raise
    except (
        RuntimeError
    ) as error:  # torch's exporter and its check: an operator without a form in ONNX
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} cannot be written as ONNX, which a registered version holds ({reason}): use a model of another "
            "family, or a torch and onnxscript that know its operators"
        ) from error


def _result(
    config: RegisterConfig, registry: Registry, comparison: Comparison, number: str
) -> dict[str, Any]:
    promoted, champion = comparison.verdict.promoted, comparison.champion
    return {
        "name": config.name,
        "version": number,
        "alias": "champion" if promoted else "challenger",
        "champion": number if promoted or champion is None else champion.name,
        "reasons": list(comparison.verdict.reasons),
        **comparison.challenger.summary,
        "latency_ms": comparison.challenger.latency_ms,
        "before": None if champion is None else dict(champion.summary),
        "mlflow": registry.uri,
        "exit": EXIT_OK if promoted else EXIT_GATE,
    }
