"""Block AttnRes: golden mixes, the lean backward against autograd, the two phases against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.attn_residuals import merge_partial, mix, mix_plain, scan_finished

EPS = 1e-5


def test_golden_op_values_and_gradients(golden):
    stem = "f_attn_res"
    names = {name.split("/")[0] for name in golden.tensors(stem) if name.startswith("op_")}
    assert names
    for name in sorted(names):
        case = golden.tensors(stem, name)
        blocks = [block.clone().requires_grad_() for block in case["block_residual"].unbind(-2)]
        prefix = case["prefix_sum"].clone().requires_grad_()
        norm, proj = case["norm_weight"].clone().requires_grad_(), case["proj_weight"].clone().requires_grad_()
        out = mix([*blocks, prefix], norm * proj.squeeze(0), EPS)
        torch.testing.assert_close(out, case["y"], atol=5e-6, rtol=0)
        out.backward(case["cotangent"])
        torch.testing.assert_close(prefix.grad, case["grad_prefix_sum"], atol=5e-6, rtol=0)
        torch.testing.assert_close(norm.grad, case["grad_norm_weight"], atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(proj.grad, case["grad_proj_weight"], atol=5e-6, rtol=1e-5)
        stacked = torch.stack([block.grad for block in blocks], dim=-2)
        torch.testing.assert_close(stacked, case["grad_block_residual"], atol=5e-6, rtol=0)


def _sources(num: int, rows: int, dim: int, seed: int, dtype=torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(rows, dim, generator=generator, dtype=dtype) for _ in range(num)]
    return draws, torch.randn(dim, generator=generator, dtype=dtype)


@given(num=st.integers(1, 6), rows=st.integers(1, 5), dim=st.integers(2, 9), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_lean_backward_is_autograd_of_the_definition(num, rows, dim, seed):
    sources, query = _sources(num, rows, dim, seed)
    cotangent = torch.randn_like(sources[0])
    grads = []
    for form in (lambda s, q: mix(s, q, EPS), lambda s, q: mix_plain(s, q, EPS).out):
        leaves = [source.clone().requires_grad_() for source in sources]
        leaf_query = query.clone().requires_grad_()
        grads.append(torch.autograd.grad(form(leaves, leaf_query), [*leaves, leaf_query], cotangent))
    for fast, plain in zip(*grads):
        torch.testing.assert_close(fast, plain, atol=1e-10, rtol=1e-8)


@given(num=st.integers(1, 5), sites=st.integers(1, 4), seed=st.integers(0, 999), started=st.booleans())
@settings(max_examples=25, deadline=None)
def test_two_phases_equal_the_definition(num, sites, seed, started):
    sources, _ = _sources(num + 1, 3, 8, seed)
    queries = torch.randn(sites, 8, dtype=torch.float64)
    finished, partial = sources[:-1], sources[-1] if started else None
    scan = scan_finished(finished, queries, EPS)
    for site in range(sites):
        expected = mix_plain([*finished, partial] if started else finished, queries[site], EPS).out
        torch.testing.assert_close(merge_partial(scan, site, partial, queries[site], EPS), expected)


@pytest.mark.parametrize("num", [1, 2, 9])
def test_zero_query_is_the_mean_of_the_sources(num):
    sources, _ = _sources(num, 4, 6, 0)
    explained = mix_plain(sources, torch.zeros(6, dtype=torch.float64), EPS)
    assert torch.equal(explained.weights, torch.full_like(explained.weights, 1 / num))
    torch.testing.assert_close(mix(sources, torch.zeros(6, dtype=torch.float64), EPS), torch.stack(sources).mean(0))


def test_a_second_derivative_is_refused_and_not_wrong():
    sources, query = _sources(2, 3, 8, 0)
    query.requires_grad_()
    (first,) = torch.autograd.grad(mix(sources, query, EPS).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
