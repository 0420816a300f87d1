"""Photos on the CPU: read, resize, letterbox, augment. The door to cv2, PIL and albumentations.

Photos are uint8 [h, w, 3] RGB arrays. Nothing here is random by itself: a seed comes in.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
import random
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cv2
import numpy as np
import PIL
from PIL import Image, ImageOps

from yolo_ray.augment.integrity import JPEG_END, JPEG_START, PNG_START, PhotoError, defect_of
from yolo_ray.errors import UserError

PAD_VALUE = 114
MIN_SIDE_PX = 10
EXIF_ORIENTATION = 0x0112
DEFAULT_CHAIN: tuple[dict[str, Any], ...] = tuple(
    {"transform": name, "p": 0.01} for name in ("Blur", "MedianBlur", "ToGray", "CLAHE")
)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000")  # MPO comes with JPEG
# cv2 decodes these without a surprise once its own EXIF rotation is off; PIL decodes the rest.
_CV2_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "TIFF"})
# cv2 takes IMREAD_REDUCED_* as bits; only JPEG is decoded at that size, others would be shrunk afterwards.
_REDUCED = {1: 0, 2: 16, 4: 32, 8: 64}
DECODERS = (
    f"cv2 {cv2.__version__}, PIL {PIL.__version__}"  # other versions may round pixels otherwise
)
# Abstract classes, and ones that take functions, which no YAML file can hold.
_NOT_OFFERED = frozenset(
    {"BasicTransform", "DualTransform", "ImageOnlyTransform", "NoOp", "Lambda", "Transform3D"}
    | {"BaseCompose", "Compose", "ReplayCompose"}
)


def photo_size(path: str | Path) -> tuple[int, int]:
    """Judge a photo file and return its (height, width) in px as ``read_photo`` would decode it.

    JPEG: header and end marker. PNG: header and the checksum of every chunk. Other formats are
    decoded. Raises PhotoError.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(PNG_START))
            if start.startswith(JPEG_START):
                file.seek(-min(2, len(start)), os.SEEK_END)
                if file.read() != JPEG_END:
                    _check_complete(path, Path(path).read_bytes())
            elif start == PNG_START:
                _check_complete(path, Path(path).read_bytes())
            else:
                height, width = read_photo(path).shape[:2]
                return _big_enough(path, height, width)
            file.seek(0)
            with _open(path, file) as header:
                width, height = header.size
                if _orientation(header) >= 5:
                    width, height = height, width
    except OSError as error:
        raise PhotoError(path, _os_reason(error)) from error
    return _big_enough(path, height, width)


def read_photo(path: str | Path, reduce: int = 1) -> np.ndarray:
    """Decode a photo to uint8 [h, w, 3] RGB, EXIF rotation applied. Raises PhotoError.

    ``reduce`` 2, 4 or 8: a JPEG is decoded at that part of its size, rounded up; others are not.

    Gray is repeated over three channels; a palette is looked up; CMYK is converted; alpha is
    dropped (the colours under it stay, as in cv2); 16 bits a channel become 8 by 65535 -> 255,
    rounded. Floats and 32-bit integers have no agreed range and are refused.
    """
    try:
        data = Path(path).read_bytes()
        _check_complete(path, data)
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


def _check_complete(path: str | Path, data: bytes) -> None:
    if reason := defect_of(data):
        raise PhotoError(path, reason)


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


