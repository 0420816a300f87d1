"""Places: local paths, and addresses such as ``s3://bucket/key``. Text only; nothing is opened here."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from yolo_ray.errors import UserError

REMOTE_SCHEMES = ("s3", "gs", "gcs", "http", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(place: str) -> str | None:
    """``s3`` of ``s3://bucket/key``, None of a path."""
    found = _SCHEME.match(place)
    return found.group(1) if found else None


def is_remote(place: str) -> bool:
    """Whether a place is an address of a store or server, not a path on a disk."""
    return scheme_of(place) in REMOTE_SCHEMES


def checked_place(place: str) -> str:
    """The place itself; ``file:///path`` becomes the path.

    Raises:
        UserError: a scheme that is not read, or an address that holds credentials.
    """
    scheme = scheme_of(place)
    if scheme is None:
        return place
    rest = place[len(scheme) + 3 :]
    if scheme == "file":
        if not rest.startswith("/"):
            raise UserError(f"{place} names no file; write file:///PATH, or the path alone")
        return rest
    if scheme not in REMOTE_SCHEMES:
        known = "://, ".join((*REMOTE_SCHEMES, "file"))
        raise UserError(f"{place}: {scheme}:// is not read; use a path or one of {known}://")
    # An address is written to config.yaml, logs and MLflow, so no secret may be part of one.
    if "@" in rest.partition("/")[0]:
        raise UserError(
            f"{scheme}://...@{rest.partition('@')[2]}: an address with credentials would be written to logs; "
            'take them out and give them to fsspec instead (FSSPEC_HTTPS=\'{"client_kwargs": {"headers": ...}}\')'
        )
    if scheme.startswith("http") and ("?" in rest or "#" in rest):
        shown = re.split(r"[?#]", rest)[0]
        raise UserError(
            f"{scheme}://{shown}?...: an address with a query has no label file beside it and may hold a secret; "
            "give plain addresses, or s3:// and gs:// with credentials in the environment"
        )
    return place


def split_host(place: str) -> tuple[str, str]:
    """``s3://bucket`` and ``/key`` of an address, so that rules on folders never touch the bucket."""
    head, rest = place.split("://", 1)
    host, slash, key = rest.partition("/")
    return f"{head}://{host}", slash + key


def join(base: str, entry: str) -> str:
    """``entry`` as seen from the remote folder ``base``; ``..`` never leaves the bucket."""
    if is_remote(entry):
        base, entry = entry, "."
    host, key = split_host(base)
    joined = posixpath.normpath(posixpath.join("/", key, entry))
    return host if joined == "/" else host + "/" + joined.lstrip("/")


def parent_of(place: str) -> str:
    """The remote folder of a remote file."""
    host, key = split_host(place)
    return host + posixpath.dirname(key)


def inside_job() -> bool:
    """Whether this process is a Ray job's, which runs in a temporary copy of its folder."""
    return "runtime_resources/working_dir_files" in os.getcwd()


def absolute_out(place: str, option: str = "out") -> Path:
    """Where a user's output goes.

    Raises:
        UserError: an address, or a relative path in a job, whose folder goes with it.
    """
    place = checked_place(place)
    if is_remote(place):
        raise UserError(
            f"{option}={place}: it is written to a disk; copy it into the store afterwards"
        )
    path = Path(place).expanduser()
    if not path.is_absolute() and inside_job():
        raise UserError(
            f"{option}={place} is relative, and a Ray job runs in a temporary copy of its folder: give an absolute path"
        )
    return Path(os.path.abspath(path))
