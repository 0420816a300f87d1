"""Which photos a split has: folders, patterns and lists, on a disk or elsewhere. Asked once, by the driver."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection
from glob import glob
from pathlib import Path

from yolo_ray.config.address import checked_place, is_remote, join, parent_of
from yolo_ray.data.formats import (
    PHOTO_SUFFIXES,
    UNREADABLE_SUFFIXES,
    DataYaml,
    Split,
    load_data_yaml,
)
from yolo_ray.data.packs import packed_entry
from yolo_ray.data.storage import find, read_text
from yolo_ray.errors import UserError

PATTERN_MARKS = "*?["


def list_photos(data: DataYaml, split: Split) -> list[str]:
    """Absolute paths or addresses of a split's photos, sorted. Symbolic links are not resolved.

    Folders are searched through, hidden files passed over. Lines of a .txt are relative to its
    folder and kept even if they are no photos, so that they can be named. Raises UserError for a
    missing or empty split.
    """
    if split not in data.splits:
        raise UserError(
            f"{data.file} has no '{split}:'; add it with the folder of the {split} photos"
        )
    photos: list[str] = []
    for entry in data.splits[split]:
        photos += _photos_at(data, split, checked_place(entry))
    if not photos:
        where = ", ".join(data.splits[split])
        raise UserError(
            f"{data.file}: split '{split}' has no photos in {where}; correct '{split}:'"
        )
    return sorted(photos)


def photos_of(source: str, split: Split = "val", suffixes: Collection[str] = ()) -> list[str]:
    """The files that a source without labels names, in a fixed order: at least one.

    A folder (searched through), one file, a pattern, a .txt (in its order), a data.yaml (that split), or an address of
    one of them. ``suffixes``: files that folders and patterns give beside photos. One named file is taken as it is.

    Raises:
        UserError: nothing is there.
    """
    place = checked_place(source)
    if place.lower().endswith((".yaml", ".yml")):
        data = load_data_yaml(place)
        if packed_entry(data, split):
            raise UserError(
                f"source={source} is a pack: pass the data.yaml that it was packed from"
            )
        return list_photos(data, split)
    if is_remote(place):
        found = _remote_photos(parent_of(place), place)
    else:
        found = _local_files(os.path.abspath(os.path.expanduser(place)), source, suffixes)
    if not found:
        raise UserError(f"source={source} holds no photo; pass a folder, file or pattern that does")
    return found if place.lower().endswith(".txt") else sorted(found)


def _local_files(place: str, source: str, suffixes: Collection[str]) -> list[str]:
    if os.path.isdir(place):
        return _photos_in(place, suffixes)
    if os.path.exists(place):
        return _photos_listed(place) if place.lower().endswith(".txt") else [place]
    if not any(mark in place for mark in PATTERN_MARKS):
        raise UserError(f"source={source} is not there; check the path")
    found = glob(place, recursive=True)
    return [path for path in found if os.path.isfile(path) and _is_photo(path, suffixes)]


def _photos_at(data: DataYaml, split: str, entry: str) -> list[str]:
    if is_remote(entry) or (is_remote(data.root) and not os.path.isabs(entry)):
        return _remote_photos(data.root, entry)
    place = _place(data, split, entry)
    if os.path.isdir(place):
        return _photos_in(place)
    return _photos_listed(place) if place.lower().endswith(".txt") else [place]


def _place(data: DataYaml, split: str, entry: str) -> str:
    """Absolute place of an entry. Roboflow's exports write ../train/images for train/images."""
    place = os.path.abspath(data.root / Path(entry).expanduser())
    if not os.path.exists(place) and entry.startswith("../"):
        beside = os.path.abspath(Path(data.root) / entry[3:])
        place = beside if os.path.exists(beside) else place
    if not os.path.exists(place):
        raise UserError(
            f"{data.file}: '{split}: {entry}' leads to {place}, which is not there; correct it"
        )
    return place


def _photos_in(folder: str, suffixes: Collection[str] = ()) -> list[str]:
    """Photos below a folder. Links to folders are followed, each folder once."""
    photos: list[str] = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else sorted(name for name in folders if name[0] != ".")
        if real not in seen:
            photos += [
                os.path.join(parent, name)
                for name in files
                if name[0] != "." and _is_photo(name, suffixes)
            ]
        seen.add(real)
    return photos


def _is_photo(name: str, others: Collection[str] = ()) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return suffix in PHOTO_SUFFIXES | UNREADABLE_SUFFIXES or suffix in others


def _photos_listed(file: str) -> list[str]:
    """Photos that a .txt names: paths, addresses, or places relative to the folder of the list."""
    try:
        lines = read_text(file).splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{file} is not there; correct the list's name in data.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); save it as UTF-8 text") from error
    named = [checked_place(line.strip()) for line in lines if line.strip()]
    return [_listed(file, name) for name in named]


def _listed(file: str, name: str) -> str:
    if is_remote(name):
        return name
    if is_remote(file) and not os.path.isabs(name):
        return join(parent_of(file), name)
    return os.path.abspath(os.path.join(os.path.dirname(file), name))


def _remote_photos(root: str, entry: str) -> list[str]:
    """Photos of an entry that is an address, or relative to the address ``root``."""
    place = join(root, entry)
    if place.lower().endswith(".txt"):
        return _photos_listed(place)
    if not any(mark in place for mark in PATTERN_MARKS):
        if _is_photo(posixpath.basename(place)):
            return [place]
        photos = _visible_photos(place, place)
        if not photos and entry.startswith("../"):  # Roboflow's exports, as on a disk
            beside = join(root, entry[3:])
            photos = _visible_photos(beside, beside)
        return photos
    first = min(place.index(mark) for mark in PATTERN_MARKS if mark in place)
    return _visible_photos(place, place[:first].rpartition("/")[0])


def _visible_photos(place: str, folder: str) -> list[str]:
    """Photos that the store lists, without those in hidden folders below ``folder``."""
    return [
        photo
        for photo in find(place)
        if _is_photo(photo) and "/." not in photo.removeprefix(folder)
    ]
