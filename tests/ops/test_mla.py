"""Attention forms against the definition: fused, packed, absorbed; the logit bound of QK-Clip."""

from __future__ import annotations

import pytest
import torch

from moonlet.ops.mla import (
    absorbed_attention,
    causal_attention,
    causal_attention_plain,
    max_logit,
    max_logit_bound,
    streamed_attention,
)
from moonlet.ops.mla_pages import attend_pages, attend_pages_plain


def _qkv(batch, queries, keys, heads=3, key_dim=12, value_dim=8):
    torch.manual_seed(0)
    return (
        torch.randn(batch, queries, heads, key_dim),
        torch.randn(batch, keys, heads, key_dim),
        torch.randn(batch, keys, heads, value_dim),
    )


@pytest.mark.parametrize("value_dim", [8, 12, 20])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (17, 17), (5, 12)])
def test_fused_equals_the_definition(queries, keys, value_dim):
    q, k, v = _qkv(2, queries, keys, value_dim=value_dim)
    torch.testing.assert_close(
        causal_attention(q, k, v, 0.3), causal_attention_plain(q, k, v, 0.3), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("queries", "keys", "block"), [(1, 1, 4), (5, 12, 4), (5, 12, 12), (12, 12, 5), (3, 40, 1)])
def test_streamed_equals_the_definition(queries, keys, block):
    q, k, v = _qkv(2, queries, keys)
    streamed = streamed_attention(q, zip(k.split(block, 1), v.split(block, 1)), keys, 0.3)
    torch.testing.assert_close(streamed, causal_attention_plain(q, k, v, 0.3), atol=2e-6, rtol=1e-5)


def test_streamed_softmax_survives_large_logits():
    q, k, v = _qkv(1, 4, 30)
    streamed = streamed_attention(q * 100, zip(k.split(7, 1), v.split(7, 1)), 30, 1.0)
    torch.testing.assert_close(streamed, causal_attention_plain(q * 100, k, v, 1.0), atol=2e-5, rtol=1e-4)


def test_packed_documents_are_attended_apart():
    q, k, v = _qkv(1, 20, 20)
    packed = causal_attention(q, k, v, 0.3, seq_lens=(7, 1, 12))
    for start, end in ((0, 7), (7, 8), (8, 20)):
        alone = causal_attention(q[:, start:end], k[:, start:end], v[:, start:end], 0.3)
        assert torch.equal(packed[:, start:end], alone)


def test_absorbed_equals_expanded():
    torch.manual_seed(1)
    batch, keys, heads, nope, rope, value, rank = 2, 11, 3, 8, 4, 6, 5
    latent, shared = torch.randn(batch, keys, rank), torch.randn(batch, keys, rope)
    up_k, up_v = torch.randn(heads, nope, rank), torch.randn(heads, value, rank)
    q = torch.randn(batch, keys, heads, nope + rope)
    k = torch.cat([torch.einsum("bsr,hnr->bshn", latent, up_k), shared.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
    v = torch.einsum("bsr,hvr->bshv", latent, up_v)
    for queries in (1, 4):
        expected = causal_attention_plain(q[:, -queries:], k, v, 0.2)
        found = absorbed_attention(
            q[:, -queries:, :, :nope], q[:, -queries:, :, nope:], latent, shared, (up_k, up_v), 0.2
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_max_logit_sees_only_what_a_query_sees_and_stays_below_its_bound():
    q, k, _ = _qkv(1, 30, 30)
    exact = max_logit(q, k, 0.3, rows=7)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * 0.3
    masked = scores.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(exact, masked.amax((0, 2, 3)))
    assert (exact <= max_logit_bound(q, k, 0.3) + 1e-6).all()
    apart = max_logit(q, k, 0.3, seq_lens=(10, 20))
    assert (apart <= exact).all()


def _native_case(lengths: tuple[int, ...], heads=3, key_dim=24, value_dim=16):
    torch.manual_seed(3)
    shapes = (key_dim, key_dim, value_dim)
    return tuple(torch.randn(1, sum(lengths), heads, dim, requires_grad=True) for dim in shapes)


@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), (49, 1, 7, 130)])
def test_native_attention_and_its_gradients(lengths):
    inputs = _native_case(lengths)
    seq_lens = None if len(lengths) == 1 else lengths
    out = causal_attention(*inputs, 0.2, seq_lens)
    documents = zip(*(x.double().split(lengths, dim=1) for x in inputs))
    expected = torch.cat([causal_attention_plain(*document, 0.2) for document in documents], dim=1)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, d_out)
    for grad, exact in zip(grads, torch.autograd.grad(expected, inputs, d_out.double())):
        torch.testing.assert_close(grad, exact, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(5, 1, 20), (40,)])
def test_paged_attention_reads_its_pages_alone(lengths):
    torch.manual_seed(4)
    heads, latent, width, page = 3, 16, 24, 4
    pool = torch.full((40, page, width), torch.nan)  # a page that is not read may hold anything
    tables = torch.randperm(40)[: len(lengths) * 10].view(len(lengths), 10)
    rows = [torch.randn(length, width) for length in lengths]
    for table, row in zip(tables, rows):
        for start in range(0, len(row), page):
            pool[table[start // page], : min(page, len(row) - start)] = row[start : start + page]
    q = torch.randn(len(lengths), heads, width)
    out = attend_pages(q, pool, tables, torch.tensor(lengths), latent, 0.3)
    for b, row in enumerate(rows):
        weights = torch.softmax(torch.einsum("hl,kl->hk", q[b], row) * 0.3, dim=-1)
        torch.testing.assert_close(out[b], weights @ row[:, :latent], atol=2e-6, rtol=1e-5)
    plain = attend_pages_plain(q, pool.nan_to_num(), tables, torch.tensor(lengths), latent, 0.3)
    torch.testing.assert_close(out, plain, atol=2e-6, rtol=1e-5)
