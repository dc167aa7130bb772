"""Attention of Gated MLA: causal softmax without rotation (k3_model.md section 1).

Three forms. Expanded, for training: keys and values per head. Streamed, for a prefill that continues: the same in blocks of
keys. Absorbed, for decoding: the up-projections are folded into the query and the output, so that one row of R + rope
numbers a token serves all heads. By the native kernel the first two give a token the same bits.

B batch, T queries, S cached tokens, H heads, K query/key dim (nope + rope), V value dim, R latent width.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.ops.native import attention as native
from moonlet.ops.rms_norm import at_least_fp32


def causal_attention_plain(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, scale: float) -> Tensor:
    """The definition, softmax in float32. Query t sees keys up to S - T + t. -> [B, T, H, V]."""
    num_queries, num_keys = q_BTHK.shape[1], k_BSHK.shape[1]
    scores = at_least_fp32(torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK)) * scale
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril(num_keys - num_queries)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("bhts,bshv->bthv", weights.to(v_BSHV.dtype), v_BSHV)


def causal_attention(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, scale: float, seq_lens: tuple[int, ...] | None = None
) -> Tensor:
    """Fused causal attention; with `seq_lens` (B = 1, S = T) each document sees only itself. -> [B, T, H, V]."""
    if q_BTHK.shape[1] == k_BSHK.shape[1] and native.takes(q_BTHK, k_BSHK, v_BSHV):
        batch, tokens = q_BTHK.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSHK, v_BSHV))
        return native.attention(q, k, v, seq_lens or (tokens,) * batch, scale).unflatten(0, (batch, tokens))
    if seq_lens is None:
        return _fused(q_BTHK, k_BSHK, v_BSHV, scale)
    documents = zip(*(x.split(seq_lens, dim=1) for x in (q_BTHK, k_BSHK, v_BSHV)))
    return torch.cat([_fused(q, k, v, scale) for q, k, v in documents], dim=1)


def _fused(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, scale: float) -> Tensor:
    num_queries, num_keys = q_BTHK.shape[1], k_BSHK.shape[1]
    if num_queries not in (1, num_keys) or q_BTHK.dtype == torch.float64:
        return causal_attention_plain(q_BTHK, k_BSHK, v_BSHV, scale)
    # The fused kernel needs equal head sizes; with unequal ones torch silently takes the slow one.
    value_dim = v_BSHV.shape[-1]
    widest = max(q_BTHK.shape[-1], value_dim)
    q, k, v = (F.pad(x, (0, widest - x.shape[-1])).transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHV))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, scale=scale)
    return out.transpose(1, 2)[..., :value_dim]


def streamed_attention(q_BTHK: Tensor, blocks: Iterable[tuple[Tensor, Tensor]], num_keys: int, scale: float) -> Tensor:
    """Attention of the last T of `num_keys` tokens to keys and values that arrive block by block. -> [B, T, H, V].

    Only one block's keys, values and scores are in memory at a time: what a long prefill needs beyond its cache does not
    grow with its length. Softmax is merged online in float32.

    Args:
        blocks: consecutive (k [B, s, H, K], v [B, s, H, V]) from the first token on, `num_keys` tokens together.
    """
    blocks = iter(blocks)
    first = next(blocks)
    blocks = chain([first], blocks)
    if len(q_BTHK) == 1 and not torch.is_grad_enabled() and native.takes(q_BTHK, *first):
        pieces = ((k[0], v[0]) for k, v in blocks)
        return native.streamed_attention(q_BTHK[0], pieces, num_keys, scale).unsqueeze(0)
    return _streamed(q_BTHK, blocks, num_keys, scale)


def _streamed(q_BTHK: Tensor, blocks: Iterable[tuple[Tensor, Tensor]], num_keys: int, scale: float) -> Tensor:
    positions = torch.arange(num_keys - q_BTHK.shape[1], num_keys, device=q_BTHK.device)
    start, total, largest, denominator = 0, None, None, None
    for k_BsHK, v_BsHV in blocks:
        scores = at_least_fp32(torch.einsum("bthk,bshk->bhts", q_BTHK, k_BsHK)) * scale
        stop = start + k_BsHK.shape[1]
        if stop > positions[0]:
            hidden = torch.arange(start, stop, device=q_BTHK.device) > positions.unsqueeze(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        # The first block holds token 0, which every query sees: the running maximum is finite from there on.
        block_top = scores.amax(-1, keepdim=True)
        top = block_top if largest is None else torch.maximum(largest, block_top)
        weights = torch.exp(scores - top)
        block_sum = weights.sum(-1, keepdim=True)
        block_total = torch.einsum("bhts,bshv->bhtv", weights, v_BsHV.to(weights.dtype))
        if total is None or largest is None or denominator is None:
            total, denominator = block_total, block_sum
        else:
            kept = torch.exp(largest - top)
            total, denominator = total * kept + block_total, denominator * kept + block_sum
        start, largest = stop, top
    assert total is not None and denominator is not None, "no keys"
    return (total / denominator).transpose(1, 2).to(q_BTHK.dtype)


def absorbed_attention(
    q_nope_BTHN: Tensor,
    q_rope_BTHP: Tensor,
    latent_BSR: Tensor,
    rope_BSP: Tensor,
    up_HNVR: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Attention against cached latents: scores = (q_nope W_k) . latent + q_rope . rope. -> [B, T, H, V].

    up_HNVR: the key and value up-projections, [H, N, R] and [H, V, R].
    """
    up_k_HNR, up_v_HVR = up_HNVR
    query_latent = torch.einsum("bthn,hnr->bthr", q_nope_BTHN, up_k_HNR)
    scores = torch.einsum("bthr,bsr->bhts", query_latent, latent_BSR)
    scores = at_least_fp32(scores + torch.einsum("bthp,bsp->bhts", q_rope_BTHP, rope_BSP)) * scale
    num_queries, num_keys = scores.shape[-2:]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril(num_keys - num_queries)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).to(latent_BSR.dtype)
    mixed = torch.einsum("bhts,bsr->bthr", weights, latent_BSR)
    return torch.einsum("bthr,hvr->bthv", mixed, up_v_HVR)


@torch.no_grad()
def max_logit_bound(q_BTHK: Tensor, k_BSHK: Tensor, scale: float) -> Tensor:
    """An upper bound [H] on each head's largest attention logit: scale * max |q| * max |k| (Cauchy-Schwarz)."""
    return scale * q_BTHK.norm(dim=-1).amax((0, 1)) * k_BSHK.norm(dim=-1).amax((0, 1))


@torch.no_grad()
def max_logit(
    q_BTHK: Tensor, k_BSHK: Tensor, scale: float, seq_lens: tuple[int, ...] | None = None, rows: int = 512
) -> Tensor:
    """Each head's largest visible attention logit [H], in blocks of query rows; documents apart with `seq_lens`."""
    if seq_lens is not None:
        documents = zip(q_BTHK.split(seq_lens, 1), k_BSHK.split(seq_lens, 1))
        return torch.stack([max_logit(q, k, scale, rows=rows) for q, k in documents]).amax(0)
    num_queries, num_keys = q_BTHK.shape[1], k_BSHK.shape[1]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BTHK.device).tril(num_keys - num_queries)
    tops = []
    for start in range(0, num_queries, rows):
        scores = torch.einsum("bthk,bshk->bhts", q_BTHK[:, start : start + rows], k_BSHK) * scale
        tops.append(scores.masked_fill(~visible[start : start + rows], -torch.inf).amax((0, 2, 3)))
    return torch.stack(tops).amax(0)
