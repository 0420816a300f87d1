"""Whether the bytes of a JPEG or PNG file are all there, without decoding them."""

from __future__ import annotations

import zlib
from pathlib import Path

JPEG_START, JPEG_END, PNG_START = b"\xff\xd8", b"\xff\xd9", b"\x89PNG\r\n\x1a\n"


class PhotoError(Exception):
    """A photo that cannot be used, with its path and one plain reason."""

    def __init__(self, path: str | Path, reason: str) -> None:
        """Path of the photo, and the reason without it."""
        super().__init__(str(path), reason)  # both, so that it can be pickled
        self.path = str(path)
        self.reason = reason

    def __str__(self) -> str:
        """path: reason."""
        return f"{self.path}: {self.reason}"


def defect_of(data: bytes) -> str | None:
    """What is wrong with a photo file's bytes, or None. Formats other than JPEG and PNG pass."""
    if not data:
        return "empty file"
    if data.startswith(JPEG_START):
        return None if _jpeg_has_end(data) else "truncated JPEG (no end marker)"
    if data.startswith(PNG_START):
        return _png_defect(data)
    return None


def check_complete(path: str | Path, data: bytes) -> None:
    """Raise PhotoError, naming ``path``, when ``data`` is not a whole photo file."""
    if reason := defect_of(data):
        raise PhotoError(path, reason)


def _jpeg_has_end(data: bytes) -> bool:
    """Whether the end marker follows the pixels; cameras may append bytes of their own after it.

    Only what follows the start of the scan counts: the EXIF thumbnail before it has its own end
    marker. Inside a scan every 0xFF is stuffed, so an end marker found there is one (ITU T.81,
    B.1.1.5).
    """
    if data.endswith(JPEG_END):
        return True
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xDA:
            return data.find(JPEG_END, at) >= 0
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _png_defect(data: bytes) -> str | None:
    """Walk the chunks up to IEND and check the CRC-32 of each (PNG specification, section 5)."""
    view, at = memoryview(data), len(PNG_START)
    while at < len(data):
        kind = bytes(view[at + 4 : at + 8])
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        if end > len(data):
            return "truncated PNG"
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return f"corrupt PNG (checksum of chunk {kind.decode('latin-1')})"
        if kind == b"IEND":
            return None
        at = end
    return "truncated PNG"
