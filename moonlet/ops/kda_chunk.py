"""KDA in chunks of 16 tokens with an exact, recomputing backward (k3_system.md 1.2, chunkwise form).

Inside a chunk, with G_i = g_0 + ... + g_i for each key channel and S the state before the chunk:

    A_ij = scale * sum_d q_id k_jd exp(G_id - G_jd)   (j <= i)         P_ij = sum_d k_id k_jd exp(G_id - G_jd)   (j < i)
    x_i  = v_i - (k_i exp(G_i)) S                                      (I + Diag(beta) P) u = Diag(beta) x
    o_i  = scale * (q_i exp(G_i)) S + sum_j A_ij u_j
    S'   = Diag(exp G_15) S + sum_j (k_j exp(G_15 - G_j))^T u_j

exp(G_i - G_j) is split into exp(G_i - G_m) exp(G_m - G_j) around the middle token m, so that A and P are dense
products; with g >= -5 no exponent leaves [-40, 40]. Chunks that decay faster than that (softplus gate) take A and P from the
pairs themselves (`_pairwise_tiles`): every form is exact and none clamps.

Documents of different lengths run side by side. Chunks are rows, ordered by their place in the document and then by the
document's length, longest first: the documents that still have a chunk at place c are a prefix, and one loop over c is
enough. The states of `SEGMENT_ROWS` rows at a time are in memory; the backward rebuilds them from the segment's first.

Row-level shapes: R = chunk rows x heads, C = 16 tokens, K key dim, V value dim, M documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonlet.ops.documents import document_lengths
from moonlet.ops.rms_norm import at_least_fp32

CHUNK = 16
MIDDLE = 7
SEGMENT_ROWS = 512  # chunks whose states are held at once: 512 * H * K * V numbers
SAFE_EXPONENT = 44.0  # exp(44)^2 * K stays far below the float32 maximum


@dataclass(frozen=True)
class _Segment:
    """Chunk rows of consecutive places: where their tokens are, and how many documents are active at each place."""

    token_of_slot: Tensor  # [rows * C]; padding slots point behind the last token
    last_slot: Tensor  # [rows], the last slot of each row that holds a token
    active: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    segments: tuple[_Segment, ...]
    order: Tensor  # [M] documents, longest first
    inverse: Tensor  # [M]


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...], device: torch.device) -> _Plan:
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    segments, first_tokens, ends, active = [], [], [], []
    for place in range(-(-max(lengths) // CHUNK)):
        live = [document for document in order if lengths[document] > place * CHUNK]
        if active and len(first_tokens) + len(live) > SEGMENT_ROWS:
            segments.append(_segment(first_tokens, ends, active, starts[-1], device))
            first_tokens, ends, active = [], [], []
        first_tokens += [starts[document] + place * CHUNK for document in live]
        ends += [starts[document] + lengths[document] for document in live]
        active.append(len(live))
    segments.append(_segment(first_tokens, ends, active, starts[-1], device))
    order_M = torch.tensor(order, device=device)
    return _Plan(tuple(segments), order_M, order_M.argsort())


def _segment(first_tokens: list[int], ends: list[int], active: list[int], num_tokens: int, device: Any) -> _Segment:
    tokens = torch.tensor(first_tokens).unsqueeze(1) + torch.arange(CHUNK)
    is_token = tokens < torch.tensor(ends).unsqueeze(1)
    slots = torch.where(is_token, tokens, num_tokens).flatten()
    return _Segment(slots.to(device), (is_token.sum(1) - 1).to(device), tuple(active))


def kda_chunk(
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
    """`kda` with torch operations on any device. Arguments and results as in `ops/kda.py`."""
    batch, tokens, heads, key_dim = q_BTHK.shape
    plan = _plan(document_lengths(batch, tokens, seq_lens), q_BTHK.device)
    inputs = [at_least_fp32(x).flatten(0, 1) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)]
    shape = len(plan.order), heads, key_dim, v_BTHV.shape[-1]
    initial = inputs[0].new_zeros(shape) if initial_state is None else initial_state.to(inputs[0].dtype)
    scale = key_dim**-0.5 if scale is None else scale
    out, final = _ChunkedKDA.apply(*inputs, initial, scale, plan)
    return out.view_as(v_BTHV).to(v_BTHV.dtype), final


class _ChunkedKDA(torch.autograd.Function):
    """Inputs flattened to [N, H, *]; the states of the documents before each segment are all that is kept."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, initial, scale, plan = arguments
        state = initial[plan.order].flatten(0, 1)
        out = v.new_empty(len(v) + 1, *v.shape[1:])
        checkpoints = []
        with torch.autocast(q.device.type, enabled=False):
            for segment in plan.segments:
                checkpoints.append(state.clone())
                chunks = _prepare(segment, (q, k, v, g, beta), scale)
                trace = _run_states(chunks, segment.active, state, keep_states=False)
                o = torch.baddbmm(trace.from_state, chunks.A, trace.u)
                out.index_copy_(0, segment.token_of_slot, _to_slots(o, v.shape[1]))
        ctx.save_for_backward(q, k, v, g, beta, *checkpoints)
        ctx.scale, ctx.plan = scale, plan
        return out[: len(v)], state.view_as(initial)[plan.inverse]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: recomputation refuses a second look
        inputs, checkpoints = saved[:5], saved[5:]
        plan, (d_out, d_final) = ctx.plan, grads
        d_state = d_final[plan.order].flatten(0, 1)
        d_inputs = [x.new_empty(len(x) + 1, *x.shape[1:]) for x in inputs]
        with torch.autocast(d_out.device.type, enabled=False):
            for segment, state in zip(reversed(plan.segments), reversed(checkpoints)):
                chunks = _prepare(segment, inputs, ctx.scale)
                trace = _run_states(chunks, segment.active, state.clone(), keep_states=True)
                d_o = _to_rows(d_out, segment.token_of_slot)
                for d_input, rows in zip(d_inputs, _backward_rows(chunks, trace, segment, d_o, d_state)):
                    d_input.index_copy_(
                        0, segment.token_of_slot, _to_slots(rows, d_out.shape[1]).view(-1, *d_input.shape[1:])
                    )
        return *(d[:-1] for d in d_inputs), d_state.view_as(d_final)[plan.inverse], None, None


