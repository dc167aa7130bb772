"""Causal depthwise convolution with SiLU, as KDA applies it to q, k and v (k3_model.md section 1).

    y_t = silu(sum_j w_j x_{t - (W-1) + j})

B batch, T tokens, C channels, W kernel width, M windows: one for each sequence, or for each document of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.ops.documents import document_lengths


def short_conv(
    x_BTC: Tensor,
    weight_CW: Tensor,
    *,
    initial_window: Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """-> (y [B, T, C], final window [M, C, W]).

    A window holds the last W raw inputs, newest last, zeros where there were none (k3_model.md section 2); the first
    W-1 outputs read it. With `seq_lens` no document reads another one. Raises ValueError where `seq_lens` and the
    shapes disagree.
    """
    batch, tokens, _ = x_BTC.shape
    lengths = document_lengths(batch, tokens, seq_lens)
    width = weight_CW.shape[-1]
    if seq_lens is None:
        rows = [_extend(x_BTC, initial_window, width)]
    else:
        # Every document in a row of its own, its window in front: nothing is masked, so nothing can leak.
        windows = [None] * len(lengths) if initial_window is None else initial_window.split(1)
        rows = [_extend(x, window, width) for x, window in zip(x_BTC.split(lengths, dim=1), windows)]
    outputs = [_correlate(row, weight_CW) for row in rows]
    y = torch.cat([F.silu(y) for y in outputs] if activation else outputs, dim=1)
    return y, torch.cat([row[:, -width:].transpose(1, 2) for row in rows])


def _extend(x_BTC: Tensor, window_BCW: Tensor | None, width: int) -> Tensor:
    """The W inputs before the first token, then x: [B, W+T, C]."""
    if window_BCW is None:
        return F.pad(x_BTC, (0, 0, width, 0))
    return torch.cat([window_BCW.transpose(1, 2).to(x_BTC.dtype), x_BTC], dim=1)


def _correlate(extended: Tensor, weight_CW: Tensor) -> Tensor:
    """[B, W+T, C] -> [B, T, C]: the sum of W shifted copies, which is faster on a CPU than a grouped convolution."""
    width, tokens = weight_CW.shape[-1], extended.shape[1] - weight_CW.shape[-1]
    weight = weight_CW.to(extended.dtype)
    y = extended[:, width : width + tokens] * weight[:, width - 1]
    for j in range(width - 1):
        y = torch.addcmul(y, extended[:, j + 1 : j + 1 + tokens], weight[:, j])
    return y
