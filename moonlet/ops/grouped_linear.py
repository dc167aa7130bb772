"""Products of tokens with the experts that they chose: sorted rows, one grouped product, gather-only backward.

N tokens, k chosen experts, E experts, P slots. Each expert's rows lie together and start at a multiple of `ALIGN`, so the
slots are P = N*k + E*ALIGN whatever the routing: no shape depends on the data. The alignment has a second purpose:
matrix libraries take another path for products of 1 to 3 rows, and with it the result of a row would depend on how many
neighbours it has; with whole tiles it does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGN = 8


class Dispatch(NamedTuple):
    """Where each (token, choice) goes.

    slot_NK: slot of each choice. token_P: token of each slot (0 for a filler). choice_P: flat (token, choice) of each slot,
    N*k for a filler. ends_E: int32 end of each expert's slots.
    """

    slot_NK: Tensor
    token_P: Tensor
    choice_P: Tensor
    ends_E: Tensor


def plan_dispatch(indices_NK: Tensor, num_experts: int) -> Dispatch:
    """Sort the choices by expert, stably, and give each a slot."""
    num_tokens, k = indices_NK.shape
    flat = indices_NK.flatten()
    device = flat.device
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    ends = padded.cumsum(0)
    # a narrow key sorts three times faster
    order = torch.argsort(flat.to(torch.int16) if num_experts < 2**15 else flat, stable=True)
    rank = torch.arange(num_tokens * k, device=device) - (counts.cumsum(0) - counts).repeat_interleave(
        counts, output_size=num_tokens * k
    )
    slots = (ends - padded).repeat_interleave(counts, output_size=num_tokens * k) + rank
    choice_P = torch.full((num_tokens * k + num_experts * ALIGN,), num_tokens * k, device=device)
    choice_P[slots] = order
    slot_NK = torch.empty_like(flat).scatter_(0, order, slots).view(num_tokens, k)
    token_P = torch.where(choice_P < num_tokens * k, choice_P // k, 0)
    return Dispatch(slot_NK, token_P, choice_P, ends.to(torch.int32))


class _Gather(torch.autograd.Function):
    """Rows by slot; the backward sums each token's k rows by a gather, no scatter-add."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, plan: Dispatch) -> Tensor:
        ctx.slot_NK = plan.slot_NK
        return x_ND.index_select(0, plan.token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (d_PD,) = grads
        num_tokens, k = ctx.slot_NK.shape
        rows = d_PD.index_select(0, ctx.slot_NK.flatten()).view(num_tokens, k, -1)
        return rows.sum(1), None


def dispatch_rows(x_ND: Tensor, plan: Dispatch) -> Tensor:
    """Tokens [N, D] laid out by slot [P, D]; filler slots repeat token 0 and are never read back."""
    return _Gather.apply(x_ND, plan)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, weights_NK: Tensor, plan: Dispatch) -> Tensor:
        ctx.save_for_backward(y_PD, weights_NK)
        ctx.plan = plan
        return _weighted_sum(y_PD, weights_NK, plan.slot_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y_PD, weights_NK = ctx.saved_tensors
        plan, d_ND = ctx.plan, grads[0]
        num_tokens, k = weights_NK.shape
        weight_P = F.pad(weights_NK.flatten(), (0, 1)).index_select(0, plan.choice_P)  # 0 for fillers
        d_PD = d_ND.index_select(0, plan.token_P) * weight_P.unsqueeze(1)
        rows = y_PD.index_select(0, plan.slot_NK.flatten()).view(num_tokens, k, -1)
        d_weights = torch.bmm(rows.to(d_ND.dtype), d_ND.unsqueeze(2)).squeeze(2)
        return d_PD.to(y_PD.dtype), d_weights.to(weights_NK.dtype), None


def _weighted_sum(y_PD: Tensor, weights_NK: Tensor, slot_NK: Tensor) -> Tensor:
    num_tokens, k = weights_NK.shape
    rows = y_PD.index_select(0, slot_NK.flatten()).view(num_tokens, k, -1)
    return torch.bmm(weights_NK.unsqueeze(1), rows.to(weights_NK.dtype)).squeeze(1)


def combine_rows(y_PD: Tensor, weights_NK: Tensor, plan: Dispatch) -> Tensor:
    """sum_k weight * row of each token: [P, D], [N, k] -> [N, D], summed in the weights' dtype (float32)."""
    return _Combine.apply(y_PD, weights_NK, plan)


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its weight^T: [P, I], [E, O, I] -> [P, O]. Rows beyond the last end are undefined."""
    if x_PI.dtype == torch.float64:
        return grouped_linear_plain(x_PI, weight_EOI, ends_E)
    return F.grouped_mm(x_PI, weight_EOI.transpose(1, 2), offs=ends_E)


def grouped_linear_plain(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The definition: one product per expert."""
    ends = ends_E.tolist()
    parts = [x_PI[start:end] @ weight.T for start, end, weight in zip([0, *ends], ends, weight_EOI)]
    rest = x_PI.new_zeros(x_PI.shape[0] - ends[-1], weight_EOI.shape[1])
    return torch.cat([*parts, rest])
