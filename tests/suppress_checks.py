"""What tests/unit/test_suppress.py runs under Triton's interpreter: the kernel of a whole batch on the CPU."""

from __future__ import annotations

import torch

from tests.nms_cases import cases, class_by_class, image_by_image
from yolo_ray.model import detect

if __name__ == "__main__":
    torch.manual_seed(0)
    detect._SUPPRESS["cpu"] = detect._suppress_together
    for name, boxes, scores, rules in cases():
        if "tile" not in name:  # the interpreter is slow, and fewer kept boxes show as much
            rules = rules | {"max_det": min(rules["max_det"], 60)}
        wanted = image_by_image(boxes, scores, suppress=class_by_class, **rules)
        ours = detect.detect_nms(boxes, scores, **rules)
        assert [len(a) for a in ours] == [len(b) for b in wanted], name
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True)), name
    print("equal")
