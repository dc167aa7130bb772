"""Stable LatentMoE (k3_model.md section 1): experts that work in a narrow latent space, beside shared ones at full width.

N tokens, D hidden, L latent width, I expert inner width, E experts, k chosen, P slots (see `ops/grouped_linear.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.mlp import MLP, glu_packed
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.router import Router
from moonlet.ops.grouped_linear import combine_rows, dispatch_rows, grouped_linear, plan_dispatch


class Experts(nn.Module):
    """All routed experts stacked: w13 [E, 2I, L] (gate rows, then up rows) and w2 [E, L, I]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts, inner, width = config.num_experts, config.moe_intermediate_size, config.expert_hidden_size
        self.w13 = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_PL: Tensor, ends_E: Tensor) -> Tensor:
        dtype = x_PL.dtype
        gate_up = grouped_linear(x_PL, self.w13.to(dtype), ends_E)
        return grouped_linear(glu_packed(self.config, gate_up), self.w2.to(dtype), ends_E)


class LatentMoE(nn.Module):
    """x [B, T, D] -> up(norm(sum_k w_k expert_k(down(x)))) + shared(x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate = Router(config)
        self.experts = Experts(config)
        self.is_latent = config.routed_expert_hidden_size is not None
        self.has_norm = self.is_latent and config.latent_moe_use_norm
        if self.is_latent:
            self.routed_expert_down_proj = linear(config.hidden_size, config.expert_hidden_size)
            self.routed_expert_up_proj = linear(config.expert_hidden_size, config.hidden_size)
        if self.has_norm:
            self.routed_expert_norm = RMSNorm(config.expert_hidden_size, config.rms_norm_eps)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            self.shared_experts = MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, x_BTD: Tensor, valid_BT: Tensor | None = None, forced_NK: Tensor | None = None) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        routing = self.gate(x_ND, None if valid_BT is None else valid_BT.flatten(), forced_NK)
        out = self.routed(x_ND, routing.indices_NK, routing.weights_NK).view_as(x_BTD)
        return out + self.shared_experts(x_BTD) if self.has_shared else out

    def routed(self, x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The routed part alone, [N, D]."""
        z_NL = self.routed_expert_down_proj(x_ND) if self.is_latent else x_ND
        plan = plan_dispatch(indices_NK, self.num_experts)
        y_NL = combine_rows(self.experts(dispatch_rows(z_NL, plan), plan.ends_E), weights_NK, plan).to(z_NL.dtype)
        if self.has_norm:
            y_NL = self.routed_expert_norm(y_NL)
        return self.routed_expert_up_proj(y_NL) if self.is_latent else y_NL
