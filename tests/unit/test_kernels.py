"""The Triton kernels, run by Triton's interpreter on the CPU: pixels, norms, losses and poolings equal torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "part", ["pixels", "norm", "class_loss", "box_terms", "layers", "assignment", "resize"]
)
def test_kernels_equal_torch(part: str) -> None:
    """In a process of its own: the interpreter is chosen when the kernels are defined."""
    pytest.importorskip(
        "triton", reason="this build of torch has no Triton, so it has no GPU either"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernel_checks", part]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