def _to_rows(x_NHD: Tensor, token_of_slot: Tensor) -> Tensor:
    """[N, H, D] -> [R, C, D], zeros in padding slots."""
    padded = torch.cat([x_NHD, x_NHD.new_zeros(1, *x_NHD.shape[1:])])
    slots = padded.index_select(0, token_of_slot).unflatten(0, (-1, CHUNK))
    return slots.transpose(1, 2).flatten(0, 1).contiguous()


def _to_slots(rows_RCD: Tensor, heads: int) -> Tensor:
    """[R, C, D] -> [rows * C, H, D]."""
    return rows_RCD.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)


class _Chunks(NamedTuple):
    """What a chunk knows without the state, [R, C, *]; q carries the scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [R, C, 1]
    rise: Tensor  # exp(G_i - G_m); 1 in pairwise rows
    fall: Tensor  # exp(G_m - G_i); 1 in pairwise rows
    kq_decayed: Tensor  # [R, 2C, K]: k exp(G_i), then q exp(G_i)
    k_ahead: Tensor  # k exp(G_15 - G_i)
    decay: Tensor  # exp(G_15), [R, K, 1]
    before: Tensor  # exp(G_i)
    after: Tensor  # exp(G_15 - G_i)
    A: Tensor  # [R, C, C]
    P: Tensor  # [R, C, C]
    inverse: Tensor  # (I + Diag(beta) P)^-1
    pairwise: Tensor | None  # rows whose tiles come from pairs
    g: Tensor
    scale: float


def _prepare(segment: _Segment, inputs: Sequence[Tensor], scale: float) -> _Chunks:
    q, k, v, g = (_to_rows(x, segment.token_of_slot) for x in inputs[:4])
    beta = _to_rows(inputs[4].unsqueeze(-1), segment.token_of_slot)
    q = q * scale
    decays = _decays(g)
    k_rise, k_fall = k * decays.rise, k * decays.fall
    P = torch.bmm(k_rise, k_fall.mT).tril_(-1)
    A = torch.bmm(q * decays.rise, k_fall.mT).tril_()
    if decays.pairwise is not None:
        rows = decays.pairwise
        A[rows], P[rows] = _pairwise_tiles(q[rows], k[rows], g[rows])
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand_as(P)
    # Substitution, not a Neumann series: with repeated keys the powers of P reach 2^15 and cancel.
    inverse = torch.linalg.solve_triangular(beta * P, identity, upper=False, unitriangular=True)
    kq_decayed = torch.cat([k * decays.before, q * decays.before], dim=1)
    return _Chunks(
        q=q, k=k, v=v, beta=beta, rise=decays.rise, fall=decays.fall, kq_decayed=kq_decayed, k_ahead=k * decays.after,
        decay=decays.before[:, -1].unsqueeze(-1), before=decays.before, after=decays.after, A=A, P=P, inverse=inverse,
        pairwise=decays.pairwise, g=g, scale=scale,
    )  # fmt: skip


class _Decays(NamedTuple):
    rise: Tensor
    fall: Tensor
    before: Tensor
    after: Tensor
    pairwise: Tensor | None


def _decays(g_RCK: Tensor) -> _Decays:
    # G_i - G_m summed outwards from the middle: half the rounding of a difference of two long sums.
    sums = torch.ones(CHUNK, CHUNK, dtype=g_RCK.dtype, device=g_RCK.device).tril()
    from_middle = torch.matmul(sums - sums[MIDDLE], g_RCK)
    rise = from_middle.exp()
    fall = rise.reciprocal()
    before = rise * g_RCK[:, : MIDDLE + 1].sum(1, keepdim=True).exp()
    after = fall * rise[:, -1:]
    is_pairwise = (from_middle.abs() > SAFE_EXPONENT).any(-1).any(-1)
    if not bool(is_pairwise.any()):
        return _Decays(rise, fall, before, after, None)
    rows = is_pairwise.nonzero().squeeze(1)
    rise[rows], fall[rows] = 1.0, 1.0
    before[rows] = torch.matmul(sums, g_RCK[rows]).exp()
    after[rows] = torch.matmul(sums.T - torch.eye(CHUNK, dtype=sums.dtype, device=sums.device), g_RCK[rows]).exp()
    return _Decays(rise, fall, before, after, rows)


def _pairwise_tiles(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A and P of rows with any decay: tokens at distance 0, 1, ..., 15, each exponent a sum of the g between them."""
    A, P = (q.new_zeros(len(q), CHUNK, CHUNK) for _ in range(2))
    window = torch.zeros_like(g)
    for distance in range(CHUNK):
        later, earlier = slice(distance, None), slice(0, CHUNK - distance)
        if distance:
            window = window[:, 1:] + g[:, 1 : CHUNK - distance + 1]
        weighted = k[:, earlier] * window.exp()
        A.diagonal(-distance, 1, 2).copy_((q[:, later] * weighted).sum(-1))
        if distance:
            P.diagonal(-distance, 1, 2).copy_((k[:, later] * weighted).sum(-1))
    return A, P


