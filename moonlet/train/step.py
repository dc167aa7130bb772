"""One optimiser step of data-parallel training, from rows to new weights.

The loss is a sum over tokens, divided once by the number of valid tokens of the whole step: all ranks, all
micro-batches. So how the rows are cut changes nothing but rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.config import RunConfig
from moonlet.data.batches import IGNORE, PackedBatch, Row, labels, pack_rows
from moonlet.errors import NonFiniteError
from moonlet.model.k3 import K3
from moonlet.ops.cross_entropy import linear_cross_entropy
from moonlet.optim.optimizers import Optimizers
from moonlet.optim.qk_clip import LogitTracker
from moonlet.parallel.ranks import Ranks


@dataclass(frozen=True)
class Parts:
    """What a step works with. `dtype` is that of the products and of what flows between layers; weights, gradients and
    optimiser states are float32."""

    model: K3
    optimizers: Optimizers
    tracker: LogitTracker
    ranks: Ranks
    config: RunConfig
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks.

    Attributes:
        loss: mean over valid tokens, nats.
        grad_norm: before clipping; `grad_norms` has it by parameter.
        loads: router -> tokens that each expert got, [E].
        max_logit: largest attention logit of Gated MLA, where it was looked for.
    """

    loss: float
    grad_norm: float
    grad_norms: dict[str, float]
    loads: dict[str, Tensor]
    max_logit: float | None


def train_step(parts: Parts, rows: Sequence[Row], step: int, scale: float, look_closer: bool = False) -> StepResult:
    """Train on `rows`, which every rank has in full, at `scale` times the peak learning rates.

    Args:
        step: number of this step, for messages.
        look_closer: also find the exact largest attention logit.
    Raises:
        NonFiniteError: the loss or a gradient is NaN or infinite; no weight, bias or state was changed.
    """
    model, ranks, optim = parts.model, parts.ranks, parts.config.optim
    # ------------------------------------------------------------------------------------------------------------------
    micro_batches = cut_rows(rows, ranks, parts.config.train.micro_batch_tokens)
    num_valid = count_valid(rows)
    parts.tracker.start(look_closer or optim.qk_clip_threshold is not None)
    model.train()
    model.zero_grad(set_to_none=True)
    losses = torch.zeros(len(micro_batches) + 1, device=parts.device)
    for index, batch in enumerate(micro_batches):
        losses[index] = forward_backward(parts, batch, num_valid)
        model.collect_routing()
        parts.tracker.observe(-math.inf if look_closer else optim.qk_clip_threshold or math.inf)

    loss, gradients = losses.sum(), all_gradients(model)
    ranks.sum_([loss, *gradients.values()])
    ranks.max_(parts.tracker.maxima)
    norms = torch.stack(torch._foreach_norm(list(gradients.values())))
    if not bool(torch.isfinite(loss) & torch.isfinite(norms).all()):
        raise_non_finite(parts, micro_batches, step, dict(zip(gradients, norms.tolist())))
    grad_norm = float(torch.linalg.vector_norm(norms))
    torch._foreach_mul_(list(gradients.values()), min(1.0, optim.clip_grad_norm / (grad_norm + 1e-6)))

    parts.optimizers.step(scale)
    if optim.qk_clip_threshold is not None:
        parts.tracker.clip(optim.qk_clip_threshold)
    loads = model.update_balance(None if ranks.num_ranks == 1 else ranks.sum_)
    # ------------------------------------------------------------------------------------------------------------------
    parts.tracker.stop()
    return StepResult(float(loss), grad_norm, dict(zip(gradients, norms.tolist())), loads, parts.tracker.largest)


def cut_rows(rows: Sequence[Row], ranks: Ranks, micro_batch_tokens: int) -> list[PackedBatch]:
    """This rank's rows in micro-batches of about `micro_batch_tokens`; none where there are fewer rows than ranks."""
    mine = [rows[index] for index in ranks.share_of(len(rows))]
    size = max(1, micro_batch_tokens // len(rows[0].ids))
    return [pack_rows(mine[start : start + size]) for start in range(0, len(mine), size)]


def count_valid(rows: Sequence[Row]) -> int:
    """Tokens of the whole step that have a label."""
    return max(1, int((labels(pack_rows(rows)) != IGNORE).sum()))


def forward_backward(parts: Parts, batch: PackedBatch, num_valid: int) -> Tensor:
    """Add the gradients of one micro-batch; returns its part of the mean loss."""
    ids, targets = batch.ids.to(parts.device), labels(batch).to(parts.device)
    chunk = parts.config.train.loss_chunk_tokens
    with autocast(parts):
        hidden = parts.model.hidden(ids.unsqueeze(0), seq_lens=batch.seq_lens).squeeze(0)
        loss = linear_cross_entropy(hidden, parts.model.output_weight, targets, chunk) / num_valid
    loss.backward()
    return loss.detach()


def autocast(parts: Parts) -> contextlib.AbstractContextManager[object]:
    if parts.dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(parts.device.type, parts.dtype)


def all_gradients(model: K3) -> dict[str, Tensor]:
    """Gradients by name. A parameter that nothing reached has zeros, so that all ranks hold the same list."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def raise_non_finite(parts: Parts, micro_batches: list[PackedBatch], step: int, norms: dict[str, float]) -> None:
    """Find the culprit by running the micro-batches again one by one, forget what was counted, and raise."""
    first_bad = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    what = f"the gradient of '{first_bad}'" if first_bad else "the loss"
    rank, index = _first_bad_micro_batch(parts, micro_batches)
    for router in parts.model.routers().values():
        router.forget()
    parts.tracker.stop()
    parts.model.zero_grad(set_to_none=True)
    where = "no micro-batch alone" if index is None else f"micro-batch {index} of rank {rank}"
    raise NonFiniteError(
        f"{what} is not finite at step {step} (first seen in {where}); nothing was updated. Resume from the last "
        "checkpoint with lower learning rates (optim.muon_lr, optim.adam_lr) or a lower optim.clip_grad_norm"
    )


def _first_bad_micro_batch(parts: Parts, micro_batches: list[PackedBatch]) -> tuple[int, int | None]:
    """(rank, index), the lowest over all ranks; index None where each is finite alone."""
    bad = math.inf
    for index, batch in enumerate(micro_batches):
        parts.model.zero_grad(set_to_none=True)
        loss = forward_backward(parts, batch, 1)
        norms = torch.stack(torch._foreach_norm(list(all_gradients(parts.model).values())))
        if not bool(torch.isfinite(loss) & torch.isfinite(norms).all()):
            bad = index
            break
    first = torch.tensor([-math.inf] * parts.ranks.num_ranks, dtype=torch.float64, device=parts.device)
    first[parts.ranks.rank] = -bad
    parts.ranks.max_([first])
    found = [(rank, int(-value)) for rank, value in enumerate(first.tolist()) if math.isfinite(value)]
    return found[0] if found else (0, None)
