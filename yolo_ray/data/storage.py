"""Bytes from a disk, an object store or a web server. The only import of fsspec.

A place is a local path, an address (``s3://``, ``gs://``, ``http(s)://``), or a file inside a tar:
``tar://NAME@OFFSET+LENGTH::SHARD``, whose shard is a path or an address. Local paths are read with the
operating system's own calls. What a remote read needs of the environment is named in ``CARRIED``.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import fsspec.config

from yolo_ray.config.address import is_remote, scheme_of, split_host
from yolo_ray.errors import UserError

ATTEMPTS = 5
FIRST_WAIT_S = 0.4  # doubled each time: 6 s in all, what a store takes to get over a hiccup
GCSFS_ATTEMPTS = 6  # gcsfs makes its own, and takes no number: ours would multiply them
READ_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
MOST_WASTED_BYTES = 2**24
TAR_SCHEME = "tar"
# By scheme: the only variables that travel to tasks on other nodes. A name that ends with _ is a beginning.
CARRIED: Mapping[str, tuple[str, ...]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
        "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME",
        "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_STS_REGIONAL_ENDPOINTS", "AWS_EC2_METADATA_DISABLED",
        "AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT", "FSSPEC_CONFIG_DIR", "FSSPEC_S3", "FSSPEC_S3_",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "STORAGE_EMULATOR_HOST", "FSSPEC_CONFIG_DIR",
        "FSSPEC_GS", "FSSPEC_GS_", "FSSPEC_GCS", "FSSPEC_GCS_",
    ),
    "http": ("FSSPEC_CONFIG_DIR", "FSSPEC_HTTP", "FSSPEC_HTTP_", "FSSPEC_HTTPS", "FSSPEC_HTTPS_"),
}  # fmt: skip
_FAMILY = {"gcs": "gs", "https": "http"}
_PACKAGES = {
    "s3": ("s3fs", "yolo_ray[s3]"),
    "gs": ("gcsfs", "yolo_ray[gcs]"),
    "http": ("aiohttp", "aiohttp"),
}
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
    | {"DefaultCredentialsError", "TokenRetrievalError", "RefreshError", "NoAuthTokenError"}
)
_CHECK = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (a public bucket: FSSPEC_S3_ANON=true), "
    "and AWS_ENDPOINT_URL for a store of your own",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (a public bucket: FSSPEC_GS_TOKEN=anon)",
    "http": "that a browser opens it without a login, or FSSPEC_HTTPS with the header to send",
}  # fmt: skip


class StorageError(UserError):
    """A store or server that does not give what was asked for: one sentence with the address and what to check."""


# ------------------------------------------------------------------------------------ environment


def access_of(places: Iterable[str]) -> dict[str, str]:
    """The variables that reading these places depends on, with their values here. Secrets: never to be shown."""
    families = {_family(_shard_of(place)) for place in places if "://" in place}
    wanted = [name for family in families if family for name in CARRIED[family]]
    exact = {name for name in wanted if not name.endswith("_")}
    begins = tuple(name for name in wanted if name.endswith("_"))
    return {
        name: value
        for name, value in os.environ.items()
        if name in exact or (begins and name.startswith(begins))
    }


def use_access(access: Mapping[str, str]) -> None:
    """Take over what ``access_of`` found on the driver, in a task on any node.

    Not by Ray's runtime environment: Ray writes that to its logs, values and all.
    """
    os.environ.update(
        {name: value for name, value in access.items() if os.environ.get(name) != value}
    )


def _family(place: str) -> str | None:
    scheme = scheme_of(place)
    return _FAMILY.get(scheme or "", scheme) if is_remote(place) else None


# -------------------------------------------------------------------------------------- files in tars


def packed_place(name: str, offset: int, length: int, shard: str) -> str:
    """The place of ``length`` bytes at ``offset`` of a tar, which hold the file ``name``."""
    return f"{TAR_SCHEME}://{name.replace('::', ':%3A')}@{offset}+{length}::{shard}"


def split_packed(place: str) -> tuple[str, int, int, str] | None:
    """Name, offset, length and shard of a place in a tar; None for any other place."""
    if not place.startswith(f"{TAR_SCHEME}://"):
        return None
    inner, _, shard = place[len(TAR_SCHEME) + 3 :].partition("::")
    name, _, span = inner.rpartition("@")
    offset, _, length = span.partition("+")
    return name.replace(":%3A", "::"), int(offset), int(length), shard


def _shard_of(place: str) -> str:
    packed = split_packed(place)
    return packed[3] if packed else place


def is_plain(place: str) -> bool:
    """Whether a place is a whole file of its own on a disk."""
    return scheme_of(place) is None


# -------------------------------------------------------------------------------------------- reading


def read_bytes(place: str | Path, start: int | None = None, stop: int | None = None) -> bytes:
    """Bytes [start, stop) of a file; a negative start counts from its end, none is the beginning.

    Raises:
        OSError: a local file, as ``open`` does.
        FileNotFoundError: an address with nothing behind it.
        StorageError: anything else about an address, after a few attempts where one may help.
    """
    place = str(place)
    packed = split_packed(place)
    if packed is not None:
        return _read_packed(place, packed, start, stop)
    if is_remote(place):
        return _read_remote(place, start, stop)
    if start is None and stop is None:
        return Path(place).read_bytes()
    with open(place, "rb") as file:
        first = _seek(file.seek, start)
        return file.read() if stop is None else file.read(max(0, stop - first))


def _seek(seek: Callable[[int, int], int], start: int | None) -> int:
    if start is None or start >= 0:
        return seek(start or 0, os.SEEK_SET)
    length = seek(0, os.SEEK_END)
    return seek(max(0, length + start), os.SEEK_SET)


def _read_packed(
    place: str, packed: tuple[str, int, int, str], start: int | None, stop: int | None
) -> bytes:
    _, offset, length, shard = packed
    first, last, _ = slice(start, stop).indices(length)
    data = read_bytes(shard, offset + first, offset + last)
    if len(data) != last - first:
        raise StorageError(f"{shard} ends before {place}: it is not whole, copy or pack it again")
    return data


def read_text(place: str) -> str:
    """A UTF-8 text, with or without a byte order mark. Raises as ``read_bytes``, and UnicodeDecodeError."""
    if is_plain(place):
        return Path(place).read_text(encoding="utf-8-sig")
    return read_bytes(place).decode("utf-8-sig")


def size_of(place: str) -> int:
    """Bytes of a local or remote file. Raises as ``read_bytes``."""
    if is_plain(place):
        return os.stat(place).st_size
    filesystem = _filesystem_of(place)
    return int(_patiently(place, lambda: _run(filesystem, filesystem._info, place)["size"]))


def find(place: str) -> list[str]:
    """Addresses of all files below a remote folder, or that fit a remote pattern (``*``, ``?``, ``[``), sorted.

    Raises:
        StorageError: the store cannot be listed; a web server never can.
    """
    if _family(place) == "http":
        raise StorageError(
            f"{place}: a web server lists no folders; name a .txt file with one address a line instead"
        )
    filesystem = _filesystem_of(place)
    listing = filesystem._glob if any(mark in place for mark in "*?[") else filesystem._find
    try:
        # No time limit of our own: a million names take minutes, and every page of them has one.
        found = _patiently(place, lambda: fsspec.asyn.sync(filesystem.loop, listing, place))
    except FileNotFoundError:
        return []
    return [f"{scheme_of(place)}://{path}" for path in sorted(found)]


def _read_remote(place: str, start: int | None, stop: int | None) -> bytes:
    filesystem = _filesystem_of(place)
    if start is not None and start == stop:
        return b""
    data = _patiently(
        place, lambda: _run(filesystem, filesystem._cat_file, place, start=start, end=stop)
    )
    wanted = None if start is None or stop is None or start < 0 else stop - start
    if wanted is None or len(data) <= wanted:
        return data
    # The server knows no ranges and sent the whole file. That may pass for a photo, not for a shard of a pack.
    if len(data) > MOST_WASTED_BYTES:
        raise StorageError(
            f"{place}: its server ignores ranges and sends {len(data)} bytes for {wanted}; use one that knows ranges "
            "(nginx, an object store), or copy the pack to a disk"
        )
    return data[start:stop]


def _run(filesystem: Any, work: Callable[..., Any], place: str, **options: Any) -> Any:
    return fsspec.asyn.sync(filesystem.loop, work, place, timeout=READ_TIMEOUT_S, **options)


# ---------------------------------------------------------------------------------------- file systems


def _filesystem_of(place: str) -> Any:
    """fsspec's file system for an address, made once for each process and state of the environment."""
    family = _family(place)
    assert family is not None, place
    try:
        return _filesystem(family, tuple(sorted(access_of([place]).items())))
    except ImportError as error:
        package, install = _PACKAGES[family]
        raise StorageError(
            f"{place} needs the package {package}: pip install '{install}' here and on every node"
        ) from error
    except Exception as error:
        raise StorageError(
            f"{place} cannot be reached ({_reason(error)}); check {_CHECK[family]}"
        ) from error


@lru_cache(maxsize=8)
def _filesystem(family: str, access: tuple[tuple[str, str], ...]) -> Any:
    """``access`` is only a key: fsspec and the libraries below it read the environment themselves."""
    # fsspec reads its own settings at import, which may be before use_access.
    directory = dict(access).get("FSSPEC_CONFIG_DIR", fsspec.config.default_conf_dir)
    fsspec.config.set_conf_files(directory, fsspec.config.conf)
    fsspec.config.set_conf_env(fsspec.config.conf, dict(access))
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if family == "s3":
        options["max_concurrency"] = 1  # else every read asks for the size first
        given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},  # the attempts are counted here
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            **given,
        }
    if family == "gs":
        # It logs a traceback for every failed attempt; the sentence says what matters. And it would ask what kind
        # of bucket it reads, by another protocol, for a minute where that is closed.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    filesystem = fsspec.filesystem(family, **options)
    if family == "s3":
        filesystem.retries = 1
    return filesystem


