"""Independent pieces of work side by side in a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Lanes:
    """A few streams of a GPU; on a CPU, and outside a capture, the pieces simply run one after the other.

    Eager work gains nothing from streams, since the host launches it too slowly to fill even one.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        is_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if is_gpu else []

    def run(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Run all; what they read must be there before, and what they write lies in memory of the caller's."""
        if not self._streams or not torch.cuda.is_current_stream_capturing():
            for piece in pieces:
                piece()
            return
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for number, piece in enumerate(pieces):
            with torch.cuda.stream(self._streams[number % len(self._streams)]):
                piece()
        for stream in self._streams:
            current.wait_stream(stream)
