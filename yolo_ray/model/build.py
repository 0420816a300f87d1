"""Detectors of every Ultralytics family, built, read and written: the only import of ultralytics.

Shapes: B images, S input side, A anchors, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from yolo_ray.errors import UserError
from yolo_ray.model.boxes import HeadOutput
from yolo_ray.model.norm import desynchronise, freeze_statistics
from yolo_ray.model.refused import reason_of
from yolo_ray.model.saving import save_atomically

if TYPE_CHECKING:
    from ultralytics.nn.tasks import DetectionModel

__all__ = [
    "Detector",
    "HeadOutput",
    "blank_network",
    "build_detector",
    "known_models",
    "load_detector",
    "save_weights",
]

DETECTION_HEADS = ("Detect", "v10Detect")
CLASS_BRANCHES = ("cv3", "one2one_cv3")


class Detector(nn.Module):
    """An Ultralytics detection network with the raw outputs of its training heads.

    ``net`` is the DetectionModel; its layers are registered here under the net's own names, so
    ``state_dict()`` and ``named_parameters()`` equal those of ``net``. ``loaded`` says how many
    tensors came from a file, of how many.
    """

    net: DetectionModel

    def __init__(self, net: DetectionModel, loaded: tuple[int, int]) -> None:
        super().__init__()
        # Past nn.Module's registry: as a submodule it would prefix every name with "net.".
        self.__dict__["net"] = net
        self.model = net.model
        head = _head_of(net)
        self.names: tuple[str, ...] = tuple(net.names.values())
        self.num_classes: int = head.nc
        self.reg_max: int = head.reg_max
        self.strides: tuple[int, ...] = tuple(int(stride) for stride in head.stride.tolist())
        self.dual: bool = getattr(head, "one2one_cv2", None) is not None
        self.loaded = loaded
        self.frozen_layers: tuple[int, ...] = ()  # set by freeze_layers
        self.trained_imgsz: int | None = None  # what the weights file says, if there is one
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".dfl." not in name)

    def train(self, mode: bool = True) -> Detector:
        """Set the mode of every layer but frozen batch norms; the head always gives its raw training outputs."""
        super().train(mode)
        layers: Any = self.model
        for index in self.frozen_layers:
            freeze_statistics(layers[index])
        _head_of(self.net).training = True
        return self

    def forward(self, images: Tensor) -> tuple[HeadOutput, ...]:
        """Raw heads of ``images`` [B,3,S,S] in 0..1: one-to-many, and one-to-one if dual.

        The same in ``train()`` and ``eval()`` but for batch norm. The one-to-one head passes no
        gradient to the layers below it.
        """
        raw: Any = self.net(images)
        raw = raw[1] if isinstance(raw, tuple) else raw  # someone called net.eval()
        heads = (raw["one2many"], raw["one2one"]) if self.dual else (raw,)
        return tuple(HeadOutput(head["boxes"], head["scores"]) for head in heads)

    @property
    def head(self) -> Any:
        """The detection head, Ultralytics' last layer."""
        return _head_of(self.net)

    def one_to_one_parameters(self) -> set[str]:
        """Names of the parameters that only the one-to-one head trains; empty with one head."""
        return {name for name, _ in self.named_parameters() if ".one2one_" in name}

    def frozen_parameters(self) -> set[str]:
        """Names of the parameters that are never trained: the fixed bins of the DFL layer, and frozen layers."""
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}


def build_detector(model: str, names: Sequence[str], *, imgsz: int, seed: int) -> Detector:
    """Build the detector ``model`` for the classes ``names`` and square inputs of ``imgsz`` px.

    ``model`` is the YAML name of an Ultralytics detection family (random weights, the same in every
    process of the same seed) or a local ``.pt`` file, whose tensors are taken where name and shape
    fit. The global random state is left alone.

    Raises:
        UserError: unknown model, missing or unusable file, or an imgsz the strides do not divide.
    """
    suffix = Path(model).suffix.lower()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if suffix == ".pt":
            detector = _detector_from(_read_network(model), names, model)
        elif suffix in (".yaml", ".yml"):
            net = _new_network(_read_architecture(model), names)
            detector = Detector(net, (0, len(net.state_dict())))
        else:
            raise UserError(
                f"model={model} is neither a .yaml nor a .pt: {_suggestion(f'{model}.yaml')}"
            )
    _check_imgsz(imgsz, detector)
    return detector.train()


