"""A tiny model, a tiny corpus and a tiny recipe: real parts, a few milliseconds a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run

from moonlet.config import RunConfig
from moonlet.train.pretrain import build_parts
from moonlet.train.step import Parts


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus that `tiny_run.config` reads."""
    return tiny_run.prepare(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def recipe(corpus_folder: Path) -> Any:
    """`recipe(train={...}, ...)` -> RunConfig on the prepared corpus."""

    def build(**changes: Any) -> RunConfig:
        return tiny_run.config(corpus_folder.parent / "texts", **changes)

    return build


@pytest.fixture
def parts(recipe: Any) -> Any:
    """`parts(config)` -> everything that a step works with, on one rank."""

    def build(config: RunConfig | None = None, **changes: Any) -> Parts:
        from moonlet.parallel.ranks import Ranks

        return build_parts(config or recipe(**changes), Ranks())

    return build
