"""Block Attention Residuals: each sub-layer reads a softmax mix of what came before it in depth (k3_model.md section 1).

    s_i = V_i / rms(V_i) . query,   p = softmax(s),   mix = sum_i p_i V_i          query = norm weight * projection

Three forms of the same function:
- `mix_plain`: the definition, everything stacked.
- `mix`: what training uses; keeps references to the sources and [.., S] weights instead of stacked copies.
- `scan_finished` + `merge_partial`: the two phases of inference (AttnRes paper, algorithm 1). The finished sources of a
  block are scanned once for all its sites; each site then merges the running sum by online softmax.

Shapes: V_i [..., D], S sources, Q sites; everything inside is float32 and cast at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native import usable
from moonlet.ops.native.attn_res_mix import attn_res_mix
from moonlet.ops.rms_norm import at_least_fp32, inverse_rms


class Mix(NamedTuple):
    """A mix with what explains it: scores and weights are [..., S]."""

    out: Tensor
    scores: Tensor
    weights: Tensor


def mix_plain(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> Mix:
    """The definition: stack, normalise, score, weigh."""
    stacked = torch.stack([at_least_fp32(source) for source in sources], dim=-2)
    scores = (stacked * inverse_rms(stacked, eps)) @ at_least_fp32(query_D)
    weights = torch.softmax(scores, dim=-1)
    out = (weights.unsqueeze(-1) * stacked).sum(-2)
    return Mix(out.to(sources[0].dtype), scores, weights)


def mix(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    """The same mix with a backward that saves no copy of a source. sources S x [..., D], query [D] -> [..., D]."""
    if usable(query_D, *sources, width=query_D.numel()):
        return attn_res_mix(sources, query_D, eps)
    return _Mix.apply(query_D, eps, *sources)


def _scores(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> tuple[Tensor, list[Tensor]]:
    inverse = [inverse_rms(source, eps).squeeze(-1) for source in sources]
    scores = [at_least_fp32(source) @ query_D * scale for source, scale in zip(sources, inverse)]
    return torch.stack(scores, dim=-1), inverse


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_D: Tensor, eps: float, *sources: Tensor) -> Tensor:
        scores, _ = _scores(sources, at_least_fp32(query_D), eps)
        weights = torch.softmax(scores, dim=-1)
        out = at_least_fp32(sources[0]) * weights[..., 0:1]
        for i, source in enumerate(sources[1:], start=1):
            out.addcmul_(at_least_fp32(source), weights[..., i : i + 1])
        ctx.save_for_backward(query_D, weights, *sources)
        ctx.eps = eps
        return out.to(sources[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query_D, weights, *sources = ctx.saved_tensors
        query, d_out = at_least_fp32(query_D), at_least_fp32(grads[0])
        scores, inverse = _scores(sources, query, ctx.eps)
        d_weights = torch.stack([(d_out * source).sum(-1) for source in sources], dim=-1)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_query = torch.zeros_like(query)
        d_sources = []
        for i, (source, scale) in enumerate(zip(sources, inverse)):
            wide, slope = at_least_fp32(source), d_scores[..., i]
            # s = (V . query) r with r = (mean V^2 + eps)^-1/2, so dr/dV = -V r^3 / D
            through_rms = slope * scores[..., i] * scale.square() / wide.shape[-1]
            d_source = d_out * weights[..., i : i + 1] + (slope * scale).unsqueeze(-1) * query
            d_sources.append(d_source.addcmul_(wide, through_rms.unsqueeze(-1), value=-1).to(source.dtype))
            d_query += (slope * scale).reshape(-1) @ wide.reshape(-1, wide.shape[-1])
        return d_query.to(query_D.dtype), None, *d_sources


class Scan(NamedTuple):
    """Phase 1 for Q sites: un-normalised sums [Q, ..., D], largest scores and denominators [Q, ...]."""

    total: Tensor
    largest: Tensor
    denominator: Tensor


def scan_finished(sources: Sequence[Tensor], queries_QD: Tensor, eps: float) -> Scan:
    """One batched attention of all sites of a block against the finished sources."""
    stacked = torch.stack([at_least_fp32(source) for source in sources])
    scores = torch.einsum("s...d,qd->qs...", stacked * inverse_rms(stacked, eps), at_least_fp32(queries_QD))
    largest = scores.amax(1)
    exponentials = torch.exp(scores - largest.unsqueeze(1))
    return Scan(torch.einsum("qs...,s...d->q...d", exponentials, stacked), largest, exponentials.sum(1))


def merge_partial(scan: Scan, site: int, partial: Tensor | None, query_D: Tensor, eps: float) -> Tensor:
    """Phase 2: site `site`'s mix of the scanned sources and the running sum `partial` [..., D] (None: not started)."""
    total, largest, denominator = (part[site] for part in scan)
    if partial is None:
        return (total / denominator.unsqueeze(-1)).to(query_D.dtype)
    wide = at_least_fp32(partial)
    score = (wide @ at_least_fp32(query_D)) * inverse_rms(wide, eps).squeeze(-1)
    top = torch.maximum(largest, score)
    old, new = torch.exp(largest - top), torch.exp(score - top)
    mixed = total * old.unsqueeze(-1) + wide * new.unsqueeze(-1)
    return (mixed / (denominator * old + new).unsqueeze(-1)).to(partial.dtype)