def load_detector(path: str | Path) -> Detector:
    """Read a detector with its own classes from a ``.pt`` of ours or of Ultralytics, in eval mode.

    Raises:
        UserError: missing file, or not an Ultralytics detection checkpoint.
    """
    source = _read_network(str(path), "weights")
    with torch.random.fork_rng(devices=[]):
        detector = _detector_from(source, tuple(source.names.values()), str(path))
    found, total = detector.loaded
    if found != total:
        raise UserError(
            f"weights {path} hold {found} of the {total} tensors of their own architecture: "
            "pass the file that training wrote, not a pruned or exported one"
        )
    args: Any = source.args
    imgsz = args.get("imgsz")
    detector.trained_imgsz = imgsz if isinstance(imgsz, int) else None
    return detector.eval()


def save_weights(
    path: str | Path,
    detector: Detector,
    state_dict: Mapping[str, Tensor],
    train_args: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    *,
    blank: DetectionModel | None = None,
) -> None:
    """Write ``state_dict`` of ``detector`` as a file that ``ultralytics.YOLO`` opens, atomically.

    It holds a fresh float32 network of Ultralytics' classes only. ``train_args`` and ``extra``
    (further entries of the file, never replacing its own) are plain values. ``blank``: of
    ``blank_network``, used again, since building one takes longer than writing it.
    """
    yolo, net = _ultralytics(), blank or blank_network(detector)
    net.load_state_dict({name: tensor.detach().cpu() for name, tensor in state_dict.items()})
    entries = {
        **(extra or {}),
        "epoch": -1,
        "best_fitness": None,
        "model": net,
        "ema": None,
        "updates": None,
        "optimizer": None,
        "train_args": {**train_args, "task": "detect"},
        "date": datetime.now(UTC).isoformat(),
        "version": yolo.version,
        "license": "AGPL-3.0 (https://ultralytics.com/license)",
    }
    save_atomically(entries, Path(path))


def blank_network(detector: Detector) -> DetectionModel:
    """A network of Ultralytics' classes with the shapes of the detector's; the random state is left alone."""
    architecture: Any = copy.deepcopy(detector.net.yaml)
    with torch.random.fork_rng(devices=[]):
        net = _new_network(architecture, detector.names)
    _match_class_branches(_head_of(net), _head_of(detector.net))
    return net.float().eval()


def known_models() -> list[str]:
    """YAML names of all detection models that the installed Ultralytics can build."""
    yolo, names = _ultralytics(), []
    for file in sorted((yolo.root / "cfg" / "models").rglob("*.yaml")):
        architecture = yolo.load_yaml(file)
        if architecture["head"][-1][2] not in DETECTION_HEADS:
            continue
        family, variant = _split_stem(file.stem)
        scales = architecture.get("scales", {"": None})
        names += [f"{family}{scale}{variant}.yaml" for scale in scales]
    return names


def _split_stem(stem: str) -> tuple[str, str]:
    """ "yolov8-p2" -> ("yolov8", "-p2"): the scale letter goes in between."""
    family, dash, variant = stem.partition("-")
    return family, dash + variant


