"""JPEGs decoded and resized on the device, a batch at a time: ``data.decode=gpu``. The door to nvImageCodec.

nvImageCodec and not torchvision, whose GPU decoder is deprecated and does not interpolate chroma: on an H200 both
decode some 20 000 photos of 640 x 480 px a second, but torchvision's pixels are up to 23 levels off those of the CPU,
these 1. b photos, S their side in the ring.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from yolo_ray.augment.images import PhotoError, decode_photo
from yolo_ray.data.batch import Encoded
from yolo_ray.data.reading import gone
from yolo_ray.errors import UserError

# As libjpeg does by default; without it edges of colours differ by more than ten levels.
OPTIONS = ":fancy_upsampling=1"
Decode = Callable[
    [list[bytes], int], Sequence[Any]
]  # the files and a CUDA stream -> images or None


class DeviceDecoder:
    """Photos of one worker's rows as they came from disk -> where the ring takes them from."""

    def __init__(self, imgsz: int, device: torch.device) -> None:
        """A decoder for photos of side ``imgsz`` px on ``device``, a GPU.

        Raises:
            UserError: nvImageCodec or its nvJPEG is not installed here.
        """
        self.imgsz, self.device = imgsz, device
        self.stream = torch.cuda.Stream(device)
        self.decode = _open_decoder(device)

    def __call__(self, photos: Sequence[Encoded]) -> Tensor:
        """uint8 [b,S,S,3] on the device, resized photos at the top left of gray; the host waits for it.

        Any thread may call it, one at a time.

        Raises:
            UserError: a photo that neither the device nor the CPU can decode.
        """
        from yolo_ray.augment.fused_resize import (
            resize_photos,  # Triton comes with torch for GPUs only
        )

        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            sources = self._sources(photos)
            out = resize_photos(sources, self.imgsz)
            self.stream.synchronize()  # the decoded photos may go
        return out

    def _sources(self, photos: Sequence[Encoded]) -> list[Tensor]:
        """Every photo as uint8 [h,w,3] on the device; those that came as pixels are resized already."""
        files = [photo.data for photo in photos if photo.shape is None]
        images = iter(self.decode(files, self.stream.cuda_stream) if files else ())
        return [
            self._from_host(photo.pixels())
            if photo.shape is not None
            else self._on_device(next(images), photo)
            for photo in photos
        ]

    def _on_device(self, image: Any, photo: Encoded) -> Tensor:
        if image is None:  # what the CPU forgives, such as a few damaged bytes, the device may not
            try:
                return self._from_host(decode_photo(photo.path, photo.data))
            except PhotoError as error:
                raise gone(error) from error
        return torch.from_dlpack(image)

    def _from_host(self, pixels: np.ndarray) -> Tensor:
        return torch.from_numpy(pixels).to(self.device)


def _open_decoder(device: torch.device) -> Decode:
    try:
        from nvidia import nvimgcodec  # pyright: ignore[reportAttributeAccessIssue] (may be absent)
    except ImportError as error:
        raise UserError(
            "data.decode=gpu needs nvImageCodec, which is not installed here: "
            "pip install 'nvidia-nvimgcodec-cu13[nvjpeg]' (cu12 for CUDA 12) where the GPUs are, or use data.decode=cpu"
        ) from error
    index = torch.cuda.current_device() if device.index is None else device.index
    kinds = nvimgcodec.BackendKind
    # Not CPU_ONLY: it would take over in silence where nvJPEG is missing.
    backends = [
        nvimgcodec.Backend(kind)
        for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
    ]
    decoder = nvimgcodec.Decoder(device_id=index, backends=backends, options=OPTIONS)
    params = nvimgcodec.DecodeParams(
        apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
    )

    def decode(files: list[bytes], stream: int) -> Sequence[Any]:
        return decoder.decode(files, params=params, cuda_stream=stream)

    _check_nvjpeg(decode)
    return decode


def _check_nvjpeg(decode: Decode) -> None:
    """One photo through the decoder: without its nvJPEG every photo would be decoded on the CPU."""
    probe = io.BytesIO()
    Image.new("RGB", (64, 64)).save(probe, "JPEG")
    if decode([probe.getvalue()], torch.cuda.current_stream().cuda_stream)[0] is None:
        raise UserError(
            "data.decode=gpu: nvImageCodec decodes no JPEG on this GPU, its nvJPEG is missing or does not fit: "
            "pip install 'nvidia-nvimgcodec-cu13[nvjpeg]' (cu12 for CUDA 12) where the GPUs are, or use data.decode=cpu"
        )
