"""What the driver tells at the start of a run: what was loaded, what the data holds, what looks wrong."""

from __future__ import annotations

from pathlib import Path

from yolo_ray.config.schema import TrainConfig
from yolo_ray.data.leaks import shared_photos
from yolo_ray.data.records import Records
from yolo_ray.model.build import Detector
from yolo_ray.train.checkpoint import disk_explained


def loaded_sentence(config: TrainConfig, detector: Detector, source: str) -> str:
    """How much of a weights file was of use; ``source``: the file that was read in its place."""
    if not config.model.endswith(".pt"):
        return ""
    found, total = detector.loaded
    if source != config.model:
        return f"the architecture is that of {source}, the tensors are those of the checkpoint"
    return f"{found} of {total} tensors loaded from {config.model}; the rest start from scratch"


def data_sentence(train: Records, val: Records) -> str:
    """Photos, boxes, background, and what was changed about the labels, of both splits."""
    return "; ".join(_split_words(split, one) for split, one in (("train", train), ("val", val)))


def _split_words(split: str, records: Records) -> str:
    words = [f"{split}: {_many(len(records), 'photo')} with {_many(len(records.classes), 'box')}"]
    if records.num_empty:
        words.append(f"{records.num_empty} without any (background)")
    for name, done in (
        ("clipped", "clipped to their photo"),
        ("duplicates", "dropped as repeated"),
    ):
        if count := records.counts.get(name, 0):
            words.append(f"{_many(count, 'box')} {done}")
    return ", ".join(words)


def _many(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("x") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def left_out_sentence(folder: Path, *splits: Records) -> str:
    """Bad photos, which are listed in ``left_out.txt``.

    Raises:
        UserError: the list cannot be written.
    """
    bad = [str(one) for records in splits for one in records.bad]
    if not bad:
        return ""
    path = folder / "left_out.txt"
    with disk_explained(folder):
        path.write_text("".join(f"{line}\n" for line in bad))
    return f"{len(bad)} bad photo(s) left out, the first is {bad[0]}; all are in {path}"


def leak_sentence(train: Records, val: Records) -> str:
    """A warning when validation photos are training photos too, with their number and one of them."""
    shared = shared_photos(train, val)
    if not shared:
        return ""
    one, twin = shared[0]
    example = one if one == twin else f"{one}, which is {twin}"
    return (
        f"{len(shared)} of the {len(val)} validation photos are training photos too ({example}"
        f"{' for one' if len(shared) > 1 else ''}): the metrics will look better than the model is"
    )
