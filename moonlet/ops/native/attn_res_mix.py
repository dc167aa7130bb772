"""One site of Block AttnRes in C++; the definition is `ops/attn_residuals.py`. S sources [..., D]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.native.library import run


def attn_res_mix(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    """sum_s softmax_s(source_s . query / rms(source_s)) source_s; float32, D in whole registers. -> [..., D]."""
    return _Mix.apply(query_D, eps, *sources)


def _table(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors as an array that the kernel reads."""
    return torch.tensor([x.data_ptr() for x in tensors])


class _Mix(torch.autograd.Function):
    """Keeps references to the sources, and three numbers a token and source: weight, score, 1 / rms."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *given: Tensor) -> Tensor:
        sources, query = [x.contiguous() for x in given], query.contiguous()
        rows, dim = sources[0].numel() // len(query), len(query)
        out = torch.empty_like(sources[0])
        weights, scores, inverse = (query.new_empty(rows, len(sources)) for _ in range(3))
        sizes = rows, len(sources), dim, eps, torch.get_num_threads()
        run("mix_forward", _table(sources), query, out, weights, scores, inverse, *sizes)
        ctx.save_for_backward(query, weights, scores, inverse, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, weights, scores, inverse, *sources = ctx.saved_tensors
        d_query, d_sources = torch.empty_like(query), [torch.empty_like(x) for x in sources]
        given = query, weights, scores, inverse, grads[0].contiguous()
        sizes = *weights.shape, len(query), torch.get_num_threads()
        run("mix_backward", _table(sources), *given, _table(d_sources), d_query, *sizes)
        return d_query, None, *d_sources
