"""SiTU-GLU by the C++ kernel; the definition is `ops/situ.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native.library import run


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """gate, up [..., I] float32 on the CPU, I a multiple of the vector width -> [..., I]."""
    return _SituGlu.apply(gate, up, beta, linear_beta)


def situ_glu_packed(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The same of one tensor [..., 2I], gate first, whose gradient is one tensor too."""
    return _SituGluPacked.apply(gate_up, beta, linear_beta)


def _rows(x: Tensor) -> Tensor:
    """[..., I] as rows whose numbers are adjacent; the stride between rows is free."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _halves(rows_NI: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = rows_NI.chunk(2, dim=-1)
    return gate, up


def _forward(inputs: tuple[Tensor, Tensor], betas: tuple[float, float]) -> Tensor:
    rows, width = inputs[0].shape
    out = inputs[0].new_empty(rows, width)
    strides = inputs[0].stride(0), inputs[1].stride(0)
    run("situ_forward", *inputs, out, rows, width, *strides, *map(float, betas), torch.get_num_threads())
    return out


def _backward(
    inputs: tuple[Tensor, Tensor], d_out: Tensor, grads: tuple[Tensor, Tensor], betas: tuple[float, float]
) -> None:
    rows, width = inputs[0].shape
    strides = inputs[0].stride(0), inputs[1].stride(0), grads[0].stride(0)
    sizes = rows, width, *strides, *map(float, betas), torch.get_num_threads()
    run("situ_backward", *inputs, d_out, *grads, *sizes)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        rows = _rows(gate), _rows(up)
        ctx.save_for_backward(*rows)
        ctx.betas = beta, linear_beta
        return _forward(rows, ctx.betas).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty(gate.shape), torch.empty(gate.shape)
        _backward((gate, up), grads[0].contiguous(), (d_gate, d_up), ctx.betas)
        return d_gate.view(grads[0].shape), d_up.view(grads[0].shape), None, None


class _SituGluPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
        rows = _rows(gate_up)
        ctx.save_for_backward(rows)
        ctx.betas = beta, linear_beta
        return _forward(_halves(rows), ctx.betas).view(*gate_up.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        d_rows = torch.empty(rows.shape)
        _backward(_halves(rows), grads[0].contiguous(), _halves(d_rows), ctx.betas)
        return d_rows.view(*grads[0].shape[:-1], -1), None, None
