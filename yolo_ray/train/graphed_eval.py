"""The evaluation's forward pass and decoding as one CUDA graph: captured once, replayed for every batch.

Evaluation copies the EMA weights INTO the flat buffers that training uses, so what the graph reads stays where it is
from epoch to epoch. Batch norm is in evaluation mode: no statistic moves and no rank waits for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector
from yolo_ray.model.detect import decode
from yolo_ray.step.graph import WARM_UP_STEPS, CaptureFull, CaptureRefused, capture


class GraphedEval:
    """``predict(images uint8 [b,3,S,S])``: decoded boxes float32 [b,A,4] xyxy px and probabilities [b,A,C].

    Call it with the detector in evaluation mode. On a GPU what it returns holds until the next call.

    Attributes:
        detector: its tensors may be written into, never replaced.
        nms: whether the one-to-many head is read (it needs suppression), or the last one.
        mode: "auto" (a capture that fails leaves the passes eager, with one warning), "require" or "off".
        replays: how many there were.
        reason: why passes run eagerly; empty while they are replayed.
    """

    def __init__(
        self,
        detector: Detector,
        *,
        nms: bool,
        mode: str = "auto",
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Wrap a detector that is on its device.

        Raises:
            UserError: mode "require" without a GPU.
        """
        self.detector, self.nms, self.mode, self.warn = detector, nms, mode, warn
        first = next(detector.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.replays = 0
        self.reason = "graph.mode=off" if mode == "off" else ""
        if self.device.type != "cuda":
            if mode == "require":
                raise UserError(
                    "graph.mode=require needs a GPU: use graph.mode=auto or cluster.gpu=true"
                )
            self.reason = "there is no GPU"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._images = self._outputs = None
        self._weights_at = first.data_ptr()

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes and probabilities of a batch, on the detector's device.

        Raises:
            UserError: mode "require" and a pass that cannot be captured.
            ValueError: another shape than the first batch had.
        """
        if self.reason or (self._graph is None and not self._try_capture(images)):
            return self._forward(images.to(self.device, non_blocking=True))
        assert self._graph is not None and self._outputs is not None
        self._load(images)
        self._graph.replay()
        self.replays += 1
        return self._outputs

    def release(self) -> None:
        """Free the graph and its memory; passes are eager from now on."""
        if self._graph is not None:
            torch.cuda.synchronize()
        self._graph = self._images = self._outputs = None
        self.reason = self.reason or "the graph was released"

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.detector(images.to(self.dtype) / 255)
        head = heads[0] if self.nms else heads[-1]
        return decode(head, self.detector.strides, self.detector.reg_max, images.shape[-1])

    def _try_capture(self, images: Tensor) -> bool:
        random = torch.cuda.get_rng_state(self.device)
        try:
            self._capture(images)
        except (torch.OutOfMemoryError, CaptureFull) as error:
            raise UserError(
                f"an evaluation of {len(images)} photos at once does not fit in the GPU's memory beside training: "
                "lower eval.val_batch or batch"
            ) from error
        except CaptureRefused as error:
            text = str(error).strip().splitlines()
            reason = text[0] if text else type(error).__name__
            if self.mode == "require":
                raise UserError(
                    f"graph.mode=require, but the evaluation cannot be captured: {reason}; "
                    "use graph.mode=auto to evaluate without a graph"
                ) from error
            self.reason = f"the evaluation cannot be captured: {reason}"
            self._graph = self._images = self._outputs = None
            self.warn(f"{self.reason}; it runs without a graph, which is slower")
        finally:
            torch.cuda.set_rng_state(random, self.device)
        return self._graph is not None

    def _capture(self, images: Tensor) -> None:
        # As the batches lie in memory, so that one plain copy fills it.
        self._images = static = torch.empty_like(images, device=self.device)
        static.copy_(images, non_blocking=True)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._forward(static)
        current.wait_stream(side)
        outputs: list[tuple[Tensor, Tensor]] = []
        self._graph = capture(lambda: outputs.append(self._forward(static)), side)
        self._outputs = outputs[0]

    def _load(self, images: Tensor) -> None:
        static = self._images
        assert static is not None
        here = next(self.detector.parameters()).data_ptr()
        assert here == self._weights_at, "the graph reads the weights it was captured with"
        if (images.shape, images.dtype) != (static.shape, static.dtype):
            raise ValueError(
                f"the batch is {images.dtype} {tuple(images.shape)}, the graph was captured with "
                f"{static.dtype} {tuple(static.shape)}: val_batch and the image size never change"
            )
        static.copy_(images, non_blocking=True)
