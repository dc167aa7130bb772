"""What a prepared corpus is on disk: token ids one after the other, and where each document begins.

tokens.bin      uint16 or uint32, documents back to back, each with [EOS] at its end
documents.npy   int64 [documents + 1], start of each document in tokens; the last entry is the total
ids.jsonl       one JSON string a line: the document's id
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from moonlet.errors import DataError, StorageError

_TOKENS, _DOCUMENTS, _IDS = "tokens.bin", "documents.npy", "ids.jsonl"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turns a failed write under `folder` into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in _NO_ROOM else "check its permissions"
        raise StorageError(f"cannot write under '{folder}': {error.strerror}; {advice} and start again") from error


class TokenWriter:
    """Writes one shard. Plain appends: a write through a memory map kills the process when the disk is full."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._type = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._starts = [0]
        self._tokens = (folder / _TOKENS).open("wb")
        self._ids = (folder / _IDS).open("w", encoding="utf-8")

    def add(self, document_id: str, pieces: Iterable[list[int]]) -> None:
        """Append one document, its ids in as many pieces as it takes."""
        length = 0
        for piece in pieces:
            self._tokens.write(np.asarray(piece, dtype=self._type).tobytes())
            length += len(piece)
        self._starts.append(self._starts[-1] + length)
        self._ids.write(json.dumps(document_id) + "\n")

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def close(self) -> None:
        for file in (self._tokens, self._ids):
            flush_to_disk(file)
            file.close()
        with (self.folder / _DOCUMENTS).open("wb") as file:
            np.save(file, np.asarray(self._starts, dtype=np.int64))
            flush_to_disk(file)


def flush_to_disk(file: object) -> None:
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]


class TokenShard:
    """A written shard, memory-mapped read-only: any number of processes may have it open."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises DataError where the files are missing or do not fit each other."""
        self.folder = folder
        token_type = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        try:
            self._starts = np.load(folder / _DOCUMENTS)
            num_bytes = (folder / _TOKENS).stat().st_size
        except (OSError, ValueError) as error:
            raise DataError(f"the corpus part '{folder}' is damaged: {error}; delete the corpus folder") from None
        if num_bytes != self._starts[-1] * token_type.itemsize:
            raise DataError(f"'{folder / _TOKENS}' is cut short: {num_bytes} bytes; delete the corpus folder")
        empty = np.zeros(0, dtype=token_type)
        self._tokens = np.memmap(folder / _TOKENS, dtype=token_type, mode="r") if num_bytes else empty

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def length(self, index: int) -> int:
        """Tokens of document `index`."""
        return int(self._starts[index + 1] - self._starts[index])

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Ids int64 [end - start] of document `index`."""
        end = self.length(index) if end is None else end
        first = int(self._starts[index])
        return np.asarray(self._tokens[first + start : first + end], dtype=np.int64)

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` ids from position `start` of all tokens in a row, across document borders, going round at the end."""
        places = (start + np.arange(length)) % self.num_tokens
        return np.asarray(self._tokens[places], dtype=np.int64)

    @cached_property
    def ids(self) -> list[str]:
        """Document ids by index."""
        with (self.folder / _IDS).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
