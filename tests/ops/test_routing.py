"""Selection: groups, cutoffs, and weights that ignore the bias."""

from __future__ import annotations

import torch

from moonlet.ops.routing import expert_weights, router_scores, select_experts


def test_cutoff_is_the_best_that_was_not_chosen():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.4]])
    selection = select_experts(scores, torch.tensor([0.0, 0.6, 0.0, 0.0]), k=2)
    assert sorted(selection.indices_NK[0].tolist()) == [0, 1]
    assert selection.cutoff_N.tolist() == [0.5]


def test_groups_limit_the_choice_to_the_best_groups():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.7, 0.0]])  # groups of two: 1.0, 1.1, 0.7
    selection = select_experts(scores, torch.zeros(6), k=2, num_groups=3, top_groups=1)
    assert sorted(selection.indices_NK[0].tolist()) == [2, 3]
    assert selection.cutoff_N.isfinite().all()
    two = select_experts(scores, torch.zeros(6), k=3, num_groups=3, top_groups=2)
    assert sorted(two.indices_NK[0].tolist()) == [0, 2, 3]


def test_a_negative_bias_never_leaks_into_another_group():
    scores = torch.full((1, 4), 0.1)
    selection = select_experts(scores, torch.tensor([-0.5, -0.5, -0.9, -0.9]), k=2, num_groups=2, top_groups=1)
    assert sorted(selection.indices_NK[0].tolist()) == [0, 1]


def test_weights_come_from_unbiased_scores_and_carry_the_gradient():
    x, weight = torch.randn(5, 8), torch.randn(6, 8, requires_grad=True)
    scores = router_scores(x, weight, "sigmoid")
    indices = select_experts(scores, torch.randn(6), k=3).indices_NK
    weights = expert_weights(scores, indices, renormalize=True, scaling=2.446)
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.446))
    torch.testing.assert_close(weights / 2.446, scores.gather(1, indices) / scores.gather(1, indices).sum(-1, True))
    weights[:, 0].sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_softmax_scores_add_up_to_one():
    scores = router_scores(torch.randn(4, 8), torch.randn(6, 8), "softmax")
    torch.testing.assert_close(scores.sum(-1), torch.ones(4))
