"""Softmax cross-entropy of rows of logits in C++: loss and gradient in one pass; the definition is F.cross_entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native.library import run

IGNORE = -100


def softmax_cross_entropy_(logits_NV: Tensor, labels_N: Tensor, ignore: int = IGNORE) -> Tensor:
    """Losses [N]; the logits (contiguous float32, V in whole registers) are REPLACED by the gradient of their sum.

    Rows labelled `ignore` have loss and gradient 0; other labels must lie in [0, V). No autograd.
    """
    rows, words = logits_NV.shape
    losses = logits_NV.new_empty(rows)
    run("cross_entropy", logits_NV, labels_N.contiguous(), losses, rows, words, ignore, torch.get_num_threads())
    return losses


def softmax_cross_entropy(logits_NV: Tensor, labels_N: Tensor, ignore: int = IGNORE) -> Tensor:
    """The same losses [N] under autograd; the logits are left as they were."""
    return _CrossEntropy.apply(logits_NV, labels_N, ignore)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
        grad = logits.detach().clone(memory_format=torch.contiguous_format)
        losses = softmax_cross_entropy_(grad, labels, ignore)
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].unsqueeze(-1), None, None
