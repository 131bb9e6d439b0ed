from __future__ import annotations

from pathlib import Path

import pytest
from bench_samples import write_data


@pytest.fixture
def data(tmp_path) -> Path:
    """Small data files of every suite, for models of bytes."""
    return write_data(tmp_path / "data")
