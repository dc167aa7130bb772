"""Exact and near duplicates: equal normalised text, and MinHash signatures found by locality-sensitive hashing.

Of duplicates the one whose (content hash, id) is smallest stays, so the result does not depend on the order of files.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from moonlet.data.documents import Document

_NUM_HASHES = 128
_SHINGLE_WORDS = 5
_WORD = re.compile(r"\w+")
_BLOCK_SHINGLES = 4096
_MISS_RATE = 0.01  # accepted chance to overlook a pair just at the threshold

_RNG = np.random.Generator(np.random.PCG64(20240229))  # fixed: a corpus is prepared the same everywhere
_MULTIPLIERS = _RNG.integers(0, 1 << 63, _NUM_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _RNG.integers(0, 1 << 63, _NUM_HASHES, dtype=np.uint64)
_PLACE = _RNG.integers(0, 1 << 63, _SHINGLE_WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a document to compare it: `signature` is None where near duplicates are not looked for."""

    rank: tuple[bytes, str]  # (content hash, id)
    exact: bytes
    signature: np.ndarray | None  # uint32 [_NUM_HASHES]


class Deduplicator:
    """Collects fingerprints one document at a time, then says which to keep."""

    def __init__(self, exact: bool = True, near: bool = True, threshold: float = 0.8) -> None:
        """`threshold`: estimated Jaccard similarity of 5-word shingles from which two documents are near duplicates."""
        self.exact, self.near, self.threshold = exact, near, threshold
        self._prints: list[Fingerprint] = []
        self._words: dict[str, int] = {}
        self.num_exact = 0
        self.num_near = 0

    def add(self, document: Document) -> None:
        signature = self._signature(document.text) if self.near else None
        rank = (document.content_hash, document.id)
        self._prints.append(Fingerprint(rank, _normalised_hash(document.text), signature))

    def keep(self) -> list[int]:
        """Positions (in order of `add`) of the documents to keep, sorted by content hash."""
        order = sorted(range(len(self._prints)), key=lambda index: self._prints[index].rank)
        if self.exact:
            order = self._drop_exact(order)
        return self._drop_near(order) if self.near else order

    def _drop_exact(self, order: list[int]) -> list[int]:
        first: dict[bytes, int] = {}
        for index in order:
            first.setdefault(self._prints[index].exact, index)
        self.num_exact = len(order) - len(first)
        return list(first.values())

    def _drop_near(self, order: list[int]) -> list[int]:
        rows_per_band = band_rows(self.threshold)
        buckets: dict[tuple[int, bytes], list[int]] = {}
        kept = []
        for index in order:
            signature = self._prints[index].signature
            assert signature is not None
            bands = [(band, rows.tobytes()) for band, rows in enumerate(signature.reshape(-1, rows_per_band))]
            candidates = {other for band in bands for other in buckets.get(band, ())}
            if any(self._similarity(index, other) >= self.threshold for other in candidates):
                continue
            kept.append(index)
            for band in bands:
                buckets.setdefault(band, []).append(index)
        self.num_near = len(order) - len(kept)
        return kept

    def _similarity(self, left: int, right: int) -> float:
        return float(np.mean(self._prints[left].signature == self._prints[right].signature))

    def _signature(self, text: str) -> np.ndarray:
        shingles = self._shingles(text)
        lowest = np.full(_NUM_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
        for start in range(0, len(shingles), _BLOCK_SHINGLES):
            block = shingles[start : start + _BLOCK_SHINGLES, None] * _MULTIPLIERS + _OFFSETS
            np.minimum(lowest, (block >> np.uint64(32)).astype(np.uint32).min(axis=0), out=lowest)
        return lowest

    def _shingles(self, text: str) -> np.ndarray:
        """Distinct 64-bit hashes of the runs of five words; a shorter text is one shingle."""
        words = np.array([self._word_hash(word) for word in _WORD.findall(text.lower())], dtype=np.uint64)
        if len(words) < _SHINGLE_WORDS:
            whole = hashlib.blake2b(text.encode(), digest_size=8).digest()
            return np.array([int.from_bytes(whole, "little")], dtype=np.uint64)
        count = len(words) - _SHINGLE_WORDS + 1
        sums = sum(words[place : place + count] * _PLACE[place] for place in range(_SHINGLE_WORDS))
        return _mix(np.unique(np.asarray(sums, dtype=np.uint64)))

    def _word_hash(self, word: str) -> int:
        if (known := self._words.get(word)) is not None:
            return known
        if len(self._words) > 1 << 20:
            self._words.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self._words[word] = value
        return value


def band_rows(threshold: float) -> int:
    """Rows of the signature in a band: as many as still find a pair at the threshold with the accepted miss rate."""
    for rows in (32, 16, 8, 4, 2):
        if (1 - threshold**rows) ** (_NUM_HASHES // rows) <= _MISS_RATE:
            return rows
    return 1


def _normalised_hash(text: str) -> bytes:
    """sha256 of the text with every run of white space as one space."""
    return hashlib.sha256(" ".join(text.split()).encode()).digest()


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
