"""Frames of a video file, by cv2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from yolo_ray.augment.integrity import PhotoError

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})


def is_video(place: str) -> bool:
    """By its suffix."""
    return Path(place).suffix.lower() in VIDEO_SUFFIXES


def count_frames(path: str) -> int:
    """How many frames the file says it has, at least one. Raises PhotoError: none can be decoded."""
    video = _open(path)
    try:
        stated = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        if not video.read()[0]:
            raise PhotoError(path, "no frame of this video can be decoded")
        return max(1, stated)
    finally:
        video.release()


def read_frames(path: str, numbers: range) -> Iterator[tuple[int, np.ndarray]]:
    """``(number, uint8 [h,w,3] RGB)`` of those frames, counted from 0; fewer if the video ends before.

    Raises PhotoError: it cannot be opened.
    """
    video = _open(path)
    try:
        place = _go_to(video, numbers.start)
        for number in numbers:
            while place < number and video.grab():
                place += 1
            done, frame = video.read()
            if not done:
                return
            place += 1
            yield number, np.ascontiguousarray(frame[:, :, ::-1])
    finally:
        video.release()


def _go_to(video: cv2.VideoCapture, number: int) -> int:
    """The frame that comes next: ``number``, or the first where the file cannot be sought in."""
    if number and video.set(cv2.CAP_PROP_POS_FRAMES, number):
        if int(video.get(cv2.CAP_PROP_POS_FRAMES)) == number:
            return number
        video.set(cv2.CAP_PROP_POS_FRAMES, 0)
    return int(video.get(cv2.CAP_PROP_POS_FRAMES)) if number else 0


def _open(path: str) -> cv2.VideoCapture:
    if not Path(path).is_file():
        raise PhotoError(path, "No such file")
    video = cv2.VideoCapture(path)
    if not video.isOpened():
        video.release()
        raise PhotoError(path, "cannot be opened as a video")
    return video
