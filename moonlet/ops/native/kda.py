"""KDA by the C++ kernel; the definition is `ops/kda.py`, the same chunks in torch are `ops/kda_chunk.py`.

N tokens of all documents, H heads, K key dim, V value dim, M documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.documents import document_lengths
from moonlet.ops.native.library import load, run

CHUNK = 16
CHECKPOINT_BYTES = 64 << 20  # states kept for the backward pass; longer rows keep fewer and rebuild the rest


@dataclass(frozen=True)
class _Layout:
    """Where documents and their state checkpoints lie, one checkpoint for every `interval` chunks."""

    starts: Tensor  # [M + 1]
    checkpoint_starts: Tensor  # [M + 1]
    interval: int
    dims: tuple[int, int, int]  # H, K, V
    scale: float

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The last arguments of both kernels."""
        documents = len(self.starts) - 1
        return documents, *self.dims, self.interval, float(self.scale), torch.get_num_threads()


def _layout(lengths: tuple[int, ...], dims: tuple[int, int, int], scale: float) -> _Layout:
    heads, key_dim, value_dim = dims
    chunks = [-(-length // CHUNK) for length in lengths]
    state_bytes = 4 * heads * key_dim * value_dim
    interval = max(1, -(-sum(chunks) * state_bytes // CHECKPOINT_BYTES))
    checkpoints = [-(-count // interval) for count in chunks]
    starts, checkpoint_starts = (torch.tensor([0, *accumulate(counts)]) for counts in (lengths, checkpoints))
    return _Layout(starts, checkpoint_starts, interval, dims, scale)


def takes(q_BTHK: Tensor, v_BTHV: Tensor) -> bool:
    """Whether the kernel takes tensors of this kind once they are float32: on the CPU, head sizes in whole registers."""
    is_wide = torch.float64 in (q_BTHK.dtype, v_BTHV.dtype)
    in_registers = all(x.shape[-1] % load().lanes == 0 for x in (q_BTHK, v_BTHV))
    return in_registers and not is_wide and q_BTHK.device.type == "cpu"


def kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `ops/kda.py`."""
    batch, tokens, heads, key_dim = q_BTHK.shape
    lengths = document_lengths(batch, tokens, seq_lens)
    dims = heads, key_dim, v_BTHV.shape[-1]
    layout = _layout(lengths, dims, key_dim**-0.5 if scale is None else scale)
    inputs = [x.float().contiguous() for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)]
    initial = torch.zeros(len(lengths), *dims) if initial_state is None else initial_state.float()
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, initial))
    out, final = _NativeKDA.apply(*inputs, initial, layout, needs_grad)
    return out.to(v_BTHV.dtype), final


class _NativeKDA(torch.autograd.Function):
    """Keeps the inputs, the solved values u (as large as v) and the state before every `interval`-th chunk."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial, layout, needs_grad = arguments
        state, out = initial.contiguous().clone(), torch.empty_like(inputs[2])
        u = torch.empty_like(out) if needs_grad else None
        count = int(layout.checkpoint_starts[-1])
        checkpoints = torch.empty(count, *layout.dims) if needs_grad else None
        where = layout.starts, layout.checkpoint_starts
        run("kda_forward", *inputs, *where, state, out, u, checkpoints, *layout.sizes)
        ctx.save_for_backward(*inputs, u, checkpoints)
        ctx.layout = layout
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *inputs, u, checkpoints = ctx.saved_tensors
        layout = ctx.layout
        d_out, d_state = grads[0].contiguous(), grads[1].contiguous().clone()
        d_inputs = [torch.empty_like(x) for x in inputs]
        where = layout.starts, layout.checkpoint_starts
        run("kda_backward", *inputs, *where, u, checkpoints, d_out, d_state, *d_inputs, *layout.sizes)
        return *d_inputs, d_state, None, None


def kda_step(inputs: Sequence[Tensor], state_MHKV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One decoded token: q, k, v, g [B, H, *], beta [B, H] and the state -> (o [B, H, V], new state). No autograd."""
    q, k, v, g, beta = (x.float().contiguous() for x in inputs)
    state, o = state_MHKV.float().contiguous(), torch.empty_like(v)
    new_state = torch.empty_like(state)
    sizes = beta.numel(), q.shape[-1], v.shape[-1], float(scale), torch.get_num_threads()
    run("kda_step", q, k, v, g, beta, state, new_state, o, *sizes)
    return o, new_state
