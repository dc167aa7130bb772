"""Best-fit packing: documents into rows of equal length, with a read-ahead buffer that is part of the state.

A document of q * seq_len + r tokens gives q full rows and one remainder of r tokens. Remainders of different documents
share a row: the largest that still fits goes in next (Ding et al. 2024, "Fewer truncations improve language modeling").
Which document comes next is drawn in proportion to the tokens it has left, so that a batch is a mixture of the buffer
and not a run of pieces of one long document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonlet.data.stream import DocumentStream, counter_rng

READ_AHEAD = 64  # documents in the buffer


@dataclass
class Span:
    """What is left of a document: full pieces are taken from its head, remainders from its tail."""

    epoch: int
    index: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Packer:
    """Rows of pieces from a stream of documents. No token is skipped or repeated within an epoch."""

    def __init__(self, stream: DocumentStream, length_of: Callable[[int], int], read_ahead: int = READ_AHEAD) -> None:
        """`length_of(index)` is the number of tokens of a document, at least 1."""
        self.stream, self.length_of, self.read_ahead = stream, length_of, read_ahead
        self.spans: list[Span] = []
        self.rows = 0

    def next_row(self, seq_len: int) -> list[Span]:
        """Pieces (at most `seq_len` tokens together) of the next row, each from one document."""
        self._read_ahead(2 * seq_len)
        span, is_full = self._draw(seq_len)
        self.rows += 1
        row = [self._take_head(span, seq_len)] if is_full else self._fill(span, seq_len)
        self.spans = [span for span in self.spans if len(span)]
        return row

    def _read_ahead(self, min_tokens: int) -> None:
        """Fill the buffer: short documents must offer enough tokens, and a corpus of fewer than two rows is read over and over."""
        num_tokens = sum(len(span) for span in self.spans)
        while len(self.spans) < min(self.read_ahead, self.stream.num_documents) or num_tokens < min_tokens:
            epoch, index = self.stream.next()
            self.spans.append(Span(epoch, index, 0, self.length_of(index)))
            num_tokens += len(self.spans[-1])

    def _draw(self, seq_len: int) -> tuple[Span, bool]:
        """A token of the buffer at random: its document, and whether it lies in a full piece."""
        rng = counter_rng(self.stream.seed, f"rows of {self.stream.name}", self.rows)
        place = int(rng.integers(sum(len(span) for span in self.spans)))
        for span in self.spans:
            if place < len(span):
                break
            place -= len(span)
        return span, place < len(span) - len(span) % seq_len

    def _fill(self, first: Span, seq_len: int) -> list[Span]:
        row = [self._take_tail(first, len(first) % seq_len)]
        room = seq_len - len(row[0])
        while fitting := [span for span in self.spans if 0 < len(span) % seq_len <= room]:
            best = max(fitting, key=lambda span: len(span) % seq_len)
            row.append(self._take_tail(best, len(best) % seq_len))
            room -= len(row[-1])
        return row

    @staticmethod
    def _take_head(span: Span, length: int) -> Span:
        span.start += length
        return Span(span.epoch, span.index, span.start - length, span.start)

    @staticmethod
    def _take_tail(span: Span, length: int) -> Span:
        span.end -= length
        return Span(span.epoch, span.index, span.end, span.end + length)

    def state_dict(self) -> dict[str, Any]:
        spans = [[span.epoch, span.index, span.start, span.end] for span in self.spans]
        return {"stream": self.stream.state_dict(), "rows": self.rows, "spans": spans}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.rows = state["rows"]
        self.spans = [Span(*span) for span in state["spans"]]
