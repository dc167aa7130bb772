"""Muon and AdamW together: what a step does, and state that is found again by name."""

import pytest
import torch
from torch import nn

from moonlet.config import OptimConfig
from moonlet.errors import CheckpointError
from moonlet.optim.optimizers import Optimizers


class Small(nn.Module):
    """Two matrices, an embedding and norms; `order` turns their order round, `extra` adds a parameter."""

    def __init__(self, order: int = 1, extra: bool = False, width: int = 6) -> None:
        super().__init__()
        parts = {"embed_tokens": nn.Embedding(5, 4), "up": nn.Linear(4, width), "norm": nn.LayerNorm(width)}
        if extra:
            parts["late"] = nn.Linear(width, 2, bias=False)
        for name, module in list(parts.items())[::order]:
            self.add_module(name, module)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in sorted(self.named_parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=random))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(self.embed_tokens(ids)).tanh())


def train(model: Small, optimizers: Optimizers, steps: int = 3) -> None:
    for step in range(steps):
        model.zero_grad()
        model(torch.tensor([0, 1, 2, 3])).pow(3).sum().backward()
        optimizers.step(1.0 / (step + 1))


def copied(optimizers: Optimizers) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in optimizers.state_tensors().items()}


def test_state_is_keyed_by_name_and_survives_reordering():
    """B37: groups in another order load, and training goes on bit for bit."""
    model = Small()
    optimizers = Optimizers(model, OptimConfig())
    train(model, optimizers)
    other = Small(order=-1)
    other.load_state_dict(model.state_dict())
    loaded = Optimizers(other, OptimConfig())
    loaded.load_state_tensors(dict(reversed(copied(optimizers).items())))
    train(model, optimizers)
    train(other, loaded)
    weights = dict(other.named_parameters())
    assert list(weights) != [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Small(extra=True), {}, "no state for 'late.weight'.*--reset-optimizer"),
        (Small(), {"groups": {"up.weight": "adamw"}}, "no state for 'up.weight'.*--reset-optimizer"),
        (Small(width=7), {}, "shape .*--reset-optimizer"),
    ],
)
def test_state_that_does_not_fit_is_an_error_that_names_it(model: Small, options: dict, message: str):
    saved = copied(Optimizers(Small(), OptimConfig()))
    optimizers = Optimizers(model, OptimConfig.parse(options))
    before = copied(optimizers)
    with pytest.raises(CheckpointError, match=message):
        optimizers.load_state_tensors(saved)
    assert all(torch.equal(before[key], value) for key, value in optimizers.state_tensors().items())


def test_state_of_a_parameter_that_is_gone():
    saved = copied(Optimizers(Small(extra=True), OptimConfig()))
    with pytest.raises(CheckpointError, match=r"'late.weight' that nothing uses.*--reset-optimizer"):
        Optimizers(Small(), OptimConfig()).load_state_tensors(saved)


def test_reset_starts_afresh():
    model = Small()
    optimizers = Optimizers(model, OptimConfig())
    before = copied(optimizers)
    train(model, optimizers)
    assert any(not torch.equal(before[key], value) for key, value in optimizers.state_tensors().items())
    optimizers.reset()
    assert all(torch.equal(before[key], value) for key, value in optimizers.state_tensors().items())


def test_only_matrices_decay():
    model = Small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = Optimizers(model, OptimConfig(muon_lr=0.1, adam_lr=0.01, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    factors = {"up.weight": 1 - 0.5 * 0.1 * 0.5, "embed_tokens.weight": 1 - 0.5 * 0.01 * 0.5}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * factors.get(name, 1.0))


def test_adamw_equals_its_formula():
    model = Small()
    optimizers = Optimizers(model, OptimConfig(adam_lr=0.01, adam_betas=(0.8, 0.9), adam_eps=1e-8, weight_decay=0.0))
    weight, m, v = model.norm.weight.detach().clone(), torch.zeros(6), torch.zeros(6)
    for step, grad in enumerate(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), 1):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.norm.weight.grad = grad
        optimizers.step(1.0)
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        weight -= 0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
    torch.testing.assert_close(model.norm.weight.detach(), weight)
