"""What KDA does to its projections, in C++: convolution + SiLU + L2 norm, and the bounded gate.

Definitions: `ops/kda_inputs.py`, `ops/kda.py`. N tokens, H heads, D head dim, C = H*D channels, W convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.documents import document_lengths
from moonlet.ops.native.library import fits, run

MAX_WIDTH = 16  # of the convolution, as in conv_norm.cpp


def takes(x_BTC: Tensor, weight_CW: Tensor, num_heads: int) -> bool:
    """Whether the kernel takes these tensors: heads in whole registers, a window of ordinary width."""
    return weight_CW.shape[-1] <= MAX_WIDTH and fits(x_BTC, weight_CW, width=x_BTC.shape[-1] // num_heads)


def conv_norm(
    x_BTC: Tensor, weight_CW: Tensor, *, num_heads: int, eps: float | None, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """silu(causal depthwise convolution), each head L2-normalised unless eps is None. -> [B, T, H, D] float32."""
    batch, tokens, channels = x_BTC.shape
    starts = torch.tensor([0, *accumulate(document_lengths(batch, tokens, seq_lens))])
    out = _ConvNorm.apply(x_BTC.reshape(-1, channels), weight_CW.t().contiguous(), starts, num_heads, eps)
    return out.view(batch, tokens, num_heads, -1)


class _ConvNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_WC: Tensor, starts: Tensor, heads: int, eps: float | None) -> Tensor:
        x = x_NC if x_NC.stride(-1) == 1 else x_NC.contiguous()
        width, channels = weight_WC.shape
        ctx.save_for_backward(x, weight_WC, starts)
        ctx.sizes = len(starts) - 1, heads, channels // heads, width, x.stride(0), -1.0 if eps is None else eps
        out = x.new_empty(x.shape)
        run("conv_norm_forward", x, weight_WC, starts, out, *ctx.sizes, torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, starts = ctx.saved_tensors
        d_x, d_weight = x.new_empty(x.shape), torch.empty_like(weight)
        tensors = x, weight, starts, grads[0].contiguous(), d_x, d_weight
        run("conv_norm_backward", *tensors, *ctx.sizes, torch.get_num_threads())
        return d_x, d_weight, None, None, None


def kda_gate(f_BTHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) (f + dt_bias)), float32."""
    return _Gate.apply(f_BTHK, A_log_H, dt_bias_HK, lower_bound)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
        f, bias, rate = f.contiguous(), dt_bias.contiguous(), A_log.exp()
        heads, dim = bias.shape
        g = torch.empty_like(f)
        ctx.sizes = f.numel() // (heads * dim), heads, dim, float(bound)
        run("kda_gate_forward", f, rate, bias, g, *ctx.sizes, torch.get_num_threads())
        ctx.save_for_backward(f, rate, bias)
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        f, rate, bias = ctx.saved_tensors
        d_f, d_sums = torch.empty_like(f), f.new_empty(2, *bias.shape)
        tensors = f, rate, bias, grads[0].contiguous(), d_f, d_sums
        run("kda_gate_backward", *tensors, *ctx.sizes, torch.get_num_threads())
        return d_f, d_sums[1].sum(-1), d_sums[0], None