class _Trace(NamedTuple):
    """What the loop over chunks leaves behind, [R, C, V]; states [R, K, V] before each chunk, where kept."""

    x: Tensor
    u: Tensor
    from_state: Tensor
    states: Tensor | None


def _run_states(chunks: _Chunks, active: Sequence[int], state: Tensor, keep_states: bool) -> _Trace:
    """Walk the chunks in order; `state` [M * H, K, V] is advanced in place."""
    heads = len(chunks.v) // sum(active)
    x, u, from_state = (torch.empty_like(chunks.v) for _ in range(3))
    states = state.new_empty(len(x), *state.shape[1:]) if keep_states else None
    solve, ahead = chunks.inverse * chunks.beta.mT, chunks.k_ahead.mT
    row = 0
    for documents in active:
        rows, S = slice(row, row + documents * heads), state[: documents * heads]
        row = rows.stop
        if states is not None:
            states[rows] = S
        read = torch.bmm(chunks.kq_decayed[rows], S)
        torch.sub(chunks.v[rows], read[:, :CHUNK], out=x[rows])
        from_state[rows] = read[:, CHUNK:]
        torch.bmm(solve[rows], x[rows], out=u[rows])
        S.mul_(chunks.decay[rows]).baddbmm_(ahead[rows], u[rows])
    return _Trace(x, u, from_state, states)


class _StateGrads(NamedTuple):
    """Gradients that the reversed loop finds: of the solution's right side r = beta x, of k_ahead and of decay."""

    d_r: Tensor
    d_ahead: Tensor
    d_decay: Tensor


def _run_states_backward(
    chunks: _Chunks, trace: _Trace, active: Sequence[int], d_o: Tensor, d_state: Tensor
) -> _StateGrads:
    """Walk the chunks backwards; `d_state` [M * H, K, V] is turned in place into the gradient before the segment."""
    assert trace.states is not None
    heads = len(chunks.v) // sum(active)
    d_u = torch.bmm(chunks.A.mT, d_o)
    d_r, d_ahead = torch.empty_like(d_u), torch.empty_like(chunks.k)
    d_decay = chunks.k.new_empty(len(d_u), chunks.k.shape[-1])
    kq_T, inverse_T = chunks.kq_decayed.mT, chunks.inverse.mT
    stop = len(d_u)
    for documents in reversed(active):
        rows, dS = slice(stop - documents * heads, stop), d_state[: documents * heads]
        stop = rows.start
        torch.bmm(inverse_T[rows], torch.baddbmm(d_u[rows], chunks.k_ahead[rows], dS), out=d_r[rows])
        torch.bmm(trace.u[rows], dS.mT, out=d_ahead[rows])
        torch.sum(dS * trace.states[rows], -1, out=d_decay[rows])
        through_x = torch.cat([d_r[rows] * -chunks.beta[rows], d_o[rows]], dim=1)
        dS.mul_(chunks.decay[rows]).baddbmm_(kq_T[rows], through_x)
    return _StateGrads(d_r, d_ahead, d_decay)


