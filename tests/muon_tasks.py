"""Muon on several ranks: FSDP2 shards and shared work. Functions that a spawned process can import by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moonlet.optim.per_head_muon import PerHeadMuon, WorkShare
from moonlet.optim.sharded import gathered
from moonlet.parallel.ranks import Ranks

# Three heads of five rows: with two ranks the shard border (row 8 of 15) cuts the second head.
HEAD_ROWS = {"heads.weight": (5, 5, 5), "plain.weight": (7,), "stack": (3, 3)}


class Projections(nn.Module):
    """A projection with heads, a plain matrix and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.plain = nn.Linear(6, 15, bias=False), nn.Linear(15, 7, bias=False)
        self.stack = nn.Parameter(torch.empty(3, 6, 7))
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eoi->beo", torch.tanh(self.plain(torch.tanh(self.heads(x)))), self.stack)


def three_muon_steps(model: nn.Module, share: WorkShare | None = None) -> dict[str, torch.Tensor]:
    """Weights after three steps on the same data everywhere."""
    muon = PerHeadMuon(dict(model.named_parameters()), HEAD_ROWS, share=share)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        muon.step(0.05)
    return {name: gathered(p).detach() for name, p in model.named_parameters()}


def muon_on_shards(ranks: Ranks, folder: Path) -> None:
    model = Projections()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.num_ranks,)))
    weights = three_muon_steps(model)
    if ranks.is_first:
        torch.save(weights, folder / "sharded.pt")
    share = WorkShare(ranks.rank, ranks.num_ranks, ranks.sum_)
    torch.save(three_muon_steps(Projections(), share), folder / f"shared_{ranks.rank}.pt")
