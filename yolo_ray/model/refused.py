"""Why a weights file could not be read, for the person who passed it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")
# First bytes of an archive of torch and of a pickle, protocols 2 to 5, which older torch wrote.
_ARCHIVE = b"PK\x03\x04"
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_PASS = "pass the .pt of a detection model"


def reason_of(path: Path, error: Exception) -> str:
    """The rest of a sentence that begins with the file's name: what is wrong with it, and what to do."""
    with open(path, "rb") as file:
        head = file.read(4)
    if not head:
        return "is empty: copy it again, or " + _PASS
    if head == _ARCHIVE and not zipfile.is_zipfile(path):
        return "is cut off: copy it again, or " + _PASS
    if head != _ARCHIVE and not head.startswith(_PICKLES):
        return "is not an Ultralytics checkpoint, nor any file of torch: " + _PASS
    found = next(filter(None, map(_FORBIDDEN.search, _texts(error))), None)
    if found or head != _ARCHIVE:
        what = (
            f"names {found.group(1)}, which is" if found else "is an old pickle, or names what is"
        )
        return (
            f"{what} no part of a detector's weights, and was not loaded, since that could run code: {_PASS}; if you "
            "trust its author, save it anew with Ultralytics, YOLO('old.pt').save('new.pt'), and pass the new file"
        )
    return f"is not an Ultralytics checkpoint ({type(error).__name__} on reading it): {_PASS}"


def _texts(error: BaseException) -> list[str]:
    """The messages of an error and of what caused it."""
    texts, cause = [], error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    return texts
