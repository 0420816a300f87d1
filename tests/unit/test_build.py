"""Building, reading and writing detectors of every Ultralytics family."""

import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from yolo_ray.errors import UserError
from yolo_ray.model.build import build_detector, known_models, load_detector, save_weights
from yolo_ray.model.norm import synchronise

NAMES = ("crack", "dent", "scratch")
FAMILIES = {
    "yolov5nu": (16, False),
    "yolov5n": (16, False),
    "yolov8n": (16, False),
    "yolov9t": (16, False),
    "yolov10n": (16, True),
    "yolo11n": (16, False),
    "yolo12n": (16, False),
    "yolo26n": (1, True),
}


def make_file(path, family="yolo11n", names=NAMES, seed=0):
    detector = build_detector(f"{family}.yaml", names, imgsz=64, seed=seed)
    save_weights(path, detector, detector.state_dict(), {"imgsz": 64})
    return detector


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_raw_heads(family):
    reg_max, dual = FAMILIES[family]
    detector = build_detector(f"{family}.yaml", NAMES, imgsz=64, seed=0)
    assert (detector.reg_max, detector.dual, detector.num_classes) == (reg_max, dual, 3)
    assert detector.strides == (8, 16, 32) and detector.names == NAMES
    assert detector.loaded == (0, len(detector.state_dict()))
    assert list(detector.state_dict()) == list(detector.net.state_dict())
    images = torch.rand(2, 3, 64, 64)
    for mode in (True, False):
        heads = detector.train(mode)(images)
        assert len(heads) == 1 + dual
        for head in heads:
            assert head.boxes.shape == (2, 4 * reg_max, 84)
            assert head.scores.shape == (2, 3, 84)
    assert bool(detector.one_to_one_parameters()) is dual
    assert len(detector.frozen_parameters()) == (reg_max > 1)


def test_batch_norm_mode_is_the_only_difference_of_eval():
    detector = build_detector("yolo26n.yaml", NAMES, imgsz=64, seed=0).eval()
    images = torch.rand(1, 3, 64, 64)
    quiet = detector(images)
    before = {name: buffer.clone() for name, buffer in detector.named_buffers()}
    detector.net.eval()  # the head itself in eval mode
    for one, other in zip(quiet, detector(images), strict=True):
        assert torch.equal(one.boxes, other.boxes) and torch.equal(one.scores, other.scores)
    assert all(torch.equal(before[name], buffer) for name, buffer in detector.named_buffers())


def test_same_seed_same_weights_and_global_random_state_untouched():
    state = torch.random.get_rng_state()
    first = build_detector("yolo11n.yaml", NAMES, imgsz=64, seed=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    second = build_detector("yolo11n.yaml", NAMES, imgsz=64, seed=7)
    other = build_detector("yolo11n.yaml", NAMES, imgsz=64, seed=8)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_only_one_to_one_parameters_miss_the_one_to_many_gradient():
    detector = build_detector("yolov10n.yaml", NAMES, imgsz=64, seed=0)
    one_to_many, one_to_one = detector(torch.rand(2, 3, 64, 64))
    trained = {n: p for n, p in detector.named_parameters() if p.requires_grad}
    for head, alone in ((one_to_many, False), (one_to_one, True)):
        loss = head.boxes.sum() + head.scores.sum()
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        used = {name for name, gradient in zip(trained, found, strict=True) if gradient is not None}
        expected = detector.one_to_one_parameters()
        assert used == (expected if alone else set(trained) - expected)


@pytest.mark.parametrize("family", ("yolo11n", "yolov10n", "yolo26n"))
def test_saved_weights_open_in_ultralytics(tmp_path, family):
    from ultralytics import YOLO

    detector = build_detector(f"{family}.yaml", NAMES, imgsz=64, seed=0)
    synchronise(detector.net, lambda sums: None)
    path = tmp_path / "weights" / "best.pt"
    save_weights(path, detector, detector.state_dict(), {"imgsz": 64}, {"note": "kept"})
    assert [file.name for file in path.parent.iterdir()] == ["best.pt"]
    photo = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    yolo: Any = YOLO(path)
    result = yolo.predict(photo, imgsz=64, conf=0.0, verbose=False, device="cpu")[0]
    assert result.names == dict(enumerate(NAMES)) and len(result.boxes) > 0
    assert yolo.ckpt["note"] == "kept" and yolo.ckpt["train_args"]["task"] == "detect"
    assert not any(type(m).__module__.startswith("yolo_ray") for m in yolo.ckpt["model"].modules())
    again = load_detector(path)
    assert again.names == NAMES and not again.training
    for name, tensor in detector.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "best.pt"
    detector = make_file(path)
    before = path.read_bytes()
    with pytest.raises(AttributeError):  # a local function cannot be pickled
        save_weights(path, detector, detector.state_dict(), {"broken": lambda: None})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_file_with_other_classes_loads_and_is_written_again(tmp_path):
    names = tuple(f"thing{i}" for i in range(80))  # its class branch is wider than that of 3
    path, again = tmp_path / "coco.pt", tmp_path / "mine.pt"
    source = make_file(path, names=names)
    detector = build_detector(str(path), NAMES, imgsz=64, seed=1)
    found, total = detector.loaded
    assert total == len(source.state_dict()) and found == total - 6  # 3 levels, weight and bias
    given, own = source.state_dict(), detector.state_dict()
    assert torch.equal(
        given["model.23.cv3.0.1.1.conv.weight"], own["model.23.cv3.0.1.1.conv.weight"]
    )
    assert detector(torch.rand(1, 3, 64, 64))[0].scores.shape == (1, 3, 84)
    save_weights(again, detector, own, {})
    restored = load_detector(again)
    assert restored.names == NAMES and restored.loaded == (total, total)
    assert all(torch.equal(own[name], tensor) for name, tensor in restored.state_dict().items())


def test_unknown_model_names_the_nearest():
    for model in ("yolo11x1.yaml", "yolo11q.yaml", "yolo11n"):
        with pytest.raises(UserError, match=r"did you mean .*yolo11"):
            build_detector(model, NAMES, imgsz=64, seed=0)
    with pytest.raises(UserError, match=r"coco8\.yaml is not the description of a model"):
        build_detector("coco8.yaml", NAMES, imgsz=64, seed=0)
    with pytest.raises(UserError, match="nothing is downloaded"):
        build_detector("https://example.com/yolo11n.yaml", NAMES, imgsz=64, seed=0)


def test_other_tasks_are_refused(tmp_path):
    with pytest.raises(UserError, match="ends in a Segment head"):
        build_detector("yolo11n-seg.yaml", NAMES, imgsz=64, seed=0)
    from ultralytics.nn.tasks import ClassificationModel, SegmentationModel

    segment = SegmentationModel("yolo11n-seg.yaml", nc=3, verbose=False)
    classify = ClassificationModel("yolo11n-cls.yaml", nc=3, verbose=False)
    for net in (segment, classify):
        path = tmp_path / "other.pt"
        torch.save({"model": net}, path)
        with pytest.raises(UserError, match=f"holds a {type(net).__name__} and no plain detector"):
            build_detector(str(path), NAMES, imgsz=64, seed=0)


@pytest.mark.parametrize(
    "content",
    (
        OrderedDict(weight=torch.zeros(2)),
        {"model": OrderedDict(weight=torch.zeros(2))},
        [1, 2, 3],
        {"model": nn.Linear(2, 2)},
        nn.Linear(2, 2),
    ),
    ids=("state-dict", "state-dict inside", "list", "layer inside", "layer"),
)
def test_files_of_others_are_refused(tmp_path, content):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match=r"pass the \.pt of a detection model"):
        build_detector(str(path), NAMES, imgsz=64, seed=0)


