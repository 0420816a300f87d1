"""Photos on the CPU: read, resize, letterbox. The door to cv2 and PIL.

Photos are uint8 [h, w, 3] RGB arrays.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import IO

import cv2
import numpy as np
import PIL
from PIL import Image, ImageOps

from yolo_ray.augment.integrity import JPEG_END, JPEG_START, PNG_START, PhotoError, check_complete
from yolo_ray.data.storage import read_bytes

PAD_VALUE = 114
MIN_SIDE_PX = 10
EXIF_ORIENTATION = 0x0112
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000")  # MPO comes with JPEG
# cv2 decodes these without a surprise once its own EXIF rotation is off; PIL decodes the rest.
_CV2_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "TIFF"})
# cv2 takes IMREAD_REDUCED_* as bits; only JPEG is decoded at that size, others would be shrunk afterwards.
_REDUCED = {1: 0, 2: 16, 4: 32, 8: 64}
DECODERS = (
    f"cv2 {cv2.__version__}, PIL {PIL.__version__}"  # other versions may round pixels otherwise
)


def photo_size(path: str | Path) -> tuple[int, int]:
    """Judge a photo file and return its (height, width) in px as ``read_photo`` would decode it.

    JPEG: header and end marker. PNG: header and the checksum of every chunk. Other formats are
    decoded. Raises PhotoError.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(PNG_START))
            if not start.startswith(JPEG_START):
                return size_in(path, start + file.read())
            file.seek(-min(2, len(start)), os.SEEK_END)
            if file.read() != JPEG_END:
                return size_in(path, Path(path).read_bytes())
            return _header_size(path, file)
    except OSError as error:
        raise PhotoError(path, _os_reason(error)) from error


def size_in(path: str | Path, data: bytes) -> tuple[int, int]:
    """``photo_size`` of a photo whose bytes are here already; ``path`` names it in errors."""
    check_complete(path, data)
    if data.startswith((JPEG_START, PNG_START)):
        return _header_size(path, io.BytesIO(data))
    return _big_enough(path, *decode_photo(path, data).shape[:2])


def _header_size(path: str | Path, file: IO[bytes]) -> tuple[int, int]:
    file.seek(0)
    try:
        with _open(path, file) as header:
            turned = _orientation(header) >= 5
            height, width = header.size if turned else header.size[::-1]
    except OSError as error:
        raise PhotoError(path, _os_reason(error)) from error
    return _big_enough(path, height, width)


