"""Quantile Balancing: the router bias that gives every expert its share (K3 report 2.3.3 and appendix C, D).

Token i takes expert j when s_ij + b_j reaches its cutoff alpha_i, so the bias that j needs is r_ij = alpha_i - s_ij, and the
bias that gives it mk/n of m tokens is the k/n quantile of its column. The new bias is that quantile, mean-centred. (With
expert groups a cutoff is that of the chosen groups: the rule then only approaches the even share, step by step.)

Two solvers: `exact_bias` sorts the required biases; `histogram_bias` reads them off integer counts, which add up over
micro-batches and ranks (one all-reduce a step) with an error of at most one bin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def required_bias(scores_NE: Tensor, cutoff_N: Tensor) -> Tensor:
    """r [N, E]: the bias with which each token would just reach each expert."""
    return cutoff_N.unsqueeze(1) - scores_NE.detach()


def exact_bias(required_NE: Tensor, k: int) -> Tensor:
    """The k/E quantile of each column, midway between the two order statistics around it, mean-centred. -> [E]."""
    num_tokens, num_experts = required_NE.shape
    share = num_tokens * k / num_experts
    columns = required_NE.T.contiguous()
    lower = columns.kthvalue(max(math.ceil(share), 1)).values
    upper = columns.kthvalue(min(math.floor(share) + 1, num_tokens)).values
    bias = (lower + upper) / 2
    return bias - bias.mean()


def bias_range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """(low, width of the whole range): scores lie in (0, 1), so every required bias lies in [min b - 1, max b + 1]."""
    low = bias_E.min() - 1
    return low, bias_E.max() + 1 - low


def required_bias_histogram(required_NE: Tensor, bias_E: Tensor, bins: int) -> Tensor:
    """Counts [E, bins] int64 of required biases over the range that the current bias spans."""
    low, width = bias_range(bias_E)
    cells = ((required_NE - low) * (bins / width)).long().clamp_(0, bins - 1)
    cells += torch.arange(required_NE.shape[1], device=cells.device) * bins
    return torch.bincount(cells.flatten(), minlength=required_NE.shape[1] * bins).view(-1, bins)


def histogram_bias(counts_EB: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """The k/E quantile of each row of counts, interpolated inside its bin, mean-centred. Empty counts keep the bias."""
    num_experts, bins = counts_EB.shape
    num_tokens = counts_EB[0].sum()
    share = num_tokens.double() * k / num_experts
    cumulative = counts_EB.cumsum(1)
    first = (cumulative < share.ceil()).sum(1).clamp(max=bins - 1)
    inside = counts_EB.gather(1, first.unsqueeze(1)).squeeze(1)
    before = cumulative.gather(1, first.unsqueeze(1)).squeeze(1) - inside
    fraction = ((share - before) / inside.clamp(min=1)).clamp(0, 1)
    low, width = bias_range(bias_E.double())
    bias = low + (first + fraction) * (width / bins)
    centred = (bias - bias.mean()).to(bias_E.dtype)
    return torch.where(num_tokens > 0, centred, bias_E)


def max_violation(load_E: Tensor) -> float:
    """How far the busiest expert is above its share: max load / mean load - 1."""
    mean = load_E.double().mean()
    return float(load_E.max() / mean - 1) if mean > 0 else 0.0
