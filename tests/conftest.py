"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import make_dataset


@pytest.fixture
def tiny_dataset(tmp_path: Path) -> Callable[..., Path]:
    """make_dataset() in a folder of this test: ``tiny_dataset(train=8, ...)`` returns data.yaml."""

    def make(name: str = "data", **options: Any) -> Path:
        return make_dataset(tmp_path / name, **options)

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """Folder of real photos beside the repository, None in a plain clone: do not skip then."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
