"""What is exported: a detector with its decoding, as one module of tensors with fixed shapes.

Letters: B images, S side in px, A anchors, C classes, K rows of an answer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector
from yolo_ray.model.detect import decode
from yolo_ray.model.norm import desynchronise

Layout = Literal["raw", "best", "nms"]
"""raw [B,4+C,A]: centre, width, height in px and probabilities; best and nms [B,K,6]: xyxy px, score, class."""


@dataclass(frozen=True)
class ExportPlan:
    """What the exported file takes and gives.

    Attributes:
        imgsz: side S of its square input in px.
        nms: suppression in the graph, from the one-to-many head; otherwise raw outputs, or the best of the
            NMS-free head where the family has one.
        half: weights, activations and input in float16; boxes and scores come out as float32.
        dynamic_batch: any number of images at once, not only one.
        conf: score above which the graph's own NMS looks at a box.
        iou: overlap from which it drops the weaker box.
        max_det: rows K of an answer.
    """

    imgsz: int
    nms: bool = False
    half: bool = False
    dynamic_batch: bool = True
    conf: float = 0.25
    iou: float = 0.7
    max_det: int = 300

    def layout(self, detector: Detector) -> Layout:
        """The form of the answers."""
        return "nms" if self.nms else "best" if detector.dual else "raw"

    @property
    def example_batch(self) -> int:
        """Images to trace with; of one, torch.export would make a constant."""
        return 2 if self.dynamic_batch else 1


class Deployed(nn.Module):
    """``images`` [B,3,S,S] in 0..1 -> raw or best rows, float32; the part of a plan before any suppression."""

    def __init__(self, detector: Detector, plan: ExportPlan) -> None:
        """Copies the detector: the one that is given stays as it is."""
        super().__init__()
        own = copy.deepcopy(detector).cpu().float()
        desynchronise(own)
        own.eval()
        self.detector = own.half() if plan.half else own
        self.layout: Layout = plan.layout(detector)
        self.max_det = plan.max_det

    def forward(self, images: Tensor) -> Tensor:
        """The answer of its layout ("nms": what suppression starts from, raw)."""
        detector = self.detector
        heads = detector(images)
        head = heads[-1] if self.layout == "best" else heads[0]
        boxes_BA4, scores_BAC = decode(head, detector.strides, detector.reg_max, images.shape[-1])
        if self.layout == "best":
            return best_rows(boxes_BA4, scores_BAC, self.max_det)
        low_B2A, high_B2A = boxes_BA4.movedim(1, 2).split(2, 1)
        centre, extent = (low_B2A + high_B2A) / 2, high_B2A - low_B2A
        return torch.cat((centre, extent, scores_BAC.movedim(1, 2)), 1)


def best_rows(boxes_BA4: Tensor, scores_BAC: Tensor, max_det: int) -> Tensor:
    """The ``max_det`` best (anchor, class) pairs of each image, [B,max_det,6]; rows of zeros where there are fewer.

    The choice of YOLOv10 (Wang et al. 2024) for its one-to-one head.
    """
    classes = scores_BAC.shape[2]
    flat = scores_BAC.flatten(1)
    values_BK, places_BK = flat.topk(min(max_det, flat.shape[1]))
    anchors_BK = places_BK // classes
    picked_BK4 = boxes_BA4.gather(1, anchors_BK.unsqueeze(2).expand(-1, -1, 4))
    kinds_BK = (places_BK % classes).to(values_BK.dtype)
    rows = torch.cat((picked_BK4, values_BK.unsqueeze(2), kinds_BK.unsqueeze(2)), 2)
    missing = max_det - flat.shape[1]
    return functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def split_raw(raw_BDA: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes [B,A,4] xyxy px and probabilities [B,A,C] of a raw answer."""
    centre, extent, scores = raw_BDA[:, :2], raw_BDA[:, 2:4], raw_BDA[:, 4:]
    boxes = torch.cat((centre - extent / 2, centre + extent / 2), 1)
    return boxes.movedim(1, 2), scores.movedim(1, 2)


def check_imgsz(imgsz: int, strides: tuple[int, ...]) -> None:
    """Refuse a side that the strides do not divide.

    Raises:
        UserError: with the next side that they do.
    """
    stride = max(strides)
    if imgsz % stride:
        raise UserError(
            f"imgsz={imgsz} is not a multiple of the model's stride {stride}: use imgsz={-(-imgsz // stride) * stride}"
        )
