"""Small real corpora: parts of the standard library copied to a folder, and recipes over them."""

from __future__ import annotations

import hashlib
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonlet.config import RunConfig, SourceConfig, resolve_run
from moonlet.data.corpus import Corpus, prepare_corpus

VOCAB = 512
FILES = [f"json/{name}.py" for name in ("decoder", "encoder", "scanner", "tool")] + [
    f"email/{name}.py"
    for name in ("parser", "policy", "header", "utils", "quoprimime", "generator", "iterators", "encoders", "charset")
]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen files of Python source, about 110 kB."""
    folder = tmp_path_factory.mktemp("texts")
    for name in FILES:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(sysconfig.get_path("stdlib")) / name, target)
    return folder


def source(kind: str, path: Path | str | None = None, **fields: Any) -> SourceConfig:
    table = {"name": kind, "kind": kind, **fields}
    return SourceConfig.parse(table if path is None else {**table, "path": str(path)})


def recipe(
    sources: list[SourceConfig], stages: list[dict[str, Any]] | None = None, vocab: int = VOCAB, **data: Any
) -> RunConfig:
    """A run over `sources`; without `stages` one stage that mixes them all alike."""
    mixture = {entry.name: 1.0 for entry in sources}
    stages = stages or [{"name": "only", "seq_len": 64, "tokens": 4096, "batch_tokens": 512, "mixture": mixture}]
    model = {
        "preset": "nano",
        "vocab_size": vocab,
        "pad_token_id": vocab - 1,
        "bos_token_id": vocab - 16,
        "eos_token_id": vocab - 14,
    }
    tables = [entry.model_dump(exclude_none=True) for entry in sources]
    return resolve_run({"name": "test", "model": model, "data": {"sources": tables, **data}, "stages": stages})


@pytest.fixture(scope="session")
def new_source() -> Callable[..., SourceConfig]:
    return source


@pytest.fixture(scope="session")
def new_recipe() -> Callable[..., RunConfig]:
    return recipe


@pytest.fixture(scope="session")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two sources of text, and a planted one."""
    sources = [
        source("text", text_folder / "email", name="email"),
        source("text", text_folder / "json", name="json"),
        source("planted", facts=2),
    ]
    return prepare_corpus(recipe(sources, heldout_fraction=0.2), tmp_path_factory.mktemp("run") / "data")


@pytest.fixture()
def config(text_folder: Path) -> RunConfig:
    """One source of text with a fifth held out."""
    return recipe([source("text", text_folder)], heldout_fraction=0.2)


def _digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "corpus.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="session")
def digest() -> Callable[[Path], dict[str, str]]:
    """sha256 of every file of a corpus, without its marker (that one names the folder of the sources)."""
    return _digest
