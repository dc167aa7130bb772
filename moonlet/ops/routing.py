"""Expert selection (k3_model.md section 1, Router): the one `select_experts` that training and serving share.

N tokens, E experts, k chosen. The bias only selects: weights come from the unbiased scores, and no gradient reaches it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moonlet.ops.sigmoid import sigmoid


class Selection(NamedTuple):
    """indices_NK: chosen experts, best first. cutoff_N: the best biased score that was not chosen."""

    indices_NK: Tensor
    cutoff_N: Tensor


def router_scores(x_ND: Tensor, weight_ED: Tensor, activation: str) -> Tensor:
    """Scores [N, E] in float32 from the full-width hidden state, with autocast off."""
    with torch.autocast(x_ND.device.type, enabled=False):
        wide = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
        logits = x_ND.to(wide) @ weight_ED.to(wide).T
    return sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)


@torch.no_grad()
def select_experts(scores_NE: Tensor, bias_E: Tensor, k: int, num_groups: int = 1, top_groups: int = 1) -> Selection:
    """Top-k of score + bias, inside the `top_groups` best of `num_groups` expert groups.

    A group's worth is the sum of its two best biased scores. Experts of other groups are never chosen.
    """
    biased = scores_NE.detach() + bias_E
    if num_groups > 1:
        biased = biased.masked_fill(~_in_best_groups(biased, num_groups, top_groups), -torch.inf)
    values, indices = biased.topk(k + 1, dim=-1)
    cutoff = torch.where(values[:, k].isfinite(), values[:, k], values[:, k - 1])
    return Selection(indices[:, :k], cutoff)


def _in_best_groups(biased_NE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    grouped = biased_NE.unflatten(-1, (num_groups, -1))
    worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(top_groups, dim=-1).indices, True)
    return chosen.unsqueeze(-1).expand_as(grouped).flatten(1)


def expert_weights(scores_NE: Tensor, indices_NK: Tensor, renormalize: bool, scaling: float) -> Tensor:
    """Weights [N, k] of the chosen experts, from the unbiased scores; differentiable."""
    weights = scores_NE.gather(1, indices_NK)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling
