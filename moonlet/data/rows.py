"""Rows of `seq_len` tokens from one source: packed documents, or one planted document each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moonlet.config.run import SourceConfig
from moonlet.data.corpus import Corpus
from moonlet.data.long_context import Kind, facts_that_fit, planted_document
from moonlet.data.packing import Packer
from moonlet.data.shards import TokenShard
from moonlet.data.stream import DocumentStream, counter_rng
from moonlet.errors import DataError

# Shares of the kinds of planted documents in training: mostly the one that asks most.
_KIND_SHARES: dict[Kind, float] = {"several": 0.8, "latest": 0.1, "chain": 0.04, "count": 0.03, "single": 0.03}
_MIN_ROOM = 64  # tokens of a row in which every kind has room
_FACTS_PER_TOKENS = 256  # SourceConfig.facts is counted for each so many tokens of a row


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a document in an epoch of its source."""

    source: str
    document_id: str
    epoch: int
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """`ids` int64 [seq_len], `loss_mask` bool [seq_len] (whether a token may be learned), `seq_lens` of the documents.

    `answers` are the positions of planted answers in the row.
    """

    ids: np.ndarray
    seq_lens: tuple[int, ...]
    loss_mask: np.ndarray
    pieces: tuple[Piece, ...]
    answers: tuple[int, ...] = ()


class RowSource(Protocol):
    """Rows of one source, resumable."""

    def next_row(self, seq_len: int) -> Row: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DocumentRows:
    """Packed rows of a source of documents."""

    def __init__(self, name: str, shard: TokenShard, seed: int, pad_id: int) -> None:
        self.name, self.shard, self.pad_id = name, shard, pad_id
        self.packer = Packer(DocumentStream(len(shard), seed, name), shard.length)

    def next_row(self, seq_len: int) -> Row:
        spans = self.packer.next_row(seq_len)
        ids = np.full(seq_len, self.pad_id, dtype=np.int64)
        lengths = [len(span) for span in spans]
        used = sum(lengths)
        ids[:used] = np.concatenate([self.shard.tokens(span.index, span.start, span.end) for span in spans])
        pieces = tuple(Piece(self.name, self.shard.ids[span.index], span.epoch, span.start, span.end) for span in spans)
        tail = [seq_len - used] if used < seq_len else []
        return Row(ids, tuple(lengths + tail), np.arange(seq_len) < used, pieces)

    def state_dict(self) -> dict[str, Any]:
        return self.packer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.packer.load_state_dict(state)


class PlantedRows:
    """Rows that are one planted document each, in text drawn at random from the training documents of all sources."""

    def __init__(self, source: SourceConfig, corpus: Corpus, seed: int) -> None:
        self.source, self.tokenizer, self.seed = source, corpus.tokenizer, seed
        self.shards = [corpus.source(name) for name in corpus.source_names]
        self.count = 0

    def next_row(self, seq_len: int) -> Row:
        rng = counter_rng(self.seed, f"planted {self.source.name}", self.count)
        sizes = np.array([shard.num_tokens for shard in self.shards])
        shard = self.shards[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        filler = shard.window(int(rng.integers(shard.num_tokens)), seq_len)
        kind: Kind = rng.choice(list(_KIND_SHARES), p=list(_KIND_SHARES.values())) if seq_len >= _MIN_ROOM else "single"
        document = planted_document(rng, filler, self.tokenizer, seq_len, kind, self._num_facts(rng, seq_len))
        piece = Piece(self.source.name, f"{self.source.name}:{self.count}", 0, 0, seq_len)
        self.count += 1
        answers = tuple(question.answer_position for question in document.questions)
        return Row(document.ids, (seq_len,), np.ones(seq_len, dtype=bool), (piece,), answers)

    def _num_facts(self, rng: np.random.Generator, seq_len: int) -> int:
        """Log-uniform up to the configured density: documents with few facts teach to copy, those with many to choose."""
        wanted = max(1, round(self.source.facts * seq_len / _FACTS_PER_TOKENS))
        most = facts_that_fit(self.tokenizer, seq_len, wanted)
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    def state_dict(self) -> dict[str, Any]:
        return {"planted": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["planted"]


def build_rows(name: str, corpus: Corpus, seed: int) -> RowSource:
    """The rows of source `name`. Raises DataError where the corpus does not have it."""
    if planted := corpus.planted.get(name):
        return PlantedRows(planted, corpus, seed)
    if name not in corpus.source_names:
        raise DataError(f"the mixture has a source '{name}' that the corpus in '{corpus.folder}' does not have")
    return DocumentRows(name, corpus.source(name), seed, corpus.tokenizer.special_id("[PAD]"))
