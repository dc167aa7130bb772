"""From the projections of KDA to its q, k, v: convolution, SiLU and, for q and k, L2 norm (k3_model.md section 1).

B batch, T tokens, H heads, K key dim, V value dim, W convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moonlet.ops.backend import kernels
from moonlet.ops.kda import l2_normalize
from moonlet.ops.native import kda_inputs as native
from moonlet.ops.short_conv import short_conv


def kda_inputs(
    q_BTC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    weights_CW: tuple[Tensor, Tensor, Tensor],
    *,
    num_heads: int,
    seq_lens: Sequence[int] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw projections [B, T, H*K], [B, T, H*K], [B, T, H*V] and their three convolution weights -> q, k [B, T, H, K]
    L2-normalised, v [B, T, H, V].

    Whole documents only: where windows are carried over, use `short_conv` and `l2_normalize`. Raises ValueError where
    `seq_lens` and the shapes disagree.
    """
    q, k, v = (
        conv_norm(x, weight, num_heads=num_heads, eps=norm_eps, seq_lens=seq_lens)
        for x, weight, norm_eps in zip((q_BTC, k_BTC, v_BTC), weights_CW, (eps, eps, None))
    )
    return q, k, v


def conv_norm(
    x_BTC: Tensor, weight_CW: Tensor, *, num_heads: int, eps: float | None, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """silu(causal depthwise convolution) in heads, each L2-normalised unless eps is None. -> [B, T, H, C/H]."""
    if kernels() == "native" and native.takes(x_BTC, weight_CW, num_heads):
        return native.conv_norm(x_BTC, weight_CW, num_heads=num_heads, eps=eps, seq_lens=seq_lens)
    heads = short_conv(x_BTC, weight_CW, seq_lens=seq_lens)[0].unflatten(-1, (num_heads, -1))
    return heads if eps is None else l2_normalize(heads, eps)
