"""RMSNorm as K3 applies it (k3_model.md section 1), and the gated per-head form that follows KDA.

Statistics are float32; the normalised value is cast to the model's dtype BEFORE the weight multiplies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.ops.native import norm as native
from moonlet.ops.native import usable


def at_least_fp32(x: Tensor) -> Tensor:
    """float32 for half precisions, unchanged for float32 and float64."""
    return x if x.dtype == torch.float64 else x.float()


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim, kept as size 1; float32 or float64."""
    return torch.rsqrt(at_least_fp32(x).square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * cast(x / rms(x)). x [..., D], weight [D] -> [..., D] in x's dtype."""
    if usable(x, weight, width=x.shape[-1]):
        return native.rms_norm(x, weight, eps)
    return rms_norm_plain(x, weight, eps)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition of `rms_norm`."""
    return weight * (at_least_fp32(x) * inverse_rms(x, eps)).to(x.dtype)


def gated_head_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's value dim, times sigmoid(gate) (k3_system.md 1.2).

    o [..., H, V], gate [..., H, V] (logits), weight [V] -> [..., H, V] in gate's dtype.
    """
    if usable(o, gate, weight, width=o.shape[-1]):
        return native.gated_head_norm(o, gate, weight, eps)
    normed = rms_norm_plain(o.to(gate.dtype), weight, eps)
    return (normed * torch.sigmoid(at_least_fp32(gate))).to(gate.dtype)