def _backward_rows(
    chunks: _Chunks, trace: _Trace, segment: _Segment, d_o: Tensor, d_state: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta as rows; `d_state` becomes the gradient of the segment's initial state."""
    assert trace.states is not None
    grads = _run_states_backward(chunks, trace, segment.active, d_o, d_state)
    d_v = chunks.beta * grads.d_r
    d_A = torch.bmm(d_o, trace.u.mT).tril_()
    d_solved = torch.bmm(grads.d_r, trace.u.mT).tril_(-1)
    d_beta = (grads.d_r * trace.x).sum(-1, keepdim=True) - (d_solved * chunks.P).sum(-1, keepdim=True)
    d_P = d_solved.mul_(-chunks.beta)
    # The diagonal of A has no decay in it: keep it out of the gate's gradient, where it would only cancel.
    diagonal = d_A.diagonal(0, 1, 2).unsqueeze(-1).clone()
    d_A.tril_(-1)
    d_q, d_k_late, d_k_early = _tile_grads(chunks, d_A, d_P)
    d_kq = torch.bmm(torch.cat([-d_v, d_o], dim=1), trace.states.mT)
    d_k_late.addcmul_(d_kq[:, :CHUNK], chunks.before)
    d_q.addcmul_(d_kq[:, CHUNK:], chunks.before)
    last_slot = segment.last_slot.repeat_interleave(d_o.shape[0] // len(segment.last_slot))
    d_g = _gate_grad(chunks, grads, d_q, (d_k_late, d_k_early), last_slot)
    d_k = torch.addcmul(d_k_late + d_k_early, grads.d_ahead, chunks.after).addcmul_(diagonal, chunks.q)
    d_q = d_q.addcmul_(diagonal, chunks.k).mul_(chunks.scale)
    return d_q, d_k, d_v, d_g, d_beta


def _tile_grads(chunks: _Chunks, d_A: Tensor, d_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through A and P (strictly lower): of q, of k as the later and as the earlier token of a pair."""
    k_fall = chunks.k * chunks.fall
    d_q = torch.bmm(d_A, k_fall).mul_(chunks.rise)
    d_late = torch.bmm(d_P, k_fall).mul_(chunks.rise)
    d_early = torch.bmm(d_A.mT, chunks.q * chunks.rise)
    d_early = torch.baddbmm(d_early, d_P.mT, chunks.k * chunks.rise).mul_(chunks.fall)
    if chunks.pairwise is not None:
        rows = chunks.pairwise
        tiles = d_A[rows], d_P[rows]
        d_q[rows], d_late[rows], d_early[rows] = _pairwise_grads(chunks.q[rows], chunks.k[rows], chunks.g[rows], *tiles)
    return d_q, d_late, d_early


def _pairwise_grads(q: Tensor, k: Tensor, g: Tensor, d_A: Tensor, d_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_late, d_early = (torch.zeros_like(k) for _ in range(3))
    window = torch.zeros_like(g)
    for distance in range(1, CHUNK):
        later, earlier = slice(distance, None), slice(0, CHUNK - distance)
        window = window[:, 1:] + g[:, 1 : CHUNK - distance + 1]
        decay = window.exp()
        to_A, to_P = (d.diagonal(-distance, 1, 2).unsqueeze(-1) for d in (d_A, d_P))
        weighted = k[:, earlier] * decay
        d_q[:, later].addcmul_(to_A, weighted)
        d_late[:, later].addcmul_(to_P, weighted)
        d_early[:, earlier] += (to_A * q[:, later] + to_P * k[:, later]) * decay
    return d_q, d_late, d_early


def _gate_grad(
    chunks: _Chunks, grads: _StateGrads, d_q: Tensor, d_k: tuple[Tensor, Tensor], last_slot_R: Tensor
) -> Tensor:
    """G_i gains q.dq and k.dk of token i as the later one of a pair, and loses k.dk as the earlier one."""
    d_late, d_early = d_k
    ahead = chunks.k_ahead * grads.d_ahead
    last = last_slot_R.view(-1, 1, 1).expand(-1, 1, ahead.shape[-1])
    # No decay lies between the last token and the end of the chunk: it would enter with both signs.
    ahead.scatter_(1, last, 0.0)
    d_G = torch.addcmul(chunks.q * d_q, chunks.k, d_late - d_early).sub_(ahead)
    through_end = ahead.sum(1) + grads.d_decay * chunks.decay.squeeze(-1)
    d_G.scatter_add_(1, last, through_end.unsqueeze(1))
    reverse_sum = torch.ones(CHUNK, CHUNK, dtype=d_G.dtype, device=d_G.device).triu()
    return torch.matmul(reverse_sum, d_G)
