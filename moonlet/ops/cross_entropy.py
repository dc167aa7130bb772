"""Cross-entropy of a linear head without the logits of all tokens in memory.

Logits of N tokens and V words dwarf everything else in a small model, and a plain chunk loop under autograd saves
nothing, for every chunk stays alive until the backward pass. Here each chunk of tokens makes its logits, its loss and
its gradients in the forward pass and drops the logits; the backward pass only scales.

N tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native import usable
from moonlet.ops.native.cross_entropy import softmax_cross_entropy_

IGNORE = -100


def linear_cross_entropy_plain(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """The definition: sum over tokens with a label of -log softmax(W h)[label]; softmax in float32 (or float64)."""
    logits = hidden_ND @ weight_VD.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels_N, ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """Sum of the losses over labels other than -100, `chunk_tokens` tokens at a time. -> scalar, float32 (or float64).

    The caller divides by the number of valid tokens of the whole step: a mean of means is another function.
    Under autocast the products run in its dtype. Memory: C x V numbers twice, plus the two gradients.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int) -> Tensor:
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden_ND) if needs_hidden else None
        d_weight = torch.zeros_like(weight_VD) if needs_weight else None
        total = torch.zeros((), dtype=torch.promote_types(torch.float32, weight_VD.dtype), device=hidden_ND.device)
        with torch.autocast(kind, enabled=False):
            weight = weight_VD.to(dtype)
            for start in range(0, len(labels_N), chunk_tokens):
                hidden, labels = (x[start : start + chunk_tokens] for x in (hidden_ND, labels_N))
                kept = (labels != IGNORE).nonzero().squeeze(1)
                if len(kept) == 0:
                    continue
                hidden, labels = hidden[kept].to(dtype), labels[kept]
                loss, d_logits = _chunk_loss(hidden, weight, labels, needs_hidden or needs_weight)
                total += loss
                if d_hidden is not None:
                    d_hidden[start + kept] = (d_logits @ weight).to(d_hidden.dtype)
                if d_weight is not None:
                    d_weight.addmm_(d_logits.T, hidden) if dtype == d_weight.dtype else d_weight.add_(
                        d_logits.T @ hidden
                    )
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return *(None if d is None else d * grads[0].to(d.dtype) for d in (d_hidden, d_weight)), None, None


def _chunk_loss(hidden_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk and the gradient of its logits [C, V] (in the dtype of the products)."""
    logits = hidden_CD @ weight_VD.T
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    if usable(logits, width=logits.shape[1]):
        return softmax_cross_entropy_(logits, labels_C).sum(), logits.to(hidden_CD.dtype)
    picked = labels_C.unsqueeze(1)
    at_label = logits.gather(1, picked).squeeze(1)
    if not with_grad:
        return (logits.logsumexp(-1) - at_label).sum(), logits
    probs = torch.softmax(logits, dim=-1)
    # The largest probability is at least 1/V, so its logarithm is exact enough and no second pass of exp is needed.
    log_normaliser = logits.amax(-1) - probs.amax(-1).log()
    d_logits = probs.scatter_add_(1, picked, probs.new_full(picked.shape, -1.0))
    return (log_normaliser - at_label).sum(), d_logits.to(hidden_CD.dtype)
