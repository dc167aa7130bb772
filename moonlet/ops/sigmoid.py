"""The logistic function, in at least float32, with bits that depend on each number alone where native kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native import usable
from moonlet.ops.native.library import run
from moonlet.ops.rms_norm import at_least_fp32


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element."""
    x = at_least_fp32(x)
    return _Sigmoid.apply(x) if usable(x, width=0) else torch.sigmoid(x)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        run("sigmoid", x, out, x.numel(), torch.get_num_threads())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return grads[0] * out * (1 - out)
