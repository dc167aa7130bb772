"""RMSNorm, alone and times sigmoid(gate), in C++; the definitions are in `ops/rms_norm.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native.library import run


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x). x [..., D] float32 -> [..., D]."""
    return _Norm.apply(x, None, weight, eps)


def gated_head_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, times sigmoid(gate). o, gate [..., V] float32, weight [V] -> [..., V]."""
    return _Norm.apply(o, gate, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        gate = None if gate is None else gate.contiguous()
        y = torch.empty_like(x)
        ctx.sizes = x.numel() // x.shape[-1], x.shape[-1], eps
        run("norm_forward", x, gate, weight, y, *ctx.sizes, torch.get_num_threads())
        ctx.save_for_backward(x, gate, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        d_gate = None if gate is None else torch.empty_like(gate)
        outputs = d_x, d_gate, d_weight
        run("norm_backward", x, gate, weight, grads[0].contiguous(), *outputs, *ctx.sizes, torch.get_num_threads())
        return d_x, d_gate, d_weight, None
