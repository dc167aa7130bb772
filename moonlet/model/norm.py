"""RMSNorm as a module (k3_model.md section 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonlet.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """weight * cast(x / rms(x)) over the last dim."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Every linear of K3 is bias-free."""
    return nn.Linear(inputs, outputs, bias=False)
