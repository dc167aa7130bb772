"""Kimi Delta Attention as a layer (k3_model.md section 1, k3_system.md 1.2).

B sequences, T tokens, D hidden, H heads, K = V = head dim, C = H*K channels, W convolution width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.state import KDAState, empty_kda_state
from moonlet.ops.kda import kda, kda_gate, kda_step, l2_normalize
from moonlet.ops.kda_inputs import kda_inputs
from moonlet.ops.rms_norm import at_least_fp32, gated_head_norm
from moonlet.ops.short_conv import short_conv


class ShortConv(nn.Module):
    """Weight of a causal depthwise convolution, [C, 1, W] as released."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x_BTC: Tensor, window_BCW: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x_BTC, self.weight.squeeze(1), initial_window=window_BCW)


class KimiDeltaAttention(nn.Module):
    """x [B, T, D] -> [B, T, D]. With `state` it continues from it and updates it in place."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        linear_config = config.linear_attn_config
        self.num_heads, self.head_dim = linear_config.num_heads, linear_config.head_dim
        self.lower_bound, self.eps = linear_config.gate_lower_bound, config.rms_norm_eps
        self.conv_width = linear_config.short_conv_kernel_size
        hidden, channels = config.hidden_size, self.num_heads * self.head_dim
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_proj", linear(hidden, channels))
            setattr(self, f"{name}_conv1d", ShortConv(channels, self.conv_width))
        self.f_a_proj, self.f_b_proj = linear(hidden, self.head_dim), linear(self.head_dim, channels)
        self.b_proj = linear(hidden, self.num_heads)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(channels))
        self.full_rank_gate = linear_config.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = linear(hidden, channels)
        else:
            self.g_a_proj, self.g_b_proj = linear(hidden, self.head_dim), linear(self.head_dim, channels)
        self.o_norm = RMSNorm(self.head_dim, self.eps)
        self.o_proj = linear(channels, hidden)

    def forward(self, x_BTD: Tensor, seq_lens: tuple[int, ...] | None = None, state: KDAState | None = None) -> Tensor:
        q, k, v = self._inputs(x_BTD, seq_lens) if state is None else self._inputs_after(x_BTD, state)
        decay_logit = self._heads(self.f_b_proj(self.f_a_proj(x_BTD)))
        dt_bias_HK = self.dt_bias.view(self.num_heads, self.head_dim)
        log_decay = kda_gate(decay_logit, self.A_log, dt_bias_HK, self.lower_bound)
        beta_BTH = torch.sigmoid(at_least_fp32(self.b_proj(x_BTD)))
        o = self._recurrence((q, k, v, log_decay, beta_BTH), seq_lens, state)
        gate = self.g_proj(x_BTD) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x_BTD))
        return self.o_proj(gated_head_norm(o, self._heads(gate), self.o_norm.weight, self.eps).flatten(-2))

    def _recurrence(
        self, inputs: tuple[Tensor, ...], seq_lens: tuple[int, ...] | None, state: KDAState | None
    ) -> Tensor:
        if state is None:
            return kda(*inputs, seq_lens=seq_lens)[0]
        if inputs[0].shape[1] == 1:
            q, k, v, log_decay, beta = (x.squeeze(1) for x in inputs)
            o_BHV, state.recurrent = kda_step(q, k, v, log_decay, beta, state.recurrent)
            return o_BHV.unsqueeze(1)
        o, state.recurrent = kda(*inputs, initial_state=state.recurrent)
        return o

    def _inputs(self, x_BTD: Tensor, seq_lens: tuple[int, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of whole documents, convolved and normalised."""
        weights = tuple(conv.weight.squeeze(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        raw = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        return kda_inputs(*raw, weights, num_heads=self.num_heads, seq_lens=seq_lens)

    def _inputs_after(self, x_BTD: Tensor, state: KDAState) -> tuple[Tensor, Tensor, Tensor]:
        """The same where the convolutions continue from the windows of a state, which they update."""
        q, state.conv_q = self.q_conv1d(self.q_proj(x_BTD), state.conv_q)
        k, state.conv_k = self.k_conv1d(self.k_proj(x_BTD), state.conv_k)
        v, state.conv_v = self.v_conv1d(self.v_proj(x_BTD), state.conv_v)
        return l2_normalize(self._heads(q)), l2_normalize(self._heads(k)), self._heads(v)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (self.num_heads, self.head_dim))

    def new_state(self, batch_size: int) -> KDAState:
        return empty_kda_state(batch_size, self.num_heads, self.head_dim, self.conv_width, self.o_proj.weight)
