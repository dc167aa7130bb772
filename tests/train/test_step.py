"""The train step: what micro-batching, ranks and recomputation may not change, and what a NaN may not touch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_tasks import first_rows, observed, poison_token, step_on_ranks

from moonlet.data.batches import IGNORE, Row, labels, pack_rows
from moonlet.errors import NonFiniteError
from moonlet.ops.cross_entropy import linear_cross_entropy_plain
from moonlet.parallel.ranks import Ranks, spawn_ranks
from moonlet.train.step import count_valid, cut_rows, forward_backward, train_step

NO_CLIP = {"clip_grad_norm": 1e9}


def assert_same_step(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Gradients within 1e-6; biases and loads exactly."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.startswith(("grad", "loss")):
            torch.testing.assert_close(
                ours[name], tensor, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert torch.equal(ours[name], tensor), name


@pytest.fixture
def step_with(recipe: Any, parts: Any, corpus_folder: Path) -> Any:
    """`step_with(tokens, **changes)` -> what one step of eight rows showed, with that many tokens in a micro-batch."""

    def run(micro_batch_tokens: int, **train: Any) -> dict[str, torch.Tensor]:
        config = recipe(train={"micro_batch_tokens": micro_batch_tokens, **train}, optim=NO_CLIP)
        built = parts(config)
        return observed(built, train_step(built, first_rows(config, corpus_folder), 1, 1.0))

    return run


def test_micro_batching_changes_nothing(step_with: Any):
    """B38 and B24: 8 micro-batches of one row, 4 of two and 1 of eight."""
    whole = step_with(256)
    assert_same_step(step_with(32), whole)
    assert_same_step(step_with(64), whole)


def test_recomputation_changes_nothing(step_with: Any):
    """B23: with activation checkpointing every token is still counted once."""
    plain = step_with(64)
    assert_same_step(step_with(64, activation_checkpointing=True), plain)


def test_loads_count_every_valid_token_once(step_with: Any, recipe: Any, corpus_folder: Path):
    config = recipe()
    ids = np.concatenate([row.ids for row in first_rows(config, corpus_folder)])
    valid = int((ids != config.model.pad_token_id).sum())
    assert 0 < valid < len(ids), "the rows should hold some padding, else this proves nothing"
    loads = {name: load for name, load in step_with(64).items() if name.startswith("load")}
    assert len(loads) == 3
    assert {int(load.sum()) for load in loads.values()} == {valid * config.model.num_experts_per_token}


def test_two_ranks_equal_one_and_share_a_nan(
    step_with: Any, recipe: Any, parts: Any, corpus_folder: Path, tmp_path: Path
):
    """B38 on ranks, also where one of them has no row; a NaN on one rank stops both, with the weights untouched."""
    config = recipe(train={"micro_batch_tokens": 64}, optim=NO_CLIP)
    spawn_ranks(step_on_ranks, 2, (config, corpus_folder, tmp_path))
    alone, built = step_with(64), parts(config)
    one_row = observed(built, train_step(built, first_rows(config, corpus_folder)[:1], 1, 1.0))
    for rank in range(2):
        assert_same_step(torch.load(tmp_path / f"step_{rank}.pt"), alone)
        assert_same_step(torch.load(tmp_path / f"one_row_{rank}.pt"), one_row)
        message, unchanged = torch.load(tmp_path / f"nan_{rank}.pt")
        assert "not finite at step 2" in message and "nothing was updated" in message
        assert unchanged
    assert torch.load(tmp_path / "nan_0.pt") == torch.load(tmp_path / "nan_1.pt")


def test_gradient_is_that_of_the_mean_over_valid_tokens(recipe: Any, parts: Any, corpus_folder: Path):
    config = recipe(optim=NO_CLIP)
    built, rows = parts(config), first_rows(config, corpus_folder)
    model = copy.deepcopy(built.model)
    result = train_step(built, rows, 1, 1.0)
    batch = pack_rows(rows)
    targets = labels(batch)
    hidden = model.hidden(batch.ids.unsqueeze(0), seq_lens=batch.seq_lens).squeeze(0)
    loss = linear_cross_entropy_plain(hidden, model.output_weight, targets) / (targets != IGNORE).sum()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), abs=1e-6)
    ours = dict(built.model.named_parameters())
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours[name].grad, expected, atol=1e-6, rtol=0)
        assert result.grad_norms[name] == pytest.approx(expected.norm().item(), rel=1e-3, abs=1e-6)


def test_gradients_are_clipped_together(recipe: Any, parts: Any, corpus_folder: Path):
    rows = first_rows(recipe(), corpus_folder)
    free, clipped = parts(optim=NO_CLIP), parts(optim={"clip_grad_norm": 0.1})
    norm = train_step(free, rows, 1, 1.0).grad_norm
    assert train_step(clipped, rows, 1, 1.0).grad_norm == pytest.approx(norm)
    total = torch.stack([p.grad.norm() for p in clipped.model.parameters() if p.grad is not None]).norm()
    assert total.item() == pytest.approx(0.1, rel=1e-4)


def test_one_router_off_leaves_the_others_working(parts: Any, recipe: Any, corpus_folder: Path):
    """B25: three MoE layers, the middle one without balancing."""
    built = parts()
    routers = built.model.routers()
    first, middle, last = routers.values()
    middle.method = "off"
    train_step(built, first_rows(recipe(), corpus_folder), 1, 1.0)
    assert middle.e_score_correction_bias.count_nonzero() == 0
    for router in (first, last):
        assert router.e_score_correction_bias.count_nonzero() > 0
    assert all(router.load_per_expert.sum() == 0 and router.pending is None for router in routers.values())


def test_a_nan_names_its_origin_and_changes_nothing(recipe: Any, parts: Any, corpus_folder: Path):
    config = recipe(train={"micro_batch_tokens": 32})
    built, rows = parts(config), first_rows(config, corpus_folder)
    train_step(built, rows, 1, 1.0)
    unused = next(token for token in range(300) if not any(token in row.ids for row in rows))
    rows[5] = replace(rows[5], ids=np.full_like(rows[5].ids, unused))
    poison_token(built, unused)
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in built.optimizers.state_tensors().items()}
    with pytest.raises(
        NonFiniteError, match=r"gradient of '.*' is not finite at step 7 \(first seen in micro-batch 5 of rank 0"
    ):
        train_step(built, rows, 7, 1.0)
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    assert all(torch.equal(tensor, state[name]) for name, tensor in built.optimizers.state_tensors().items())
    assert all(router.load_per_expert.sum() == 0 for router in built.model.routers().values())


def test_large_attention_logits_are_clipped_after_the_step(recipe: Any, parts: Any, corpus_folder: Path):
    rows = first_rows(recipe(), corpus_folder)
    still = {"muon_lr": 1e-9, "adam_lr": 1e-9}
    free = parts(optim={"qk_clip_threshold": None, **still}, balance={"method": "off"})
    assert train_step(free, rows, 1, 1.0).max_logit is None
    largest = train_step(free, rows, 2, 1.0, look_closer=True).max_logit
    assert largest is not None and largest > 0
    clipped = parts(optim={"qk_clip_threshold": largest / 2, **still}, balance={"method": "off"})
    assert train_step(clipped, rows, 1, 1.0).max_logit == pytest.approx(largest, rel=1e-3)
    assert train_step(clipped, rows, 2, 1.0).max_logit == pytest.approx(largest / 2, rel=1e-2)
    high = parts(optim={"qk_clip_threshold": 1e6})
    assert train_step(high, rows, 1, 1.0).max_logit is None  # the bound was enough


def test_bf16_products_with_float32_weights(recipe: Any, parts: Any, corpus_folder: Path):
    """Autocast as on hardware with bfloat16 products; emulated here, hence tiny."""
    rows = first_rows(recipe(), corpus_folder)
    exact, rounded = parts(), parts(train={"precision": "bf16", "activation_checkpointing": True})
    for step in range(1, 4):
        expected = train_step(exact, rows, step, 1.0, look_closer=True)
        result = train_step(rounded, rows, step, 1.0, look_closer=True)
        assert result.loss == pytest.approx(expected.loss, abs=0.05)
        assert result.max_logit is not None
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}
    assert result.loss != expected.loss


def row(ids: list[int], *seq_lens: int, masked: int = 0) -> Row:
    mask = np.arange(len(ids)) < len(ids) - masked
    return Row(np.array(ids), seq_lens or (len(ids),), mask, ())


def test_rows_are_cut_by_rank_and_micro_batch():
    rows = [row([number] * 4) for number in range(7)]
    taken = [[batch.ids[::4].tolist() for batch in cut_rows(rows, Ranks(rank, 2), 8)] for rank in range(2)]
    assert taken == [[[0, 1], [2]], [[3, 4], [5, 6]]]
    assert [len(cut_rows(rows[:1], Ranks(rank, 2), 8)) for rank in range(2)] == [0, 1]
    assert len(cut_rows(rows, Ranks(), 1)) == 7


def test_valid_tokens_are_counted_by_document():
    assert count_valid([row([1, 2, 3, 4]), row([1, 2, 3, 4], 2, 2), row([1, 2, 3, 4], 3, 1, masked=1)]) == 3 + 2 + 2


def test_a_step_without_any_label_is_no_division_by_zero(recipe: Any, parts: Any):
    built = parts()
    batch = pack_rows([row([1, 2, 3, 4], masked=4)])
    assert forward_backward(built, batch, count_valid([row([1, 2, 3, 4], masked=4)])).item() == 0
