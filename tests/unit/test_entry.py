"""How a pipeline ends: the last line, the exit code, and what the terminal shows of an error."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from yolo_ray.entry import plain, run
from yolo_ray.errors import EXIT_GATE, StopRequested, UserError

ROOT = Path(__file__).resolve().parents[2]


def ends(
    error: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    def pipeline(argv: list[str]) -> dict[str, Any]:
        if error:
            raise error
        return {"argv": argv}

    code = run(pipeline, ["epochs=1"])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, json.loads(out.splitlines()[-1]), err


def test_a_result_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(None, capsys) == (0, {"argv": ["epochs=1"], "exit": 0}, "")


def test_numbers_that_json_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "nan": math.nan,
        "deep": [{"inf": (math.inf, np.float32(-np.inf), np.float32(0.5))}],
        "array": np.array([1.0, np.nan]),
        "count": np.int64(3),
        "truth": np.bool_(True),
        "path": Path("runs") / "train",
        "none": None,
        7: "seven",
    }
    assert run(lambda argv: values, []) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line, parse_constant=pytest.fail) == {
        "nan": None,
        "deep": [{"inf": [None, None, 0.5]}],
        "array": [1.0, None],
        "count": 3,
        "truth": True,
        "path": "runs/train",
        "none": None,
        "7": "seven",
        "exit": 0,
    }
    assert plain(True) is True


def test_a_gate_gives_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda argv: {"found": 3, "exit": EXIT_GATE}, []) == 3
    assert json.loads(capsys.readouterr().out) == {"found": 3, "exit": 3}


def test_a_mistake_of_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, err = ends(UserError("data=x not found; pass data=path"), capsys)
    assert (code, err) == (2, "error: data=x not found; pass data=path\n")
    assert last == {"error": "data=x not found; pass data=path", "exit": 2}


def test_a_mistake_that_a_task_found_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    class TaskError(Exception):  # as Ray's, which holds what the task raised
        cause = UserError("photo.jpg cannot be read; delete it")

    code, _, err = ends(TaskError("a page\nof text"), capsys)
    assert (code, err) == (2, "error: photo.jpg cannot be read; delete it\n")


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (KeyboardInterrupt(), "run again to go on"),
        (StopRequested("stopped at step 7"), "stopped at step 7"),
        (SystemExit(signal.SIGTERM), "SIGTERM"),
    ],
)
def test_a_stop_is_no_failure(
    stop: BaseException, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, last, err = ends(stop, capsys)
    assert code == last["exit"] == 75
    assert words in last["stopped"] and err == f"stopped: {last['stopped']}\n"


def test_other_exits_are_left_alone() -> None:
    def pipeline(argv: list[str]) -> dict[str, Any]:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run(pipeline, [])


def test_any_other_error_is_one_line_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, err = ends(ZeroDivisionError("first\n\nsecond"), capsys)
    assert code == last["exit"] == 1
    assert err.startswith("error: ZeroDivisionError: first (traceback: ")
    assert err.count("\n") == 1
    log = Path(last["error"].split("traceback: ")[1].rstrip(")"))
    text = log.read_text()
    log.unlink()
    assert "Traceback" in text and "second" in text and "in pipeline" in text


def test_a_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, err = ends(RuntimeError("x" * 1000), capsys)
    assert code == 1 and len(err) < 800
    Path(last["error"].split("traceback: ")[1].rstrip(")")).unlink()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_the_docstring_and_the_options(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipeline(argv: list[str]) -> dict[str, Any]:
        raise AssertionError("help runs nothing")

    assert run(pipeline, ["data=x", flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith("How a pipeline ends")
    assert "\n  optim.lr0 " in out and "first learning rate" in out
    assert run(pipeline, [flag], schema=None) == 0
    assert "optim.lr0" not in capsys.readouterr().out


PROGRAM = """
'''A pipeline.'''
import sys, time
from yolo_ray.entry import run
def main(argv):
    print("started", flush=True)
    if argv == ["wait"]:
        time.sleep(60)
    return {"long": "x" * 100_000}
sys.exit(run(main))
"""


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_75(number: signal.Signals) -> None:
    process = start("wait")
    assert process.stdout and process.stdout.readline() == "started\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == json.loads(out)["exit"] == 75
    assert err.startswith("stopped: ") and err.count("\n") == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start()
    assert process.stdout and process.stdout.readline() == "started\n"
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr and process.stderr.read() == ""
    process.stderr.close()
