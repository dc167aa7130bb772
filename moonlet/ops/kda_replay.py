"""KDA for tokens that arrive one by one, with the arithmetic of whole sequences (rl.md section 6).

A sequence's state is kept at its last chunk boundary, and the inputs of the tokens since then are kept beside it. Each new
token replays its open chunk with the chunk kernel, so decoding sums in the order in which training and prefill sum.

B sequences, T new tokens, C = 16 tokens to a chunk, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.ops.kda import kda

CHUNK = 16


def empty_chunk(batch: int, heads: int, key_dim: int, value_dim: int, like: Tensor) -> list[Tensor]:
    """Room for q, k [B, C, H, K], v [B, C, H, V], g [B, C, H, K], beta [B, C, H]. Zeros advance no state."""
    shapes = (key_dim,), (key_dim,), (value_dim,), (key_dim,), ()
    return [torch.zeros(batch, CHUNK, heads, *shape, device=like.device, dtype=torch.float32) for shape in shapes]


def kda_replay(inputs: Sequence[Tensor], boundary_BHKV: Tensor, open_rows: Sequence[Tensor], fill_B: Tensor) -> Tensor:
    """Outputs [B, T, H, V] of new tokens; updates the boundary state, the open rows and their number in place.

    T is 1, or B is 1. `inputs` are q, k, v, g, beta as in `kda`; `fill_B` (int64) counts the open tokens, below C.
    """
    if inputs[0].shape[1] == 1:
        return _one_token(inputs, boundary_BHKV, open_rows, fill_B)
    return _many_tokens(inputs, boundary_BHKV, open_rows, fill_B)


def _one_token(inputs: Sequence[Tensor], boundary: Tensor, open_rows: Sequence[Tensor], fill_B: Tensor) -> Tensor:
    at = torch.arange(len(fill_B), device=fill_B.device), fill_B.clone()
    for rows, new in zip(open_rows, inputs):
        rows[at] = new[:, 0].to(rows.dtype)
    o_BCHV, final = kda(*open_rows, initial_state=boundary)
    o_BHV = o_BCHV[at]
    fill_B += 1
    full_B = fill_B == CHUNK
    if bool(full_B.any()):
        boundary[full_B] = final[full_B]
        fill_B[full_B] = 0
        for rows in open_rows:
            rows[full_B] = 0
    return o_BHV.unsqueeze(1).to(inputs[2].dtype)


def _many_tokens(inputs: Sequence[Tensor], boundary: Tensor, open_rows: Sequence[Tensor], fill_B: Tensor) -> Tensor:
    if len(fill_B) != 1:
        raise ValueError("several tokens at once are for one sequence: replay a batch token by token")
    fill = int(fill_B[0])
    joined = [torch.cat([rows[:, :fill], new.to(rows.dtype)], dim=1) for rows, new in zip(open_rows, inputs)]
    num_tokens = joined[0].shape[1]
    closed = num_tokens // CHUNK * CHUNK
    parts = []
    if closed:
        o, state = kda(*(x[:, :closed] for x in joined), initial_state=boundary)
        boundary.copy_(state)
        parts.append(o)
    for rows, x in zip(open_rows, joined):
        rows.zero_()
        rows[:, : num_tokens - closed] = x[:, closed:]
    if num_tokens > closed:
        parts.append(kda(*open_rows, initial_state=boundary)[0][:, : num_tokens - closed])
    fill_B[0] = num_tokens - closed
    return torch.cat(parts, dim=1)[:, fill:].to(inputs[2].dtype)
