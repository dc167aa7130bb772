"""From sources to a prepared corpus on disk, and the reader of it.

Every text is read once into a spool; duplicates are dropped over all sources, the rest is split by content hash, the
tokenizer is trained on the training part, and each part is written as token shards (`shards.py`) in order of content
hash. So the same documents give the same bytes in whatever order they are read, and, with
`near_dedup`, no held-out document has a near-duplicate in the training part (as far as the search finds them).

    tokenizer.json   train/<number of the source>/   heldout/ (with texts.jsonl)   corpus.json (written last)
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moonlet.config.run import RunConfig, SourceConfig
from moonlet.data.preparation import MARKER, TEXTS, TOKENIZER, Preparation, Progress
from moonlet.data.shards import TokenShard, storing
from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer

_FORMAT = 1


@dataclass(frozen=True)
class HeldoutDocument:
    """`tokens` int64 [T] ends with [EOS]; `num_bytes` is the UTF-8 size of `text`, without it."""

    id: str
    source: str
    tokens: np.ndarray
    num_bytes: int
    text: str


class Corpus:
    """A prepared corpus, opened read-only; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError where the preparation did not finish or a part is damaged."""
        self.folder = folder
        self.manifest = _read_marker(folder)
        self.tokenizer = Tokenizer.load(folder / TOKENIZER)
        if self.tokenizer.hash != self.manifest["tokenizer_hash"]:
            raise DataError(f"'{folder / TOKENIZER}' is not the tokenizer that the corpus was written with")
        self._shards: dict[str, TokenShard] = {}

    @property
    def source_names(self) -> list[str]:
        return list(self.manifest["sources"])

    @property
    def planted(self) -> dict[str, SourceConfig]:
        """Sources whose documents are made while training (`long_context.py`), by name."""
        sources = [SourceConfig.parse(table) for table in self.manifest["origin"]["sources"]]
        return {source.name: source for source in sources if source.kind == "planted"}

    def source(self, name: str) -> TokenShard:
        """Training documents of one source."""
        if name not in self.manifest["sources"]:
            raise DataError(f"the corpus in '{self.folder}' has no source '{name}', only {self.source_names}")
        if name not in self._shards:
            part = self.folder / self.manifest["sources"][name]["folder"]
            self._shards[name] = TokenShard(part, self.tokenizer.vocab_size)
        return self._shards[name]

    @cached_property
    def heldout(self) -> list[HeldoutDocument]:
        """Documents never trained on, in order of content hash."""
        shard = TokenShard(self.folder / "heldout", self.tokenizer.vocab_size)
        with (self.folder / "heldout" / TEXTS).open(encoding="utf-8") as file:
            entries = [json.loads(line) for line in file]
        return [
            HeldoutDocument(
                shard.ids[index], entry["source"], shard.tokens(index), len(entry["text"].encode()), entry["text"]
            )
            for index, entry in enumerate(entries)
        ]


def prepare_corpus(config: RunConfig, folder: Path, seed: int = 0, progress: Progress | None = None) -> Corpus:
    """Write the corpus of `config.data` to `folder`, or open it where it is already there. Safe to kill and call again.

    Of two processes that prepare the same folder one works and the other waits. `seed` chooses which documents train
    the tokenizer where there are more than it reads.

    Raises:
        DataError: nothing is left to train on, a source is malformed, or the folder holds another corpus.
        StorageError: the disk is full or cannot be written; `folder` is as it was.
    """
    origin = describe_origin(config, seed)
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if (folder / MARKER).is_file():
                return _open_same(folder, origin)
            _refuse_foreign(folder)
            work = folder.with_name(folder.name + ".partial")
            shutil.rmtree(work, ignore_errors=True)
            try:
                Preparation(config, work, seed, progress).run(origin)
                _move_into_place(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return Corpus(folder)


def describe_origin(config: RunConfig, seed: int) -> dict[str, Any]:
    """What decides the contents of a corpus and of the rows made from it."""
    data = config.data.model_dump(mode="json")
    return {"format": _FORMAT, "vocab_size": config.model.vocab_size, "seed": seed, **data}


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no prepared corpus in '{folder}'; run `moonlet run` to prepare one") from None
    except ValueError as error:
        raise DataError(f"'{folder / MARKER}' is damaged ({error}); delete '{folder}' and prepare it again") from None


def _open_same(folder: Path, origin: dict[str, Any]) -> Corpus:
    corpus = Corpus(folder)
    found = corpus.manifest["origin"]
    changed = sorted(key for key in origin.keys() | found.keys() if origin.get(key) != found.get(key))
    if changed:
        raise DataError(
            f"'{folder}' was prepared with other values of {changed}; use another run directory, or delete that folder"
        )
    return corpus


def _refuse_foreign(folder: Path) -> None:
    """A corpus appears whole, with its marker; a folder with anything else in it is somebody's and stays untouched."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"'{folder}' exists and is not a corpus; choose another run directory, or move it away")


def _move_into_place(work: Path, folder: Path) -> None:
    os.replace(work, folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel frees it however the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
