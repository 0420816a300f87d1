"""Class-aware suppression as nodes of an ONNX graph, behind a raw answer.

Letters: B images, A anchors, C classes, K rows, n boxes that the operator keeps of all images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPERATOR = "NonMaxSuppression"


def append_nms(
    raw: onnx.ModelProto, *, conf: float, iou: float, max_det: int, output: str
) -> onnx.ModelProto:
    """A copy of a graph with one raw answer [B,4+C,A] that gives rows [B,max_det,6] instead.

    Every (anchor, class) above ``conf`` is a candidate, boxes of one class that overlap a better one by more than
    ``iou`` go, the best ``max_det`` of all classes stay, by descending score; rows of zeros fill up. So does
    ``model.detect.detect_nms``, which looks at the best 30000 candidates only.
    """
    model = onnx.ModelProto()
    model.CopyFrom(raw)
    graph = model.graph
    batch, rows, anchors = graph.output[0].type.tensor_type.shape.dim
    classes, num_anchors = rows.dim_value - 4, anchors.dim_value
    taken = min(max_det, classes * num_anchors)
    numbers = {
        "conf": np.float32(conf), "iou": np.float32(iou), "per_class": np.int64(max_det), "C": np.int64(classes),
        "0": [0], "1": [1], "2": [2], "4": [4], "end": [4 + classes], "rows": [taken], "flat": [0, -1],
        "half": np.float32(0.5), "zero": np.float32(0), "pad": [0, 0, 0, 0, max_det - taken, 0],
    }  # fmt: skip
    for name, value in numbers.items():
        array = np.asarray(value, None if isinstance(value, np.generic) else np.int64)
        graph.initializer.append(numpy_helper.from_array(array, f"nms/{name}"))
    graph.node.extend(_nodes(graph.output[0].name, output))
    shape = [batch.dim_param or batch.dim_value, max_det, 6]
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, shape))
    return model


def _nodes(raw: str, output: str) -> list[onnx.NodeProto]:
    def node(kind: str, inputs: str, outputs: str, **options: Any) -> onnx.NodeProto:
        names = [[_name(part) for part in text.split()] for text in (inputs, outputs)]
        return helper.make_node(kind, names[0], names[1], f"nms/{outputs.split()[0]}", **options)

    def _name(part: str) -> str:
        return {"raw": raw, "output": output}.get(part, f"nms/{part}")

    zeros = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
    return [
        node("Slice", "raw 0 2 1", "centre"),
        node("Slice", "raw 2 4 1", "extent"),
        node("Slice", "raw 4 end 1", "scores_BCA"),
        node("Mul", "extent half", "reach"),
        node("Sub", "centre reach", "low"),
        node("Add", "centre reach", "high"),
        node("Concat", "low high", "corners", axis=1),
        node("Transpose", "corners", "boxes_BA4", perm=[0, 2, 1]),
        # Corners as x1 y1 x2 y2 where y1 x1 y2 x2 is expected: overlaps are the same.
        node(OPERATOR, "boxes_BA4 scores_BCA per_class iou conf", "kept_n3"),
        node("Slice", "kept_n3 0 1 1", "image_n1"),
        node("Slice", "kept_n3 1 2 1", "class_n1"),
        node("Slice", "kept_n3 2 end 1", "anchor_n1"),
        # Anchor by anchor, so that equal scores stand in detect_nms's order.
        node("Mul", "anchor_n1 C", "first_n1"),
        node("Add", "first_n1 class_n1", "place_n1"),
        node("Concat", "image_n1 place_n1", "index_n2", axis=1),
        node("Transpose", "scores_BCA", "scores_BAC", perm=[0, 2, 1]),
        node("Reshape", "scores_BAC flat", "scores_BF"),
        node("GatherND", "scores_BF index_n2", "score_n"),
        node("Shape", "scores_BF", "shape"),
        node("ConstantOfShape", "shape", "nothing", value=zeros),
        node("ScatterND", "nothing index_n2 score_n", "left_BF"),
        node("TopK", "left_BF rows", "score_BK place_BK", axis=1, largest=1, sorted=1),
        node("Div", "place_BK C", "anchor_BK"),
        node("Mod", "place_BK C", "class_BK"),
        node("Unsqueeze", "anchor_BK 2", "anchor_BK1"),
        node("GatherND", "boxes_BA4 anchor_BK1", "box_BK4", batch_dims=1),
        node("Unsqueeze", "score_BK 2", "score_BK1"),
        node("Cast", "class_BK", "class_f", to=TensorProto.FLOAT),
        node("Unsqueeze", "class_f 2", "class_BK1"),
        node("Concat", "box_BK4 score_BK1 class_BK1", "all_BK6", axis=2),
        node("Greater", "score_BK1 zero", "is_kept"),
        node("Where", "is_kept all_BK6 zero", "rows_BK6"),
        node("Pad", "rows_BK6 pad", "output"),
    ]