@dataclass
class Transform:
    """Albumentations that may change pixels and move or drop boxes, never the photo's size.

    The same (photo, seed) gives the same pixels in any process and any order. Pickled by its
    steps. Each step is drawn here, so that a photo no step hits costs microseconds. Use one
    object per thread.
    """

    steps: tuple[Mapping[str, Any], ...]
    moves_boxes: bool = field(init=False)
    _chain: list[tuple[Any, float]] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        """Build the chain once, so that a wrong step is told at once."""
        self.moves_boxes = any(_moves_boxes(transform) for transform, _ in self._built())

    def __getstate__(self) -> dict[str, Any]:
        """The steps alone: unpickling must not import albumentations by itself."""
        return {**self.__dict__, "_chain": None}

    def _built(self) -> list[tuple[Any, float]]:
        """Every step's transform, set to run always, and its own probability."""
        if self._chain is None:
            self._chain = []
            for step in self.steps:
                transform = _build_step(step)
                self._chain.append((transform, float(transform.p)))
                transform.p = 1.0
        return self._chain

    def __call__(
        self, photo: np.ndarray, boxes: np.ndarray, classes: np.ndarray, seed: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Transform uint8 [h, w, 3] and xyxy fractions [n, 4].

        Returns the photo, the boxes left [k, 4], clipped, and their rows [k] among the given
        ones. Raises UserError when a transform fails or changes the size or type of the photo.
        """
        draw = random.Random(int(seed))
        hit = [transform for transform, p in self._built() if draw.random() < p]
        if not hit:
            return photo, boxes, np.arange(len(boxes))
        cv2.setNumThreads(1)
        boxed = any(_moves_boxes(transform) for transform in hit)
        result = _apply(hit, photo, (boxes, classes) if boxed else None, int(seed))
        changed = result["image"]
        if changed.shape != photo.shape or changed.dtype != np.uint8:
            name = _size_changer(hit, photo, int(seed))
            raise UserError(
                f"albumentations {name} turned a photo of {_kind(photo)} into {_kind(changed)}, "
                "but size and type must stay; take it out of augment.albumentations"
            )
        changed = np.ascontiguousarray(changed)
        if not boxed:
            return changed, boxes, np.arange(len(boxes))
        left = np.asarray(result["bboxes"], np.float32).reshape(-1, 4)
        return changed, left, np.asarray(result["index"], np.int64)


def build_transform(albumentations_option: bool | Sequence[Mapping[str, Any]]) -> Transform:
    """Transform of the option ``augment.albumentations``: true, false or a list of named steps.

    Raises UserError for an unknown name or argument, or a value that albumentations refuses.
    """
    if isinstance(albumentations_option, bool):
        return Transform(DEFAULT_CHAIN if albumentations_option else ())
    return Transform(tuple(dict(step) for step in albumentations_option))


def _albumentations() -> ModuleType:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network
    import albumentations

    return albumentations


def _moves_boxes(transform: Any) -> bool:
    library = _albumentations()
    if isinstance(transform, library.BaseCompose):
        return any(_moves_boxes(inner) for inner in transform.transforms)
    return isinstance(transform, library.DualTransform)


def _build_step(step: Mapping[str, Any]) -> Any:
    """One transform from {"transform": name, ...}; OneOf and its like take ``transforms``."""
    library = _albumentations()
    known = {
        name: value
        for name, value in vars(library).items()
        if isinstance(value, type)
        and issubclass(value, (library.BasicTransform, library.BaseCompose))
        and name not in _NOT_OFFERED
    }
    arguments = dict(step)
    name = arguments.pop("transform", None)
    if name not in known:
        hint = _did_you_mean(str(name), known)
        raise UserError(f"augment.albumentations: no transform {name!r}{hint}")
    allowed = [key for key in inspect.signature(known[name].__init__).parameters if key != "self"]
    for key in arguments:
        if key not in allowed:
            hint = _did_you_mean(key, allowed)
            raise UserError(f"augment.albumentations: {name} has no argument {key!r}{hint}")
    if issubclass(known[name], library.BaseCompose):
        arguments["transforms"] = [_build_step(inner) for inner in arguments.get("transforms", ())]
    try:
        with warnings.catch_warnings():
            # albumentations warns and goes on with another value than the one that was asked for
            warnings.simplefilter("error", UserWarning)
            return known[name](**arguments)
    except (ValueError, TypeError, UserWarning) as error:
        raise UserError(
            f"augment.albumentations: {name} refuses {arguments} ({_reason(error)}); correct it"
        ) from error


def _did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"; did you mean {lower[close[0]]!r}?" if close else "; see albumentations.ai/docs"


def _reason(error: Exception) -> str:
    """pydantic's report in one line: the field and what is wrong with it."""
    lines = [line.split(" [type=")[0].strip() for line in str(error).splitlines()]
    if "validation error" in lines[0] and len(lines) > 2:
        return f"{lines[1]}: {lines[2]}"
    return lines[0]


def _apply(
    transforms: list[Any], photo: np.ndarray, labels: tuple[np.ndarray, ...] | None, seed: int
) -> dict[str, Any]:
    """Run transforms in order on one photo, and on its boxes when there are labels."""
    library = _albumentations()
    data: dict[str, Any] = {"image": photo}
    params = None
    if labels is not None:
        data |= {"bboxes": labels[0], "classes": labels[1], "index": np.arange(len(labels[0]))}
        params = library.BboxParams(
            format="albumentations",
            label_fields=["classes", "index"],
            clip=True,
            filter_invalid_bboxes=True,
        )
    compose = library.Compose(transforms, bbox_params=params)
    # One stream for the chain: set_random_seed() would hand every transform the same draws.
    compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
    try:
        return compose(**data)
    except Exception as error:
        names = ", ".join(type(transform).__name__ for transform in transforms)
        raise UserError(
            f"albumentations {names} failed on a photo of {_kind(photo)} "
            f"({_reason(error)}); correct augment.albumentations"
        ) from error


def _kind(photo: np.ndarray) -> str:
    return f"{photo.shape[1]}x{photo.shape[0]} {photo.dtype}"


def _size_changer(transforms: list[Any], photo: np.ndarray, seed: int) -> str:
    for transform in transforms:
        changed = _apply([transform], photo, None, seed)["image"]
        if changed.shape != photo.shape or changed.dtype != np.uint8:
            return type(transform).__name__
    return ", ".join(type(transform).__name__ for transform in transforms)
