"""A complete invented run, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.synthetic_run import write_synthetic_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("runs") / "laptop")
