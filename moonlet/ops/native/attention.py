"""Causal attention by the C++ kernel; the definition is `ops/mla.py`.

N queries and M keys of all documents, H heads, D query/key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native import usable
from moonlet.ops.native.library import load, run

KEY_BLOCK = 64  # pieces of keys begin at multiples of it


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these tensors: float32 on the CPU, head sizes in whole registers."""
    return usable(q, k, v, width=v.shape[-1]) and q.shape[-1] % load().lanes == 0


def attention(q_NHD: Tensor, k_NHD: Tensor, v_NHV: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Documents of `lengths` tokens lie one behind the other; each token sees its own document up to itself. [N, H, V]."""
    starts = [0, *accumulate(lengths)]
    table = torch.tensor([starts, starts]), torch.zeros(2, len(lengths), dtype=torch.int64)
    return _Attention.apply(q_NHD.contiguous(), k_NHD.contiguous(), v_NHV.contiguous(), table, max(lengths), scale)


class _Attention(torch.autograd.Function):
    """Keeps inputs, outputs and one number for each query and head."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, (starts, places), longest, scale = arguments
        out, top, denominator = _fresh_sums(q, v)
        sizes = places.shape[1], q.shape[1], q.shape[2], v.shape[2]
        run(
            "attention_forward",
            q,
            k,
            v,
            starts,
            places,
            out,
            top,
            denominator,
            *sizes,
            scale,
            1,
            torch.get_num_threads(),
        )
        ctx.save_for_backward(q, k, v, out, top)
        ctx.layout = starts, places, longest, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        starts, places, longest, scale = ctx.layout
        d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
        sizes = places.shape[1], q.shape[1], q.shape[2], v.shape[2], scale, longest, torch.get_num_threads()
        run("attention_backward", q, k, v, starts, places, out, grads[0].contiguous(), lse, d_q, d_k, d_v, *sizes)
        return d_q, d_k, d_v, None, None, None


def _fresh_sums(q_NHD: Tensor, v_NHV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, _ = q_NHD.shape
    top = q_NHD.new_full((rows, heads), -torch.inf)
    return q_NHD.new_zeros(rows, heads, v_NHV.shape[-1]), top, q_NHD.new_zeros(rows, heads)


def streamed_attention(q_THD: Tensor, blocks: Iterable[tuple[Tensor, Tensor]], num_keys: int, scale: float) -> Tensor:
    """The last T of `num_keys` tokens against keys and values [m, H, D], [m, H, V] that arrive in order, in multiples of 64.

    The same bits as `attention` over the whole document. No autograd. -> [T, H, V].
    """
    q_THD, place, sums = q_THD.contiguous(), 0, None
    for k_MHD, v_MHV in blocks:
        k_MHD, v_MHV = k_MHD.contiguous(), v_MHV.contiguous()
        sums = _fresh_sums(q_THD, v_MHV) if sums is None else sums
        starts = torch.tensor([[0, len(q_THD)], [0, len(k_MHD)]])
        places = torch.tensor([[num_keys - len(q_THD)], [place]])
        place += len(k_MHD)
        sizes = 1, *q_THD.shape[1:], v_MHV.shape[2], scale, int(place == num_keys), torch.get_num_threads()
        run("attention_forward", q_THD, k_MHD, v_MHV, starts, places, *sums, *sizes)
    assert sums is not None, "no keys"
    return sums[0]
