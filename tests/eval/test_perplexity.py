"""Held-out bits per byte: every token once, from its own document's past, at any packing."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonlet.errors import DataError
from moonlet.eval.perplexity import carry_over, compressors, compute_score, document_nats


def _documents(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (length,), generator=generator) for length in lengths]


def _one_by_one(model, documents: list[Tensor]) -> float:
    """The definition: the whole document in one pass, no packing and no state."""
    total = 0.0
    for ids in documents:
        with torch.no_grad():
            log_probs = F.log_softmax(model(ids.unsqueeze(0))[0].double(), dim=-1)
        total += math.log(model.config.vocab_size) - float(log_probs[:-1].gather(1, ids[1:].unsqueeze(1)).sum())
    return total


def test_a_uniform_model_pays_log2_of_the_vocabulary_for_each_token(new_model) -> None:
    model = new_model()
    torch.nn.init.zeros_(model.output_weight)
    documents = _documents([1, 7, 30, 200])
    num_tokens, num_bytes = sum(map(len, documents)), 555
    nats = document_nats(model, documents, seq_len=64)
    score = compute_score(nats, num_tokens, num_bytes)
    vocab = model.config.vocab_size
    assert score.bits_per_byte == pytest.approx(math.log2(vocab) * num_tokens / num_bytes, rel=1e-6)
    assert score.nats_per_token == pytest.approx(math.log(vocab), rel=1e-6)
    assert (score.tokens, score.bytes) == (num_tokens, num_bytes)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 100))
def test_packing_changes_nothing(model, lengths: list[int], batch_tokens: int) -> None:
    documents = _documents(lengths)
    packed = document_nats(model, documents, seq_len=40, batch_tokens=batch_tokens)
    assert packed == pytest.approx(_one_by_one(model, [ids for ids in documents if len(ids)]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("seq_len", "batch_tokens"), [(16, 1), (16, 64), (50, 100), (99, 4096)])
def test_a_kda_model_sees_a_long_document_whole(new_model, seq_len: int, batch_tokens: int) -> None:
    model, documents = new_model(full_attn_layers=()), _documents([100, 137, 101, 17])
    windowed = document_nats(model, documents, seq_len=seq_len, batch_tokens=batch_tokens)
    assert windowed == pytest.approx(_one_by_one(model, documents), rel=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 50])
def test_attention_starts_afresh_in_each_window(new_model, batch_tokens: int) -> None:
    """With attention in every layer, the windows of a long document are documents of their own."""
    model, seq_len = new_model(full_attn_layers=(1, 2, 3, 4)), 10
    documents = _documents([35, 12, 21, 11])
    windowed = document_nats(model, documents, seq_len=seq_len, batch_tokens=batch_tokens)
    alone = 0.0
    for ids in documents:
        # A window reads seq_len tokens and predicts as many, the first of the next window among them.
        windows = [ids[start : start + seq_len + 1] for start in range(0, len(ids) - 1, seq_len)]
        alone += _one_by_one(model, windows) - (len(windows) - 1) * math.log(model.config.vocab_size)
    assert windowed == pytest.approx(alone, rel=1e-5)


def test_carrying_over_keeps_kda_and_drops_attention_and_finished_rows(model) -> None:
    state = model.new_state(3)
    with torch.no_grad():
        model(torch.arange(30).view(3, 10), state=state)
    kept = carry_over(state, 2)
    assert torch.equal(kept.layers[0].recurrent, state.layers[0].recurrent[:2])
    assert torch.equal(kept.layers[0].conv_q, state.layers[0].conv_q[:2])
    assert (kept.layers[3].length, kept.layers[3].rows.shape[0], kept.batch_size) == (0, 2, 2)


def test_progress_counts_every_token_once(model) -> None:
    documents, seen = _documents([5, 60, 33, 1, 90]), []
    document_nats(model, documents, seq_len=32, batch_tokens=64, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == sum(map(len, documents))


def test_the_mode_of_the_model_is_kept(new_model) -> None:
    model = new_model().train()
    document_nats(model, _documents([9]), seq_len=16)
    assert model.training


def test_nothing_held_out_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match="heldout_fraction"):
        compute_score(0.0, 0, 0)
    with pytest.raises(DataError, match="no bytes"):
        compressors(b"")


def test_compressors_know_noise_from_silence() -> None:
    noise = random.Random(0).randbytes(20_000)
    assert all(8 < bits < 8.2 for bits in compressors(noise).values())
    assert all(bits < 0.1 for bits in compressors(bytes(20_000)).values())
