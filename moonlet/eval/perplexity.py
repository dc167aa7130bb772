"""Held-out bits per byte, counted so that a file compressor on the same files is a fair rival.

What is measured: the code length that the model gives to the held-out documents, each token paid for once, from the
past of its own document only. A document's first token has no past, in training as here: it is paid for at log2(V)
bits, as if all tokens were equally likely. The [EOS] at a document's end is paid for as well, though no byte stands
for it.

How far the past reaches: a document of at most `seq_len` tokens is seen whole. Beyond that the KDA layers carry their
state from the document's first token on, while the MLA layers see at most the last `seq_len` tokens (and at least
`seq_len` less one window): attention is not asked to reach farther than it was trained to.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.data.corpus import Corpus, HeldoutDocument
from moonlet.errors import DataError
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState, MLAState
from moonlet.ops.cross_entropy import IGNORE, linear_cross_entropy

WINDOW = 512  # tokens of a long document that are scored in one pass, after its first seq_len

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
    batch_tokens: int = 8192,
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
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> float:
    """Sum over all tokens of all documents of -ln p(token | the document so far).

    Documents of at most `seq_len` tokens are packed into rows of at most `batch_tokens`; longer ones are read window by
    window with a decode state. `progress` is called with the number of tokens scored so far. The model's mode is kept.
    """
    short = [ids for ids in documents if 0 < len(ids) <= seq_len]
    long = [ids for ids in documents if len(ids) > seq_len]
    total, done = (len(short) + len(long)) * math.log(model.config.vocab_size), 0
    with evaluating(model):
        for row in _rows(short, batch_tokens):
            total += _packed_nats(model, row)
            done += sum(map(len, row))
            _report(progress, done)
        for ids in long:
            for nats, tokens in _windowed_nats(model, ids, seq_len):
                total, done = total + nats, done + tokens
                _report(progress, done)
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


def forget_beyond(state: DecodeState, num_tokens: int) -> None:
    """Let the MLA layers of `state` keep their last `num_tokens` rows only; the KDA layers keep what they have."""
    for layer in state.layers:
        if isinstance(layer, MLAState) and layer.length > num_tokens:
            layer.rows = layer.rows[:, layer.length - num_tokens : layer.length].clone()
            layer.length = num_tokens


def _rows(documents: Sequence[Tensor], batch_tokens: int) -> Iterator[list[Tensor]]:
    row: list[Tensor] = []
    for ids in documents:
        if row and sum(map(len, row)) + len(ids) > batch_tokens:
            yield row
            row = []
        row.append(ids)
    if row:
        yield row


def _packed_nats(model: K3, row: Sequence[Tensor]) -> float:
    labels = torch.cat([torch.cat([ids[1:], ids.new_tensor([IGNORE])]) for ids in row])
    return _nats(model, torch.cat(list(row)), labels, seq_lens=tuple(len(ids) for ids in row))


def _windowed_nats(model: K3, ids: Tensor, seq_len: int) -> Iterator[tuple[float, int]]:
    """Code length and number of tokens of each window; the first token counts, its price does not."""
    state, window = model.new_state(1), min(WINDOW, max(1, seq_len // 2))
    starts = [0, *range(seq_len, len(ids) - 1, window)]
    for start, stop in zip(starts, [*starts[1:], len(ids) - 1]):
        forget_beyond(state, seq_len - window)
        nats = _nats(model, ids[start:stop], ids[start + 1 : stop + 1], state=state)
        yield nats, stop - start + (start == 0)


def _nats(
    model: K3,
    inputs_N: Tensor,
    labels_N: Tensor,
    seq_lens: tuple[int, ...] | None = None,
    state: DecodeState | None = None,
) -> float:
    device = model.output_weight.device
    hidden = model.hidden(inputs_N.to(device).unsqueeze(0), seq_lens=seq_lens, state=state).squeeze(0)
    return float(linear_cross_entropy(hidden, model.output_weight, labels_N.to(device)))


def _report(progress: Progress | None, done: int) -> None:
    if progress is not None:
        progress(done)