# --------------------------------------------------------------------------------------------- errors


def _patiently(place: str, work: Callable[[], Any]) -> Any:
    """``work()``, again after a growing wait while what it raises may pass.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it may not pass, or did not.
    """
    attempts = 1 if _family(place) == "gs" else ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return work()
        except FileNotFoundError:
            raise
        except Exception as error:
            _refuse_final(place, error)
            if attempt == attempts:
                made = GCSFS_ATTEMPTS if _family(place) == "gs" else ATTEMPTS
                raise StorageError(
                    f"{place} could not be read in {made} attempts ({_reason(error)}); check the network and "
                    f"that {_endpoint(place)} is up, then run again"
                ) from error
        # Spread, or all readers of a store that said "slow down" come back at once.
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
    raise AssertionError("the last attempt returns or raises")


def _refuse_final(place: str, error: Exception) -> None:
    """Raise for what no second attempt heals."""
    check = _CHECK[str(_family(place))]
    if type(error).__name__ in _NO_CREDENTIALS:
        raise StorageError(
            f"{place}: no usable credentials ({_reason(error)}); set {check}"
        ) from error
    status = _status_of(error)
    forbidden = str(error).startswith("Forbidden")  # all that gcsfs says of a 403
    if forbidden or isinstance(error, PermissionError) or status in (401, 403):
        raise StorageError(
            f"{place}: access is refused ({_reason(error)}); check {check}"
        ) from error
    # S3 answers 400 to a request that was too slow, too.
    if status is not None and 400 < status < 500 and status not in (408, 425, 429):
        raise StorageError(
            f"{place} cannot be read ({_reason(error)}); check the address"
        ) from error
    if isinstance(error, ImportError | ValueError | TypeError):
        raise StorageError(
            f"{place} cannot be read ({_reason(error)}); check the address and {check}"
        ) from error


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an error of aiohttp, gcsfs or s3fs (which keeps it in the error's cause)."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = getattr(error, "status", None) or getattr(error, "code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _endpoint(place: str) -> str:
    family = _family(place)
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}
    given = [os.environ[name] for name in names.get(str(family), ()) if name in os.environ]
    return given[0] if given and "@" not in given[0] else split_host(place)[0]


def _reason(error: Exception) -> str:
    """The first line of an error, without any value of the variables that may be secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        secret = any(word in name for word in ("KEY", "SECRET", "TOKEN", "FSSPEC", "CREDENTIALS"))
        if secret and len(value) > 5:
            text = text.replace(value, f"${name}")
    return text[:200]
