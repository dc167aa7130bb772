"""Sorted expert products against a loop over experts; rows that do not depend on their neighbours."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.grouped_linear import (
    ALIGN,
    combine_rows,
    dispatch_rows,
    grouped_linear,
    grouped_linear_plain,
    plan_dispatch,
)


def _loop(x, indices, weights, w_EOI):
    out = x.new_zeros(x.shape[0], w_EOI.shape[1])
    for expert, matrix in enumerate(w_EOI):
        token, slot = torch.where(indices == expert)
        out = out.index_add(0, token, (x[token] @ matrix.T) * weights[token, slot].unsqueeze(1))
    return out


def _sorted(x, indices, weights, w_EOI):
    plan = plan_dispatch(indices, w_EOI.shape[0])
    return combine_rows(grouped_linear(dispatch_rows(x, plan), w_EOI, plan.ends_E), weights, plan)


@given(tokens=st.integers(1, 40), experts=st.integers(2, 9), k=st.integers(1, 3), seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_equal_the_loop(tokens, experts, k, seed):
    k = min(k, experts)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(tokens, experts, generator=generator).topk(k).indices
    leaves = [
        torch.randn(tokens, 8, generator=generator, dtype=torch.float64),
        torch.rand(tokens, k, generator=generator, dtype=torch.float64),
        torch.randn(experts, 6, 8, generator=generator, dtype=torch.float64),
    ]
    results = []
    for form in (_loop, _sorted):
        x, weights, w = (leaf.clone().requires_grad_() for leaf in leaves)
        out = form(x, indices, weights, w)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weights, w))))
    for plain, fast in zip(*results):
        torch.testing.assert_close(fast, plain)


def test_fp32_grouped_product_equals_its_definition_with_idle_experts():
    indices = torch.tensor([[0, 3], [0, 3], [3, 0]])
    plan = plan_dispatch(indices, 5)
    rows = dispatch_rows(torch.randn(3, 16), plan)
    weight = torch.randn(5, 8, 16, requires_grad=True)
    fast, plain = grouped_linear(rows, weight, plan.ends_E), grouped_linear_plain(rows, weight, plan.ends_E)
    real = plan.slot_NK.flatten()
    torch.testing.assert_close(fast[real], plain[real])
    combine_rows(fast, torch.ones(3, 2), plan).sum().backward()
    assert weight.grad is not None, "an idle expert has a gradient of zeros, not none"
    assert torch.equal(weight.grad[[1, 2, 4]], torch.zeros(3, 8, 16))


@given(tokens=st.integers(1, 60), experts=st.integers(2, 20), seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_plan_gives_each_choice_its_own_slot_inside_its_expert(tokens, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(tokens, experts, generator=generator).topk(min(2, experts)).indices
    plan = plan_dispatch(indices, experts)
    slots = plan.slot_NK.flatten()
    assert slots.unique().numel() == slots.numel()
    ends = plan.ends_E.tolist()
    assert all(end % ALIGN == 0 for end in ends)
    owner = torch.searchsorted(plan.ends_E.long(), slots, right=True)
    assert torch.equal(owner, indices.flatten())
    assert torch.equal(plan.token_P[slots], torch.arange(tokens).repeat_interleave(indices.shape[1]))


def test_a_row_does_not_depend_on_how_many_share_its_expert():
    x, weight = torch.randn(64, 32), torch.randn(4, 24, 32)
    alone = None
    for others in range(0, 40):
        indices = torch.full((64, 1), 3)
        indices[: others + 1] = 1
        out = _sorted(x, indices, torch.ones(64, 1), weight)
        alone = out[0] if alone is None else alone
        assert torch.equal(out[0], alone)
