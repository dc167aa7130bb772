"""Gated activations (k3_model.md section 1): SiTU-GLU of K3, SwiGLU of Kimi Linear.

    SiTU-GLU(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)          the sigmoid sees the uncapped g

|out| < b1 b2; near zero it is SwiGLU, and it becomes SwiGLU as b1, b2 grow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.backend import kernels
from moonlet.ops.native import situ as native
from moonlet.ops.native.library import fits
from moonlet.ops.rms_norm import at_least_fp32


def situ_glu_plain(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The definition; float32 (or float64) inside, cast to gate's dtype at the end."""
    g, u = at_least_fp32(gate), at_least_fp32(up)
    out = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return out.to(gate.dtype)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`situ_glu_plain` with a backward that keeps nothing but its two inputs. gate, up [..., I] -> [..., I]."""
    which = kernels()
    if which == "naive":
        return situ_glu_plain(gate, up, beta, linear_beta)
    if which == "native" and fits(gate, up, width=gate.shape[-1]):
        return native.situ_glu(gate, up, beta, linear_beta)
    return _SituGlu.apply(gate, up, beta, linear_beta)


def situ_glu_packed(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`situ_glu` of the two halves of one product [..., 2I], gate first -> [..., I]."""
    if kernels() == "native" and fits(gate_up, width=gate_up.shape[-1] // 2):
        return native.situ_glu_packed(gate_up, beta, linear_beta)
    gate, up = gate_up.chunk(2, dim=-1)
    return situ_glu(gate, up, beta, linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        return situ_glu_plain(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        g, u, d_out = (at_least_fp32(x) for x in (gate, up, grads[0]))
        tanh_g, sigmoid_g, tanh_u = torch.tanh(g / beta), torch.sigmoid(g), torch.tanh(u / linear_beta)
        slope_g = sigmoid_g * (1 - tanh_g.square() + beta * tanh_g * (1 - sigmoid_g))
        d_gate = d_out * (linear_beta * tanh_u) * slope_g
        d_up = d_out * (beta * tanh_g * sigmoid_g) * (1 - tanh_u.square())
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None
