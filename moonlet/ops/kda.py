"""Kimi Delta Attention (k3_model.md section 1, k3_system.md 1.2): gate, recurrence, dispatch to the fast twins.

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

The state decays first; the delta rule then corrects the decayed state.

B batch, T tokens, H heads, K key dim, V value dim, M states: one for each sequence, or document of a packed row.
The state is [M, H, K, V] (key first) in at least float32. Released caches store it value first: transpose them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.ops.backend import kernels
from moonlet.ops.documents import document_lengths
from moonlet.ops.kda_chunk import kda_chunk
from moonlet.ops.native import kda as native
from moonlet.ops.native.kda_inputs import kda_gate as native_gate
from moonlet.ops.native.library import fits
from moonlet.ops.rms_norm import at_least_fp32


def kda_gate_plain(f_BTHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay of each key channel, [B, T, H, K], float32 or float64 (k3_system.md 1.2, "K3 gate").

    `lower_bound` L < 0: L * sigmoid(exp(A) (f + dt_bias)), inside (L, 0). None: -exp(A) * softplus(f + dt_bias).
    These are two functions, fixed when the model is trained; neither is a clamp of the other.
    """
    rate_H1 = at_least_fp32(A_log_H).exp().unsqueeze(-1)
    logit = at_least_fp32(f_BTHK) + at_least_fp32(dt_bias_HK)
    if lower_bound is None:
        return -rate_H1 * F.softplus(logit)
    return lower_bound * torch.sigmoid(rate_H1 * logit)


def kda_gate(f_BTHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None) -> Tensor:
    """`kda_gate_plain` by the fastest kernel that runs here."""
    is_native = kernels() == "native" and fits(f_BTHK, A_log_H, dt_bias_HK, width=f_BTHK.shape[-1])
    if is_native and lower_bound is not None:
        return native_gate(f_BTHK, A_log_H, dt_bias_HK, lower_bound)
    return kda_gate_plain(f_BTHK, A_log_H, dt_bias_HK, lower_bound)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim: eps is added to the SUM of squares, inside the root."""
    wide = at_least_fp32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def kda_recurrent(
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
    """The definition, token by token; the oracle of every other form. Arguments and results as in `kda`."""
    batch, tokens, _, key_dim = q_BTHK.shape
    lengths = document_lengths(batch, tokens, seq_lens)
    scale = key_dim**-0.5 if scale is None else scale
    inputs = [at_least_fp32(x) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)]
    if seq_lens is None:
        out, state = _recur(inputs, scale, initial_state)
        return out.to(v_BTHV.dtype), state
    documents = zip(*(x.split(lengths, dim=1) for x in inputs))
    initial = [None] * len(lengths) if initial_state is None else initial_state.split(1)
    results = [_recur(document, scale, state) for document, state in zip(documents, initial)]
    out = torch.cat([out for out, _ in results], dim=1)
    return out.to(v_BTHV.dtype), torch.cat([state for _, state in results])


def _recur(inputs: Sequence[Tensor], scale: float, state: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = inputs
    batch, tokens, heads, key_dim = k.shape
    state = k.new_zeros(batch, heads, key_dim, v.shape[-1]) if state is None else state.to(k.dtype)
    out = []
    for t in range(tokens):
        o, state = _advance(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, scale)
        out.append(o)
    return torch.stack(out, dim=1), state


def _advance(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    decayed = g.exp().unsqueeze(-1) * state
    surprise = v - (k.unsqueeze(-1) * decayed).sum(-2)
    state = decayed + (beta.unsqueeze(-1) * k).unsqueeze(-1) * surprise.unsqueeze(-2)
    return scale * (q.unsqueeze(-1) * state).sum(-2), state


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
    """KDA over whole sequences by the kernels of `ops/backend.py`. -> (o [B, T, H, V] in v's dtype, final state).

    q, k come L2-normalised; g is the log-decay (<= 0); `scale` (default K**-0.5) multiplies q. Any T >= 1. With
    `seq_lens` the batch is one packed row, and every document has its own initial and final state [M, H, K, V].
    Everything inside is float32 (float64 for float64 inputs), also under autocast. Each document's numbers depend, to
    the bit, on that document alone. Raises ValueError where `seq_lens` and the shapes disagree.
    """
    which = kernels()
    if which == "naive":
        form = kda_recurrent
    else:
        form = native.kda if which == "native" and native.takes(q_BTHK, v_BTHV) else kda_chunk
    return form(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, scale=scale, initial_state=initial_state, seq_lens=seq_lens)


def kda_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One decoded token of each sequence: (o [B, H, V] in v's dtype, new state). The given state is left as it was."""
    scale = q_BHK.shape[-1] ** -0.5 if scale is None else scale
    inputs = q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_BHKV
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if kernels() == "native" and native.takes(q_BHK, v_BHV) and not is_learning:
        o_BHV, state = native.kda_step(inputs[:5], state_BHKV, scale)
    else:
        o_BHV, state = _advance(*(at_least_fp32(x) for x in inputs), scale=scale)
    return o_BHV.to(v_BHV.dtype), state
