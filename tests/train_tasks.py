"""Train steps on several ranks, for tests: functions that a spawned process can import by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from moonlet.config import RunConfig
from moonlet.data.batches import BatchStream, Row
from moonlet.data.corpus import Corpus
from moonlet.errors import NonFiniteError
from moonlet.parallel.ranks import Ranks
from moonlet.train.pretrain import build_parts
from moonlet.train.step import Parts, StepResult, train_step


def first_rows(config: RunConfig, corpus_folder: Path) -> list[Row]:
    """The rows of the first step, one of them with padding at its end."""
    rows = BatchStream(Corpus(corpus_folder), config.stages[0], config.seed).next_rows()
    return [*rows[:2], padded(rows[2], 10, config.model.pad_token_id), *rows[3:]]


def padded(row: Row, count: int, pad_id: int) -> Row:
    """`row` with its last `count` tokens replaced by a padding document."""
    ids, mask, keep = row.ids.copy(), row.loss_mask.copy(), len(row.ids) - count
    ids[keep:], mask[keep:] = pad_id, False
    lengths, room = [], keep
    for length in row.seq_lens:
        lengths += [min(length, room)] if room else []
        room -= lengths[-1] if room else 0
    return replace(row, ids=ids, loss_mask=mask, seq_lens=(*lengths, count))


def observed(parts: Parts, result: StepResult) -> dict[str, torch.Tensor]:
    """Gradients, router biases, loads and loss after a step, as one table."""
    gradients = {f"grad {name}": p.grad for name, p in parts.model.named_parameters() if p.grad is not None}
    routers = parts.model.routers()
    biases = {f"bias {name}": router.e_score_correction_bias for name, router in routers.items()}
    loads = {f"load {name}": load for name, load in result.loads.items()}
    return {**gradients, **biases, **loads, "loss": torch.tensor(result.loss)}


def step_on_ranks(ranks: Ranks, config: RunConfig, corpus_folder: Path, out: Path) -> None:
    """A step with one row for all ranks; an ordinary step; then one in which the last rank's rows give NaN."""
    rows = first_rows(config, corpus_folder)
    parts = build_parts(config, ranks)
    torch.save(observed(parts, train_step(parts, rows[:1], 1, 1.0)), out / f"one_row_{ranks.rank}.pt")
    parts = build_parts(config, ranks)
    result = train_step(parts, rows, 1, 1.0)
    torch.save(observed(parts, result), out / f"step_{ranks.rank}.pt")
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    poison_token(parts, int(rows[-1].ids[0]))
    poisoned = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    try:
        train_step(parts, rows, 2, 1.0)
        message = "no error"
    except NonFiniteError as error:
        message = str(error)
    same = all(
        torch.equal(tensor.nan_to_num(), poisoned[name].nan_to_num())
        for name, tensor in parts.model.state_dict().items()
    )
    assert before.keys() == poisoned.keys()
    torch.save((message, same), out / f"nan_{ranks.rank}.pt")


@torch.no_grad()
def poison_token(parts: Parts, token: int) -> None:
    """Make the embedding of one token infinite: whichever row reads it gives NaN."""
    parts.model.model.embed_tokens.weight[token] = torch.inf
