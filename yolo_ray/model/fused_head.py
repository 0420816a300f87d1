"""The branches of a detection head, side by side in a captured step; needs a GPU.

Legend: b images, D channels of a branch, A anchors of all levels.
A head computes a box and a class branch for each level of the pyramid; none depends on another, and on the
small levels none fills the card. Autograd runs each backward pass on the stream of its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LANES = 3


class HeadLanes:
    """Streams for all branches but the first, which stays on the current one."""

    def __init__(self, head: Any, device: torch.device) -> None:
        self.head = head
        self.streams = [torch.cuda.Stream(device) for _ in range(LANES)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the head computes its branches so."""
        self.head.forward_head = self._forward_head
        try:
            yield
        finally:
            del self.head.forward_head

    def _forward_head(
        self, x: list[Tensor], box_head: Sequence[nn.Module], cls_head: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Raw boxes [b,4*reg_max,A], class logits [b,C,A] and the levels, as Ultralytics' head gives them."""
        main = torch.cuda.current_stream()
        is_captured = torch.cuda.is_current_stream_capturing()
        streams = self.streams if is_captured else [main] * LANES
        if is_captured:
            _fork(streams, main, x)
        boxes, scores = [], []
        for level, features in enumerate(x):
            # The large level keeps two streams busy, the small ones share the others.
            with torch.cuda.stream(main if level == 0 else streams[1]):
                boxes.append(box_head[level](features))
            with torch.cuda.stream(streams[2 * (level > 0)]):
                scores.append(cls_head[level](features))
        for stream in streams:
            if stream != main:
                main.wait_stream(stream)
        return {"boxes": _over_anchors(boxes), "scores": _over_anchors(scores), "feats": x}


def _fork(streams: Sequence[Any], main: Any, levels: Sequence[Tensor]) -> None:
    """Let ``streams`` read what the main one has made; its memory is not for others meanwhile."""
    for stream in streams:
        stream.wait_stream(main)
        for features in levels:
            features.record_stream(stream)


def _over_anchors(levels: Sequence[Tensor]) -> Tensor:
    """[b,D,A] with channels innermost, as the levels lie: joined by plain copies."""
    rows = [level.permute(0, 2, 3, 1).flatten(1, 2) for level in levels]
    return torch.cat(rows, 1).transpose(1, 2)