def read_photo(path: str | Path, reduce: int = 1) -> np.ndarray:
    """Decode a photo (a place of data/storage) to uint8 [h, w, 3] RGB, EXIF applied. Raises PhotoError.

    ``reduce`` 2, 4 or 8: a JPEG is decoded at that part of its size, rounded up; others are not.

    Gray is repeated over three channels; a palette is looked up; CMYK is converted; alpha is
    dropped (the colours under it stay, as in cv2); 16 bits a channel become 8 by 65535 -> 255,
    rounded. Floats and 32-bit integers have no agreed range and are refused.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise PhotoError(path, _os_reason(error)) from error
    return decode_photo(path, data, reduce)


def read_jpeg(path: str | Path, size: tuple[int, int]) -> bytes | None:
    """The bytes of a JPEG, in gray or YCbCr and (height, width) px with EXIF applied, that all decoders read alike.

    None for any other photo: read that one with ``read_photo``. A progressive JPEG is another: graphics cards have no
    engine for it, and what they do instead is 3 levels off in some pixels. Raises PhotoError.
    """
    try:
        data = read_bytes(path)
        if not data.startswith(JPEG_START):
            return None
        check_complete(path, data)
        with _open(path, io.BytesIO(data)) as image:
            upright = image.size[:: 1 if _orientation(image) >= 5 else -1]
            is_plain = image.mode in ("L", "RGB") and "progressive" not in image.info
            return data if is_plain and upright == tuple(size) else None
    except OSError as error:
        raise PhotoError(path, _os_reason(error)) from error


def decode_photo(path: str | Path, data: bytes, reduce: int = 1) -> np.ndarray:
    """``read_photo`` of bytes that are here already; ``path`` names them in errors."""
    try:
        check_complete(path, data)
        with _open(path, io.BytesIO(data)) as image:
            orientation = _orientation(image)
            # A TIFF that is turned, or 32 bits deep, is one on which decoders disagree.
            odd = image.format == "TIFF" and (orientation != 1 or image.mode in ("I", "F"))
            if image.format in _CV2_FORMATS and not odd:
                cv2.setNumThreads(1)
                flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
                flags |= _REDUCED[reduce] if image.format in ("JPEG", "MPO") else 0
                photo = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
                if photo is not None and photo.dtype in (np.uint8, np.uint16):
                    return _oriented(_to_8_bits(photo), orientation)
            return _read_with_pil(path, image)
    except (OSError, SyntaxError, ValueError, cv2.error) as error:  # PIL raises all three
        raise PhotoError(path, _os_reason(error)) from error


def _read_with_pil(path: str | Path, image: Image.Image) -> np.ndarray:
    """Decode what cv2 does not. Where PIL rotated already, ``exif_transpose`` does nothing."""
    if image.mode in ("I", "F"):
        raise PhotoError(path, f"32-bit pixels (mode {image.mode}) are not read, save it as 8-bit")
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        gray = _to_8_bits(np.asarray(upright).astype(np.uint16))
        return np.repeat(gray[:, :, None], 3, axis=2)
    return np.array(upright.convert("RGB"))


def _open(path: str | Path, file: IO[bytes]) -> Image.Image:
    """Header of a photo, by PIL's plugins.

    Not by ``Image.open``: Ultralytics replaces it by one that installs packages for a bad file.
    """
    Image.init()
    start = file.read(16)
    for opener, accepts in (Image.OPEN[name] for name in _FORMATS if name in Image.OPEN):
        if accepts is None or accepts(start) is True:
            file.seek(0)
            try:
                return opener(file, str(path))
            except (SyntaxError, ValueError, LookupError, TypeError, struct.error) as error:
                raise PhotoError(path, "the header is damaged") from error
    raise PhotoError(path, "not a photo of a format that is read, or its header is damaged")


def _os_reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    return f"cannot be decoded ({' '.join(str(error).split())[:120]})"


def _big_enough(path: str | Path, height: int, width: int) -> tuple[int, int]:
    if min(height, width) < MIN_SIDE_PX:
        raise PhotoError(path, f"only {width}x{height} px, the least is {MIN_SIDE_PX}")
    return height, width


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8. PIL decodes a whole PNG to find none, so its header is asked."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    value = image.getexif().get(EXIF_ORIENTATION, 1)
    return value if value in range(1, 9) else 1


def _oriented(photo: np.ndarray, orientation: int) -> np.ndarray:
    """Turn a photo upright (EXIF 2.3, tag 274): swap the axes for 5 to 8, then mirror."""
    if orientation >= 5:
        photo = photo.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        photo = photo[::-1]
    if orientation in (2, 3, 6, 7):
        photo = photo[:, ::-1]
    return np.ascontiguousarray(photo)


def _to_8_bits(pixels: np.ndarray) -> np.ndarray:
    """uint8 as it is; uint16 by value range, 65535 -> 255 (65535 = 255 * 257), rounded."""
    if pixels.dtype == np.uint16:
        return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return pixels


def write_photo(path: str | Path, photo: np.ndarray, *, quality: int = 95) -> None:
    """Write uint8 [h, w, 3] RGB in the format of the suffix (.jpg, .png, ...)."""
    suffix = Path(path).suffix
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if suffix == ".jpg" else []
    done, data = cv2.imencode(suffix, photo[:, :, ::-1], options)
    assert done, f"cv2 has no encoder for {path}"
    Path(path).write_bytes(data.tobytes())


def resized_size(
    heights: np.ndarray | int, widths: np.ndarray | int, imgsz: int
) -> tuple[np.ndarray, np.ndarray]:
    """(heights, widths) in px, int64, after ``resize_photo``; works on arrays of any one shape.

    The longest side becomes imgsz, the other is rounded up, as Ultralytics' loader does.
    """
    heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    ratio = imgsz / np.maximum(heights, widths)
    new_heights = np.minimum(np.ceil(heights * ratio), imgsz).astype(np.int64)
    return new_heights, np.minimum(np.ceil(widths * ratio), imgsz).astype(np.int64)


def resize_photo(photo: np.ndarray, imgsz: int, full: tuple[int, int] | None = None) -> np.ndarray:
    """uint8 [h, w, 3] -> [h', w', 3] with max(h', w') = imgsz, bilinear, up or down.

    ``full``: the (height, width) that decides h' and w', where the photo was decoded reduced.
    """
    height, width = full or photo.shape[:2]
    new_height, new_width = resized_size(height, width, imgsz)
    if photo.shape[:2] == (new_height, new_width):
        return photo
    cv2.setNumThreads(1)  # the tasks are the parallelism; cv2's threads would fight over their CPUs
    return cv2.resize(photo, (int(new_width), int(new_height)), interpolation=cv2.INTER_LINEAR)


def letterbox(photo: np.ndarray, imgsz: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Resize a photo and centre it on gray.

    Returns uint8 [imgsz, imgsz, 3] and the (x, y) px of the photo's top-left corner. An odd rest
    puts the larger half right and below, as Ultralytics' LetterBox does.
    """
    resized = resize_photo(photo, imgsz)
    height, width = resized.shape[:2]
    left, top = (imgsz - width) // 2, (imgsz - height) // 2
    square = np.full((imgsz, imgsz, 3), PAD_VALUE, np.uint8)
    square[top : top + height, left : left + width] = resized
    return square, (left, top)
