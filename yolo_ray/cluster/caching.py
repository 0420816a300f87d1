"""The cache of photos over a run: room is made on every node before it starts, what is in memory goes at its end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from yolo_ray.config.schema import PhotosConfig
from yolo_ray.data.cache import cache_file
from yolo_ray.data.reading import Reading
from yolo_ray.data.records import Records
from yolo_ray.data.room import (
    CachePlace,
    amount,
    held,
    held_bytes,
    make_room,
    others_bytes,
    sweep,
)
from yolo_ray.errors import UserError

NODE_WAIT_S = 60.0


@dataclass(frozen=True)
class _Node:
    """What one node answered; ``reason``: why it has no room."""

    host: str
    reason: str
    there: int  # bytes of this run's files that are filled already
    others: int  # bytes of other caches


def reading_of(data: PhotosConfig, imgsz: int, *splits: Records) -> Reading:
    """How photos of these splits are read, as the options say.

    Raises:
        UserError: ``data.cache_dir`` lies among the photos.
    """
    plain = Reading(imgsz, data.fast_decode)
    if data.cache == "off":
        return plain
    folder = data.cache_dir
    if folder is not None and not folder.startswith("~"):  # that is each node's own
        folder = os.path.abspath(folder)
    for records in splits if folder else ():
        _refuse_among_photos(Path(str(folder)).expanduser(), records)
    files = (cache_file(records, imgsz, fast_decode=data.fast_decode) for records in splits)
    unique = tuple(dict.fromkeys(files))  # one, if train and val are the same photos
    return replace(plain, cache=CachePlace(data.cache, unique, folder))


@contextmanager
def cached(reading: Reading, data: PhotosConfig) -> Iterator[tuple[Reading, list[tuple[str, str]]]]:
    """Yields the reading that this cluster has room for, and sentences about it (kind, text).

    Files in memory are removed from all nodes at the end. A run that is killed leaves them to the next run's start.
    """
    sentences = []
    if data.cache_dir and data.cache != "disk":
        unused = f"data.cache_dir={data.cache_dir} is not used with data.cache={data.cache}: add data.cache=disk"
        sentences.append(("warning", unused))
    if reading.cache is None:
        yield reading, sentences
        return
    stores = [int(node["Resources"].get("object_store_memory", 0)) for node in ray.nodes()]
    place = replace(reading.cache, spare_bytes=max(stores))
    reading = replace(reading, cache=place)
    nodes = _on_every_node(_prepare, place)
    refused = tuple(sorted({node.host for node in nodes if node.reason}))
    nowhere = bool(nodes) and all(node.reason for node in nodes)
    granted = replace(reading, cache=None) if nowhere else replace(reading, refused=refused)
    try:
        with held(place):  # the workers, which hold it on the other nodes, are not there yet
            yield granted, sentences + _told(place, nodes)
    finally:
        with suppress(RayError):  # how the run ended counts, not how its cache did
            _on_every_node(_clean, place)


def _told(place: CachePlace, nodes: list[_Node]) -> list[tuple[str, str]]:
    reasons = dict.fromkeys(node.reason for node in nodes if node.reason)
    told = [("warning", f"{reason}; photos are decoded anew each time there") for reason in reasons]
    ready = [node for node in nodes if not node.reason]
    if ready:
        text = (
            f"data.cache={place.kind}: {amount(place.num_bytes)} of resized photos in {place.path}"
        )
        least = min(node.there for node in ready)
        text += f", {amount(least)} of them there already" if least else ", filled as they are read"
        others = max(node.others for node in ready)
        if others and place.kind == "disk":
            text += f"; caches of other data there take {amount(others)}, remove files you no longer need"
        told.append(("note", text))
    return told


def _prepare(place: CachePlace) -> _Node:
    """On a node: away with what killed runs left, then room for this one."""
    sweep(place, keep=True)
    reason = make_room(place)
    return _Node(socket.gethostname(), reason, held_bytes(place), others_bytes(place))


def _clean(place: CachePlace) -> None:
    sweep(place, keep=False)


def _on_every_node(work: Any, place: CachePlace) -> list[Any]:
    """What ``work(place)`` returns on the nodes that answer in time; one that does not looks after itself later."""
    remote = ray.remote(num_cpus=0, max_retries=0)(work)
    tasks = [
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(place)
        for node in ray.nodes()
        if node["Alive"]
    ]
    done, _ = ray.wait(tasks, num_returns=len(tasks), timeout=NODE_WAIT_S)
    answers = []
    for task in done:
        try:
            answers.append(ray.get(task))
        except RayTaskError:
            raise
        except RayError:  # the node has gone
            continue
    return answers


def _refuse_among_photos(folder: Path, records: Records) -> None:
    folders = [os.path.dirname(path) for path in records.paths if os.path.isabs(path)]
    photos = os.path.commonpath(folders) if folders else ""
    if photos and folder.resolve().is_relative_to(Path(photos).resolve()):
        raise UserError(
            f"data.cache_dir={folder} lies among the photos in {photos}, where nothing is written: "
            "give a folder elsewhere"
        )
