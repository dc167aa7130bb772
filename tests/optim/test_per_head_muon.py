"""Per-Head Muon: blocks, scale, momentum, stacks, shards, and work shared among ranks."""

import math
from pathlib import Path

import pytest
import torch
from muon_tasks import Projections, muon_on_shards, three_muon_steps
from torch import nn

from moonlet.ops.newton_schulz import newton_schulz, polar
from moonlet.optim.per_head_muon import PerHeadMuon, update_scale
from moonlet.parallel.ranks import spawn_ranks


def one_step(grad: torch.Tensor, block_rows: tuple[int, ...], orthogonalise=polar, **options: float) -> torch.Tensor:
    """Direction that a first step with learning rate 1 takes from zero weights, in the sign of the gradient."""
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    muon = PerHeadMuon({"w": parameter}, {"w": block_rows}, orthogonalise=orthogonalise, **options)
    muon.step(1.0)
    return -parameter.detach()


def uneven_heads() -> torch.Tensor:
    """An 8 x 6 gradient of two heads, the first ten times as large."""
    grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    grad[:4] *= 10
    return grad


def test_each_head_gets_its_full_update():
    """B36: by head both updates have Frobenius norm 2 = sqrt(rank 4); as one matrix the weak head gets less."""
    heads = one_step(uneven_heads(), (4, 4)).view(2, 4, 6) / update_scale(4, 6)
    torch.testing.assert_close(heads.norm(dim=(1, 2)), torch.tensor([2.0, 2.0]))
    whole = one_step(uneven_heads(), (8,)).view(2, 4, 6) / update_scale(8, 6)
    assert whole[1].norm() < 1.8
    assert update_scale(8, 6) == pytest.approx(0.5657, abs=1e-4)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (16, 16), (3, 40)])
def test_entries_of_an_update_have_a_fixed_size(shape: tuple[int, int]):
    update = one_step(torch.randn(shape, generator=torch.Generator().manual_seed(0)), (shape[0],))
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-4)


@pytest.mark.parametrize("block_rows", [(6,), (3, 3), (2, 4), (1, 2, 3)])
def test_a_stack_is_a_loop_over_its_matrices(block_rows: tuple[int, ...]):
    """B35: expert stacks are orthogonalised expert by expert, in as many blocks as they have."""
    grad = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0))
    update = one_step(grad, block_rows, newton_schulz)
    for expert, matrix in zip(update, grad):
        parts = [update_scale(len(rows), 7) * newton_schulz(rows) for rows in matrix.split(block_rows)]
        torch.testing.assert_close(expert, torch.cat(parts), atol=2e-6, rtol=0)


def test_many_parameters_of_many_shapes_are_each_treated_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moonlet.optim.per_head_muon._CHUNK_NUMBERS", 100)  # several chunks, some cut inside a stack
    shapes = {"a": (6, 8), "b": (8, 6), "c": (7, 6, 8), "d": (12, 8), "e": (5, 5), "f": (3, 12, 8)}
    rows = {"a": (6,), "b": (8,), "c": (6,), "d": (6, 6), "e": (5,), "f": (4, 8)}
    random = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    PerHeadMuon(parameters, rows, orthogonalise=polar).step(1.0)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(-parameter.detach(), one_step(parameter.grad, rows[name]), atol=1e-5, rtol=0)


def test_nesterov_momentum_and_decoupled_decay():
    parameter = nn.Parameter(torch.eye(3))
    muon = PerHeadMuon({"w": parameter}, {"w": (3,)}, momentum=0.5, weight_decay=0.1, orthogonalise=polar)
    first, second = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    scale, expected = 0.2 * math.sqrt(3), torch.eye(3)
    for grad, direction in ((first, 1.5 * first), (second, second + 0.5 * (second + 0.5 * first))):
        parameter.grad = grad
        muon.step(0.01)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * scale * polar(direction)
        torch.testing.assert_close(parameter.detach(), expected)


def test_no_gradient_no_change_and_zero_gradient_only_decay():
    still, decayed = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    decayed.grad = torch.zeros(2, 2)
    PerHeadMuon({"a": still, "b": decayed}, {"a": (2,), "b": (2,)}, weight_decay=0.5).step(0.1)
    assert torch.equal(still, torch.ones(2, 2))
    torch.testing.assert_close(decayed.detach(), torch.full((2, 2), 0.95))


def test_two_ranks_equal_one(tmp_path: Path):
    """B34: FSDP2 shards whose borders cut heads, and the orthogonalisation shared among ranks."""
    spawn_ranks(muon_on_shards, 2, (tmp_path,))
    alone = three_muon_steps(Projections())
    sharded = torch.load(tmp_path / "sharded.pt")
    for name, weight in alone.items():
        torch.testing.assert_close(sharded[name], weight, atol=1e-5, rtol=0)
        assert not torch.equal(weight, dict(Projections().named_parameters())[name])
        for rank in range(2):
            assert torch.equal(torch.load(tmp_path / f"shared_{rank}.pt")[name], weight)
