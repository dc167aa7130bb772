"""A token's bits depend on the tokens up to it alone: the same in training, in a prefill of any pieces, and in replay."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState, KDAState, PagedMLAState
from moonlet.ops.backend import kernels

pytestmark = pytest.mark.skipif(kernels() != "native", reason="exact sums are the native kernels' promise")
TOKENS, PAGE = 75, 8


@pytest.fixture(scope="module")
def model() -> K3:
    model = K3(resolve_model({"preset": "nano"})).eval()
    init_weights(model, 0)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far from the meek logits of a fresh model
            parameter.data.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 2000, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plain(model, ids) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids)


def _paged_state(model: K3, *, batch: int, replay: bool) -> tuple[DecodeState, torch.Tensor]:
    lengths = torch.zeros(batch, dtype=torch.int64)
    tables = torch.randperm(batch * (-(-TOKENS // PAGE)), generator=torch.Generator().manual_seed(1)).view(batch, -1)
    layers = []
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "kv_a_layernorm"):
            pool = torch.full((tables.numel(), PAGE, attention.latent_dim + attention.rope_dim), torch.nan)
            layers.append(PagedMLAState(pool, tables, lengths, replay))
        else:
            layers.append(attention.new_state(batch, replay=replay))
    return DecodeState(layers), lengths


def _in_pieces(
    model: K3, ids: torch.Tensor, sizes: list[int], state: DecodeState, lengths: torch.Tensor
) -> torch.Tensor:
    outs, start = [], 0
    with torch.inference_mode():
        for size in sizes:
            outs.append(model(ids[:, start : start + size], state=state))
            lengths += size
            start += size
    return torch.cat(outs, dim=1)


@given(cuts=st.lists(st.integers(4, TOKENS - 4), max_size=5, unique=True))
@settings(max_examples=15, deadline=None)
def test_a_prefill_in_any_pieces_has_the_bits_of_the_whole(cuts, model, ids, plain) -> None:
    """Pieces of at least 4 tokens: matrix libraries take another path for fewer rows."""
    edges = [0]
    for cut in [*sorted(cuts), TOKENS]:
        if cut - edges[-1] >= 4:
            edges.append(cut)
    edges[-1] = TOKENS
    sizes = [stop - start for start, stop in pairwise(edges)]
    state, lengths = _paged_state(model, batch=1, replay=True)
    assert torch.equal(_in_pieces(model, ids, sizes, state, lengths), plain)


def test_replayed_decoding_has_the_bits_of_the_whole(model, ids, plain) -> None:
    state, lengths = _paged_state(model, batch=4, replay=True)
    others = torch.randint(0, 2000, (3, TOKENS), generator=torch.Generator().manual_seed(2))
    out = _in_pieces(model, torch.cat([ids, others]), [1] * TOKENS, state, lengths)
    assert torch.equal(out[:1], plain)


def test_training_has_the_bits_of_inference(model, ids, plain) -> None:
    model.train()
    try:
        assert torch.equal(model(ids).detach(), plain)
        packed = model(torch.cat([ids, ids[:, :30]], dim=1), seq_lens=(TOKENS, 30)).detach()
    finally:
        model.eval()
    assert torch.equal(packed[:, :TOKENS], plain) and torch.equal(packed[:, TOKENS:], plain[:, :30])


def test_recurrent_decoding_is_close(model, ids, plain) -> None:
    state, lengths = _paged_state(model, batch=4, replay=False)
    out = _in_pieces(model, ids.expand(4, -1), [1] * TOKENS, state, lengths)
    torch.testing.assert_close(out.log_softmax(-1), plain.log_softmax(-1).expand(4, -1, -1), atol=3e-5, rtol=0)
    assert all(torch.equal(row, out[0]) for row in out), "a sequence does not depend on its place in the batch"


def test_a_state_goes_through_its_tensors(model) -> None:
    for replay in (False, True):
        state = model.model.layers[0].self_attn.new_state(2, replay=replay)
        again = KDAState.of_tensors(state.tensors())
        assert [x.shape for x in again.tensors()] == [x.shape for x in state.tensors()]
        assert (again.open is None) == (not replay)
