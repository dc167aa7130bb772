"""Muon and AdamW as one optimiser whose state is keyed by parameter name.

Names survive a reordering of groups and a change of the model's module order; positions do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moonlet.config import OptimConfig
from moonlet.errors import CheckpointError
from moonlet.ops.newton_schulz import newton_schulz
from moonlet.optim.groups import Assignment, assign_groups
from moonlet.optim.per_head_muon import PerHeadMuon, WorkShare
from moonlet.optim.sharded import gathered, local_part, own_part

_ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
_ADVICE = "train with the old groups, or with a fresh state: `moonlet train RECIPE --resume --reset-optimizer`"


class Optimizers:
    """`step(scale)` updates every parameter from its gradient, at `scale` times the peak learning rates.

    Attributes:
        assignments: parameter name -> how it is trained.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, share: WorkShare | None = None) -> None:
        self.config = config
        self.assignments = assign_groups(model, config)
        named = dict(model.named_parameters())
        by_muon = {name: named[name] for name, a in self.assignments.items() if a.group != "adamw"}
        self._adam_parameters = {name: p for name, p in named.items() if name not in by_muon}

        def orthogonalise(matrices: Tensor) -> Tensor:
            return newton_schulz(matrices, config.newton_schulz_steps)

        self.muon = PerHeadMuon(
            by_muon,
            {name: self.assignments[name].block_rows for name in by_muon},
            momentum=config.muon_momentum,
            weight_decay=config.weight_decay,
            orthogonalise=orthogonalise,
            share=share,
        )
        self.adamw = _build_adamw(self._adam_parameters, self.assignments, config)
        self.reset()

    def step(self, scale: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = self.config.adam_lr * scale
        self.adamw.step()
        self.muon.step(self.config.muon_lr * scale)

    def reset(self) -> None:
        """The state before the first step."""
        for buffer in self.muon.buffers.values():
            buffer.zero_()
        for parameter in self._adam_parameters.values():
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.adamw.state[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything to save: 'muon.momentum/NAME' and 'adamw.{exp_avg,exp_avg_sq,step}/NAME'; shards are gathered."""
        return {key: gathered(tensor) for key, tensor in self._state().items()}

    def load_state_tensors(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave, in any order.

        Raises:
            CheckpointError: a parameter has no state or one of another shape, or a state has no parameter; nothing is
                changed then.
        """
        own = self._state()
        if missing := [key for key in own if key not in saved]:
            raise CheckpointError(f"the saved optimiser has no state for {_named(missing)}; {_ADVICE}")
        if extra := [key for key in saved if key not in own]:
            raise CheckpointError(f"the saved optimiser has state for {_named(extra)} that nothing uses; {_ADVICE}")
        for key, tensor in own.items():
            if saved[key].shape != tensor.shape:
                shapes = f"{tuple(saved[key].shape)}, the parameter needs {tuple(tensor.shape)}"
                raise CheckpointError(f"the saved optimiser's state of {_named([key])} has shape {shapes}; {_ADVICE}")
        with torch.no_grad():
            for key, tensor in own.items():
                local_part(tensor).copy_(own_part(saved[key], tensor))

    def _state(self) -> dict[str, Tensor]:
        state = {f"muon.momentum/{name}": buffer for name, buffer in self.muon.buffers.items()}
        for name, parameter in self._adam_parameters.items():
            for part in _ADAM_STATE:
                state[f"adamw.{part}/{name}"] = self.adamw.state[parameter][part]
        return state


def _build_adamw(
    parameters: Mapping[str, nn.Parameter], assignments: Mapping[str, Assignment], config: OptimConfig
) -> torch.optim.AdamW:
    def group(choose: Callable[[Assignment], bool], weight_decay: float) -> dict[str, Any]:
        chosen = [parameter for name, parameter in parameters.items() if choose(assignments[name])]
        return {"params": chosen, "weight_decay": weight_decay}

    groups = [group(lambda a: a.decays, config.weight_decay), group(lambda a: not a.decays, 0.0)]
    return torch.optim.AdamW(groups, lr=config.adam_lr, betas=config.adam_betas, eps=config.adam_eps, fused=True)


def _named(keys: list[str]) -> str:
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
