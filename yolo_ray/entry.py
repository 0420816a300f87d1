"""How every ``python -m pipelines.X`` ends: one JSON line, one exit code, no traceback shown.

The last line of stdout is a JSON object that holds ``exit`` too: ``ray job submit`` flattens codes.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

import numpy as np
from pydantic import BaseModel

from yolo_ray.config.options import option_lines
from yolo_ray.config.schema import TrainConfig
from yolo_ray.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER, StopRequested, UserError

_LONGEST = 500  # characters of a message; Ray's can be pages


def run(
    pipeline: Callable[[list[str]], dict[str, Any]],
    argv: list[str] | None = None,
    schema: type[BaseModel] | None = TrainConfig,
) -> int:
    """Call a pipeline, print what it returns as the last line, and return the exit code.

    A result may hold its own ``exit`` (a gate that said no). UserError gives 2; StopRequested,
    Ctrl-C and SIGTERM give 75; anything else 1, with the traceback in a file. ``schema``: whose
    options ``--help`` lists; None for a pipeline that takes none.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        _print(sys.stdout, _help(pipeline, schema))
        return EXIT_OK
    try:
        with _sigterm_stops():
            result = pipeline(arguments)
    except (StopRequested, KeyboardInterrupt) as stop:
        return _end("stopped", str(stop) or "stopped by request; run again to go on", EXIT_STOPPED)
    except SystemExit as leave:
        if leave.code != signal.SIGTERM:  # Ray's handler of SIGTERM leaves with its number
            raise
        return _end("stopped", "stopped by SIGTERM; run again to go on", EXIT_STOPPED)
    except Exception as error:
        return _fail(error)
    code = int(result.get("exit", EXIT_OK))
    _print(sys.stdout, json.dumps(plain({**result, "exit": code})))
    return code


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """SIGTERM raises StopRequested, until Ray is joined: ``cluster.preflight.connect`` puts another handler there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise StopRequested("stopped by SIGTERM; run again to go on")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plain(value: Any) -> Any:
    """The value as JSON can say it: numpy scalars and arrays unpacked, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _fail(error: Exception) -> int:
    cause = getattr(
        error, "cause", None
    )  # Ray wraps what a task raised, with its traceback as text
    if isinstance(cause, UserError):
        error = cause
    if isinstance(error, UserError):
        return _end("error", _one_line(error), EXIT_USER)
    where = _write_traceback(error)
    message = _one_line(error)
    return _end("error", f"{type(error).__name__}: {message} (traceback: {where})", EXIT_FAILURE)


def _end(kind: str, message: str, code: int) -> int:
    _print(sys.stderr, f"{kind}: {message}")
    _print(sys.stdout, json.dumps({kind: message, "exit": code}))
    return code


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _write_traceback(error: Exception) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="yolo_ray-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        return file.name
    except OSError as full:
        return f"could not be written, {full}"


def _help(pipeline: Callable[[list[str]], dict[str, Any]], schema: type[BaseModel] | None) -> str:
    module = inspect.getmodule(pipeline)
    text = inspect.cleandoc((module and module.__doc__) or pipeline.__doc__ or "")
    if schema is None:
        return text
    return "\n".join([text, "", "Options, with their defaults:", *option_lines(schema)])


def _print(stream: TextIO, text: str) -> None:
    """Print and flush; a reader that went away (``| head``) is no error."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # Python flushes again at exit, and would complain there.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
