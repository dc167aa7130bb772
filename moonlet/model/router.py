"""The router with Quantile Balancing (k3_model.md section 1, K3 report 2.3.3).

N tokens, E experts, k chosen. A forward pass leaves the routing of its batch in `pending`, overwriting what was there;
`collect` adds it to the step's totals, once per micro-batch and outside of any recomputation. So tokens count once,
whatever the micro-batching or the checkpointing, and a forward pass in eval mode counts nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.ops.quantile_balancing import exact_bias, histogram_bias, required_bias, required_bias_histogram
from moonlet.ops.routing import expert_weights, router_scores, select_experts


class Routing(NamedTuple):
    """Chosen experts and their weights, both [N, k]."""

    indices_NK: Tensor
    weights_NK: Tensor


class _Pending(NamedTuple):
    load_E: Tensor
    required_NE: Tensor


class Router(nn.Module):
    """x [N, D] -> `Routing`."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.k = config.num_experts, config.num_experts_per_token
        self.activation, self.renormalize = config.moe_router_activation_func, config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.num_groups = config.num_expert_group if config.use_grouped_topk else 1
        self.top_groups = config.topk_group
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.method: Literal["histogram", "exact", "off"] = "histogram"
        self.bins = 1000
        self.forget()

    def forget(self) -> None:
        """Drop everything counted since the last update."""
        self.pending: _Pending | None = None
        self.load_per_expert = torch.zeros(self.num_experts, dtype=torch.int64)
        self._histogram: Tensor | None = None
        self._required: list[Tensor] = []

    def forward(self, x_ND: Tensor, valid_N: Tensor | None = None, forced_NK: Tensor | None = None) -> Routing:
        """`valid_N` marks the tokens that count for balancing; `forced_NK` replays given experts (parity tests, RL)."""
        scores = router_scores(x_ND, self.weight, self.activation)
        bias = self.e_score_correction_bias
        selection = select_experts(scores, bias, self.k, self.num_groups, self.top_groups)
        indices = selection.indices_NK if forced_NK is None else forced_NK
        if self.training:
            self.pending = self._observe(scores, selection.cutoff_N, indices, valid_N)
        return Routing(indices, expert_weights(scores, indices, self.renormalize, self.scaling))

    @torch.no_grad()
    def _observe(self, scores: Tensor, cutoff_N: Tensor, indices_NK: Tensor, valid_N: Tensor | None) -> _Pending:
        required = required_bias(scores, cutoff_N)
        if valid_N is not None:
            required, indices_NK = required[valid_N], indices_NK[valid_N]
        return _Pending(torch.bincount(indices_NK.flatten(), minlength=self.num_experts), required)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the last forward pass of this step to the totals. Call it once per micro-batch, after its backward."""
        if self.pending is None:
            return
        load, required = self.pending
        self.pending = None
        self.load_per_expert = self.load_per_expert.to(load.device) + load
        if self.method == "histogram":
            counts = required_bias_histogram(required, self.e_score_correction_bias, self.bins)
            self._histogram = counts if self._histogram is None else self._histogram + counts
        elif self.method == "exact":
            self._required.append(required)

    def totals(self) -> list[Tensor]:
        """The counts of this step that add up over ranks; the caller may sum them in place before `update`.

        Raises:
            ValueError: `method` is 'exact', whose quantile needs every token's value in one place.
        """
        if self.method == "exact":
            raise ValueError("exact Quantile Balancing needs all tokens on one rank; use method 'histogram'")
        device = self.weight.device
        self.load_per_expert = self.load_per_expert.to(device)
        if self.method == "histogram" and self._histogram is None:
            self._histogram = torch.zeros(self.num_experts, self.bins, dtype=torch.int64, device=device)
        return [self.load_per_expert] if self._histogram is None else [self.load_per_expert, self._histogram]

    @torch.no_grad()
    def update(self) -> Tensor:
        """Set the bias for the next step from this step's totals. Returns the load of each expert, [E]."""
        bias, load = self.e_score_correction_bias, self.load_per_expert
        if self.method == "histogram" and self._histogram is not None:
            bias.copy_(histogram_bias(self._histogram, bias, self.k))
        elif self.method == "exact" and self._required:
            bias.copy_(exact_bias(torch.cat(self._required), self.k))
        self.forget()
        return load