class Trap:
    """Runs code when an unsafe loader opens it."""

    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


def test_a_file_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    path = tmp_path / "evil.pt"
    torch.save({"model": Trap()}, path)
    with pytest.raises(UserError, match=r"names posix\.mkdir, .* was not loaded, .*if you trust"):
        build_detector(str(path), NAMES, imgsz=64, seed=0)
    path.write_bytes(pickle.dumps(Trap()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=r"is an old pickle.* was not loaded"):
            build_detector(str(path), NAMES, imgsz=64, seed=0)
    assert not (tmp_path / "sprung").exists()


def test_what_is_no_checkpoint_is_told_apart(tmp_path):
    path, noise = tmp_path / "x.pt", np.random.default_rng(0)
    torch.save({"weight": torch.zeros(999)}, path)
    whole = path.read_bytes()
    for content, message in (
        (b"", "is empty: copy it again"),
        (whole[: len(whole) // 2], "is cut off: copy it again"),
        (b"a text", "nor any file of torch"),
        *((noise.bytes(5000), "nor any file of torch") for _ in range(20)),
        *((b"\x80\x02" + noise.bytes(300), "is an old pickle") for _ in range(20)),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_detector(path)


def test_missing_file_names_both_remedies():
    with pytest.raises(UserError, match=r"put the file there, or .*model=yolo11n.yaml"):
        build_detector("yolo11n.pt", NAMES, imgsz=64, seed=0)


def test_imgsz_must_fit_the_stride():
    with pytest.raises(UserError, match="stride 32: use imgsz=64 or imgsz=96"):
        build_detector("yolo11n.yaml", NAMES, imgsz=80, seed=0)
    with pytest.raises(UserError, match="stride 64: use imgsz=64 or imgsz=128"):
        build_detector("yolov8n-p6.yaml", NAMES, imgsz=96, seed=0)


def test_known_models_are_detectors_with_their_sizes():
    names = known_models()
    wanted = {"yolo11n.yaml", "yolo26x.yaml", "yolov8n-p2.yaml", "yolov9t.yaml", "yolov5n.yaml"}
    assert wanted <= set(names)
    assert not any("-seg" in name or "world" in name or "rtdetr" in name for name in names)


def test_import_of_ultralytics_leaves_the_process_as_it_was():
    script = """
import os, sys, cv2, numpy, torch
import yolo_ray.model.build as build
assert "ultralytics" not in sys.modules
from torch._tensor_str import PRINT_OPTS
def look():
    return (dict(os.environ), torch.save, cv2.getNumThreads(), torch.get_num_threads(),
            repr(numpy.get_printoptions()), repr(torch.ones(2) / 3), PRINT_OPTS.linewidth)
before = look()
build.build_detector("yolo11n.yaml", ("a",), imgsz=64, seed=0)
assert "ultralytics" in sys.modules
assert look() == before, (look(), before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
