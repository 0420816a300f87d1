"""Detectors that nobody trained and that still find boxes of many sizes, scores and classes in a photo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from yolo_ray.export.check import images_of, made_up_photos
from yolo_ray.model.build import Detector, build_detector, save_weights

# Nine layers: torch's ONNX exporter takes two seconds for it, and eleven for yolo11n.
TINY = """
nc: 3
end2end: {dual}
reg_max: {reg_max}
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [24, 3, 2]]
  - [-1, 1, C3k2, [24, True]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [48, 3, 2]]
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 4], 1, Concat, [1]]
  - [[3, 7, 5], 1, Detect, [nc]]
"""


def tiny_model(folder: Path, *, dual: bool = False) -> str:
    """The path of an architecture in a file; ``dual``: with an NMS-free head and reg_max 1, as YOLO26."""
    path = folder / f"tiny{'_dual' if dual else ''}.yaml"
    path.write_text(TINY.format(dual=dual, reg_max=1 if dual else 16))
    return str(path)


def lively_detector(
    model: str = "yolo11n.yaml", *, imgsz: int = 96, names: Sequence[str] = ("a", "b", "c")
) -> Detector:
    """A detector in evaluation mode whose boxes and scores vary with the photo."""
    detector = build_detector(model, names, imgsz=imgsz, seed=1)
    bins = torch.arange(detector.reg_max, dtype=torch.float32).repeat(4)
    generator = torch.Generator().manual_seed(1)
    for name, module in detector.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
        if isinstance(module, torch.nn.Conv2d) and module.bias is not None:
            is_box = module.out_channels == len(bins) and "cv2" in name
            torch.nn.init.normal_(module.weight, std=0.2, generator=generator)
            with torch.no_grad():
                slope = 1.0 - 0.5 * bins if detector.reg_max > 1 else torch.full_like(bins, 2.0)
                module.bias.copy_(slope if is_box else torch.tensor(-2.0))
    with torch.no_grad():  # one look at photos gives the batch norms statistics to match
        detector.train()(torch.from_numpy(images_of(made_up_photos(imgsz, 16))))
    return detector.eval()


def save_lively(
    path: Path, model: str = "yolo11n.yaml", *, imgsz: int = 96, **options: object
) -> Path:
    """Its weights file."""
    detector = lively_detector(model, imgsz=imgsz)
    save_weights(path, detector, detector.state_dict(), {"imgsz": imgsz, **options})
    return path
