"""One trained run for all commands that read one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trained_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints; tests that change it take a copy."""
    return trained_run.make(tmp_path_factory.mktemp("trained"))
