"""Quantile Balancing against pencil numbers (cases/bugs.md B26, B28) and against its own exact form."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.quantile_balancing import (
    exact_bias,
    histogram_bias,
    max_violation,
    required_bias,
    required_bias_histogram,
)
from moonlet.ops.routing import select_experts

SCORES = torch.tensor(
    [
        [0.90, 0.81, 0.10, 0.22],
        [0.86, 0.31, 0.24, 0.11],
        [0.80, 0.62, 0.55, 0.13],
        [0.95, 0.21, 0.33, 0.42],
        [0.71, 0.66, 0.12, 0.34],
        [0.91, 0.14, 0.51, 0.23],
        [0.83, 0.41, 0.32, 0.61],
        [0.76, 0.25, 0.15, 0.52],
    ],
    dtype=torch.float64,
)


def load(scores, bias, k):
    return torch.bincount(select_experts(scores, bias, k).indices_NK.flatten(), minlength=scores.shape[1])


def solve(scores, bias, k):
    return exact_bias(required_bias(scores, select_experts(scores, bias, k).cutoff_N), k)


def solve_by_histogram(scores, bias, k, bins):
    required = required_bias(scores, select_experts(scores, bias, k).cutoff_N)
    return histogram_bias(required_bias_histogram(required, bias, bins), bias, k)


def test_pencil_example():
    bias = torch.zeros(4, dtype=torch.float64)
    assert load(SCORES, bias, 1).tolist() == [8, 0, 0, 0]
    bias = solve(SCORES, bias, 1)
    torch.testing.assert_close(bias, torch.tensor([-0.36625, 0.09875, 0.16875, 0.09875], dtype=torch.float64))
    assert load(SCORES, bias, 1).tolist() == [2, 3, 1, 2]
    assert load(SCORES, -bias, 1).tolist() == [8, 0, 0, 0], "the wrong sign must not help"
    assert load(SCORES, solve(SCORES, bias, 1), 1).tolist() == [2, 2, 2, 2]


def skewed(num_tokens=4096, num_experts=64):
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return torch.sigmoid(draws + 1.5 * torch.randn(num_experts, generator=generator, dtype=torch.float64))


def test_a_skewed_router_is_level_after_one_update_and_stays_so():
    scores, bias = skewed(), torch.zeros(64, dtype=torch.float64)
    assert max_violation(load(scores, bias, 4)) > 8
    violations = []
    for _ in range(6):
        bias = solve(scores, bias, 4)
        violations.append(max_violation(load(scores, bias, 4)))
    assert max(violations) < 0.5 and violations[-1] < 0.07


def test_histogram_levels_the_same_router():
    scores, bias = skewed(), torch.zeros(64, dtype=torch.float64)
    for _ in range(6):
        bias = solve_by_histogram(scores, bias, 4, bins=1000)
        assert max_violation(load(scores, bias, 4)) < 0.5
    assert max_violation(load(scores, bias, 4)) < 0.2


@given(tokens=st.integers(8, 200), experts=st.integers(3, 12), k=st.integers(1, 2), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_histogram_is_within_a_bin_of_the_exact_quantile(tokens, experts, k, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    bias = torch.rand(experts, generator=generator, dtype=torch.float64) - 0.5
    bins = 4000
    required = required_bias(scores, select_experts(scores, bias, k).cutoff_N)
    counts = required_bias_histogram(required, bias, bins)
    assert int(counts.sum()) == tokens * experts, "every token counts once for every expert"
    width = float(bias.max() - bias.min() + 2) / bins
    share = tokens * k / experts
    columns = required.sort(dim=0).values
    low, high = columns[max(int(-(-share // 1)) - 1, 0)], columns[min(int(share), tokens - 1)]
    raw = histogram_bias(counts, bias, k)
    # the centring shifts all alike, so compare differences between experts
    slack = 2 * width + float((high - low).max())
    exact = (low + high) / 2
    assert float(((raw - raw.mean()) - (exact - exact.mean())).abs().max()) <= slack


def test_counts_add_up_over_micro_batches():
    scores, bias = skewed(512, 8), torch.zeros(8, dtype=torch.float64)
    required = required_bias(scores, select_experts(scores, bias, 2).cutoff_N)
    whole = required_bias_histogram(required, bias, 100)
    parts = sum(required_bias_histogram(part, bias, 100) for part in required.split(100))
    assert torch.equal(whole, parts)


def test_no_tokens_keep_the_bias():
    bias = torch.tensor([0.1, -0.1])
    assert torch.equal(histogram_bias(torch.zeros(2, 50, dtype=torch.int64), bias, 1), bias)
