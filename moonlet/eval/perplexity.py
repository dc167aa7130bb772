"""Held-out bits per byte, counted so that a file compressor on the same files is a fair rival.

What is measured: the code length that the model gives to the held-out documents, each token paid for once, from the
past of its own document only. A document's first token has no past, in training as here: it is paid for at log2(V)
bits, as if all tokens were equally likely. The [EOS] at a document's end is paid for as well, though no byte stands
for it.

How far the past reaches: a document of at most `seq_len` tokens is seen whole. In a longer one the KDA layers carry their
state from the document's first token on, while the MLA layers start afresh every `seq_len` tokens: attention is never
asked to reach farther than it was trained to.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moonlet.data.corpus import Corpus, HeldoutDocument
from moonlet.errors import DataError
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState, KDAState, MLAState
from moonlet.ops.cross_entropy import IGNORE, linear_cross_entropy

BATCH_TOKENS = 4096  # tokens in one forward pass

Progress = Callable[[int], None]


@dataclass(frozen=True)
class HeldoutScore:
    """`tokens` were predicted; `bytes` is the size of the texts that they spell."""

    bits_per_byte: float
    nats_per_token: float
    tokens: int
    bytes: int


def heldout_bits_per_byte(
    model: K3,
    corpus: Corpus,
    *,
    seq_len: int,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> HeldoutScore:
    """Score the held-out documents of a corpus (`choose_heldout`); the bytes are those of their texts.

    Raises DataError where nothing is held out.
    """
    documents = choose_heldout(corpus, max_tokens)
    ids = [torch.from_numpy(document.tokens) for document in documents]
    nats = document_nats(model, ids, seq_len=seq_len, batch_tokens=batch_tokens, progress=progress)
    return compute_score(nats, sum(map(len, ids)), sum(document.num_bytes for document in documents))


def choose_heldout(corpus: Corpus, max_tokens: int | None = None) -> list[HeldoutDocument]:
    """Whole held-out documents in the corpus's order, as many as fit in `max_tokens`, but one at least."""
    chosen: list[HeldoutDocument] = []
    total = 0
    for document in corpus.heldout:
        total += len(document.tokens)
        if chosen and max_tokens is not None and total > max_tokens:
            break
        chosen.append(document)
    return chosen


@torch.inference_mode()
def document_nats(
    model: K3,
    documents: Sequence[Tensor],
    *,
    seq_len: int,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> float:
    """Sum over all tokens of all documents of -ln p(token | the document so far).

    Documents of at most `seq_len` tokens are packed into rows of at most `batch_tokens`; longer ones are read window by
    window with a decode state, as many side by side as fit. `progress` is called with the number of tokens scored so
    far. The model's mode is kept.
    """
    short = [ids for ids in documents if 0 < len(ids) <= seq_len]
    long = sorted((ids for ids in documents if len(ids) > seq_len), key=len, reverse=True)
    # First tokens have no past: they are as dear as any token, and need no model.
    total, done = (len(short) + len(long)) * math.log(model.config.vocab_size), len(short) + len(long)
    side_by_side = max(1, batch_tokens // seq_len)
    with evaluating(model):
        passes = chain(
            (_packed_nats(model, row) for row in _rows(short, batch_tokens)),
            *(_windowed_nats(model, long[i : i + side_by_side], seq_len) for i in range(0, len(long), side_by_side)),
        )
        for nats, tokens in passes:
            total, done = total + nats, done + tokens
            if progress is not None:
                progress(done)
    return total


def compute_score(nats: float, tokens: int, num_bytes: int) -> HeldoutScore:
    """The figures of a score. Raises DataError where there is nothing to score."""
    if tokens == 0 or num_bytes == 0:
        raise DataError("nothing is held out: raise data.heldout_fraction or give the run more documents")
    return HeldoutScore(nats / math.log(2) / num_bytes, nats / tokens, tokens, num_bytes)


def compressors(raw: bytes) -> dict[str, float]:
    """Bits per byte of `raw` under general compressors at their strongest setting (xz -9e, gzip -9, bzip2 -9)."""
    if not raw:
        raise DataError("there are no bytes to compress: nothing is held out")
    packed = {
        "xz": lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME),
        "gzip": gzip.compress(raw, 9, mtime=0),
        "bz2": bz2.compress(raw, 9),
    }
    return {name: 8 * len(data) / len(raw) for name, data in packed.items()}


@contextmanager
def evaluating(model: K3) -> Iterator[None]:
    """Eval mode inside, the mode of before outside."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def carry_over(state: DecodeState, num_rows: int) -> DecodeState:
    """The first `num_rows` sequences of `state`: KDA layers as they are, MLA layers empty."""
    layers = [
        KDAState.of_tensors([part[:num_rows] for part in layer.tensors()])
        if isinstance(layer, KDAState)
        else MLAState(layer.rows[:num_rows])
        for layer in state.layers
        if isinstance(layer, KDAState | MLAState)
    ]
    return replace(state, layers=layers)


def _rows(documents: Sequence[Tensor], batch_tokens: int) -> Iterator[list[Tensor]]:
    row: list[Tensor] = []
    for ids in documents:
        if row and sum(map(len, row)) + len(ids) > batch_tokens:
            yield row
            row = []
        row.append(ids)
    if row:
        yield row


def _packed_nats(model: K3, row: Sequence[Tensor]) -> tuple[float, int]:
    """Code length of all tokens but the documents' first ones, and their number."""
    labels = torch.cat([torch.cat([ids[1:], ids.new_tensor([IGNORE])]) for ids in row])
    return _nats(model, torch.cat(list(row)).unsqueeze(0), labels, seq_lens=tuple(len(ids) for ids in row))


def _windowed_nats(model: K3, group: Sequence[Tensor], seq_len: int) -> Iterator[tuple[float, int]]:
    """The same for documents side by side, longest first, window by window; those that end leave the batch."""
    state = model.new_state(len(group))
    for start in range(0, len(group[0]) - 1, seq_len):
        alive = [ids[start : start + seq_len + 1] for ids in group if len(ids) > start + 1]
        state = carry_over(state, len(alive))
        inputs_BT = pad_sequence([ids[:-1] for ids in alive], batch_first=True)
        labels_BT = pad_sequence([ids[1:] for ids in alive], batch_first=True, padding_value=IGNORE)
        yield _nats(model, inputs_BT, labels_BT.flatten(), state=state)


def _nats(model: K3, inputs_BT: Tensor, labels_N: Tensor, **options: Any) -> tuple[float, int]:
    device = model.output_weight.device
    hidden_ND = model.hidden(inputs_BT.to(device), **options).flatten(0, 1)
    nats = linear_cross_entropy(hidden_ND, model.output_weight, labels_N.to(device))
    return float(nats), int((labels_N != IGNORE).sum())