def _suggestion(model: str) -> str:
    """The remedy for an unknown name."""
    close = difflib.get_close_matches(model, known_models(), n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "pass a detection family such as model=yolo11n.yaml, or a local .pt file"


def _read_architecture(model: str) -> dict[str, Any]:
    """The architecture behind a YAML name or file, of a detection network."""
    yolo = _ultralytics()
    if "://" in model:  # Ultralytics would download it
        raise UserError(
            f"model={model} is an address and nothing is downloaded: save it here first"
        )
    try:
        architecture = yolo.yaml_model_load(model)
    except (FileNotFoundError, AttributeError, TypeError):
        raise UserError(f"model={model} is not a known model: {_suggestion(model)}") from None
    if not architecture.get("head") or not architecture.get("backbone"):
        raise UserError(f"model={model} is not the description of a model: {_suggestion(model)}")
    head = str(architecture["head"][-1][2])
    if head not in DETECTION_HEADS:
        raise UserError(
            f"model={model} ends in a {head} head and is no plain detector: {_suggestion(model)}"
        )
    return architecture


def _read_network(model: str, option: str = "model") -> DetectionModel:
    """The float32 network in a checkpoint file, read by Ultralytics' safe loader."""
    path = Path(model)
    if not path.is_file():
        raise UserError(
            f"{option}={model} is not a file here and nothing is downloaded: put the file there"
            + (f", or train from scratch with model={path.stem}.yaml" if option == "model" else "")
        )
    if "'" in str(path.resolve()):  # Ultralytics drops quotes, then looks on the network
        raise UserError(f"{option}={model} has a quote in its path: rename it")
    yolo = _ultralytics()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, of pickles that it then refuses
            checkpoint, _ = yolo.torch_safe_load(str(path.resolve()), safe_only=True)
    except Exception as error:  # whatever a file that is none makes of its reader
        raise UserError(f"{option}={model} {reason_of(path, error)}") from error
    net = checkpoint.get("ema") or checkpoint.get("model")
    head = type(net.model[-1]).__name__ if type(net) is yolo.DetectionModel else type(net).__name__
    if head not in DETECTION_HEADS:
        kind = "no network" if net is None or isinstance(net, Mapping) else f"a {head}"
        raise UserError(
            f"{option}={model} holds {kind} and no plain detector: pass the .pt of a detection model, "
            "or a .yaml to train from scratch"
        )
    if net.is_fused():
        raise UserError(
            f"{option}={model} is fused for inference: pass the .pt that training wrote"
        )
    args: Any = checkpoint.get("train_args") or {}
    net.__dict__["args"] = dict(args)
    return net.float()


def _detector_from(source: DetectionModel, names: Sequence[str], model: str) -> Detector:
    """A fresh network of the architecture of ``source`` with its tensors, for other classes."""
    architecture: Any = copy.deepcopy(source.yaml)
    net: Any = _new_network(architecture, names)
    # Ultralytics' own transfer: keeps the width of the class branch, maps classes by name.
    net.load(source, verbose=False)
    net.names = dict(enumerate(names))
    given, own = source.state_dict(), net.state_dict()
    found = sum(name in given and given[name].shape == own[name].shape for name in own)
    if not found:
        raise UserError(
            f"model={model} has no tensor that fits its own architecture: pass another .pt, or a "
            ".yaml to train from scratch"
        )
    return Detector(net, (found, len(own)))


def _new_network(architecture: dict[str, Any], names: Sequence[str]) -> DetectionModel:
    """A network with random weights; the class count is written into the architecture."""
    assert names, "a detector has at least one class"
    architecture["nc"] = len(names)
    net = _ultralytics().DetectionModel(architecture, ch=3, verbose=False)
    net.names = dict(enumerate(names))
    return net


def _match_class_branches(head: Any, source: Any) -> None:
    """Give a fresh head the width of the class branches of ``source``.

    It differs where ``source`` was built from a file with another class count.
    """
    for name in CLASS_BRANCHES:
        branch, wanted = getattr(head, name, None), getattr(source, name, None)
        if (
            branch is None
            or wanted is None
            or branch[0][-1].weight.shape == wanted[0][-1].weight.shape
        ):
            continue
        twin = copy.deepcopy(wanted).cpu().float()
        for buffer in twin.buffers():  # the copy of a view of flat buffers brings all of them along
            buffer.data = buffer.clone()
        desynchronise(twin)
        setattr(head, name, twin)


def _head_of(net: DetectionModel) -> Any:
    """The detection head, the last layer."""
    layers: Any = net.model
    return layers[-1]


def _check_imgsz(imgsz: int, detector: Detector) -> None:
    stride = max(detector.strides)
    if imgsz % stride == 0:
        return
    below, above = imgsz // stride * stride, (imgsz // stride + 1) * stride
    valid = f"imgsz={below} or imgsz={above}" if below else f"imgsz={above}"
    raise UserError(f"imgsz={imgsz} is not a multiple of the model's stride {stride}: use {valid}")


@functools.cache
def _ultralytics() -> SimpleNamespace:
    """What we use of Ultralytics, imported on first use and without its side effects."""
    with _contained():
        import ultralytics
        from ultralytics.nn.tasks import DetectionModel, torch_safe_load, yaml_model_load
        from ultralytics.utils import YAML
    return SimpleNamespace(
        DetectionModel=DetectionModel,
        torch_safe_load=torch_safe_load,
        yaml_model_load=yaml_model_load,
        load_yaml=YAML.load,
        root=Path(ultralytics.__file__).parent,
        version=ultralytics.__version__,
    )


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Undo what an import of ultralytics does to the process; keep it off the network.

    It sets print options, OpenCV's threads, environment variables and torch.save, writes a settings
    file and asks the network for its state.
    """
    import cv2
    from torch._tensor_str import PRINT_OPTS  # torch has no public getter

    environment, save, threads = dict(os.environ), torch.save, cv2.getNumThreads()
    printing = dict(vars(PRINT_OPTS))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yolo_ray"
    os.environ.setdefault("YOLO_CONFIG_DIR", str(cache))
    os.environ.update(YOLO_OFFLINE="True", YOLO_AUTOINSTALL="False", YOLO_VERBOSE="False")
    os.environ["ULTRALYTICS_SAFE_LOAD"] = "True"  # architectures from files are not evaluated
    try:
        with np.printoptions():
            yield
    finally:
        # Key by key: other threads may read the environment at any moment.
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        torch.save = save
        cv2.setNumThreads(threads)
        torch.set_printoptions(**printing)
