"""Released-style tensors into any of our modules: experts are stacked here, everything else keeps its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill every parameter and buffer; a tensor too many or too few is a failure of the test."""
    used: set[str] = set()

    def take(name: str) -> Tensor:
        used.add(name)
        return tensors[name]

    for name, target in module.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "w13":
            for expert, rows in enumerate(target):
                rows.copy_(torch.cat([take(f"{stem}.{expert}.{part}.weight") for part in ("w1", "w3")]))
        elif leaf == "w2":
            for expert, rows in enumerate(target):
                rows.copy_(take(f"{stem}.{expert}.w2.weight"))
        else:
            target.copy_(take(name))
    assert used == set(tensors), f"not used: {sorted(set(tensors) - used)}"
