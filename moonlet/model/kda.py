"""Kimi Delta Attention as a layer (k3_model.md section 1, k3_system.md 1.2).

B sequences, T tokens, D hidden, H heads, K = V = head dim, C = H*K channels, W convolution width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.state import KDAState, OpenChunk, empty_kda_state
from moonlet.ops.kda import kda, kda_gate, kda_step
from moonlet.ops.kda_inputs import kda_inputs
from moonlet.ops.kda_replay import empty_chunk, kda_replay
from moonlet.ops.rms_norm import gated_head_norm
from moonlet.ops.sigmoid import sigmoid


class ShortConv(nn.Module):
    """Weight of a causal depthwise convolution, [C, 1, W] as released."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


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
        beta_BTH = sigmoid(self.b_proj(x_BTD))
        o = self._recurrence((q, k, v, log_decay, beta_BTH), seq_lens, state)
        gate = self.g_proj(x_BTD) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x_BTD))
        return self.o_proj(gated_head_norm(o, self._heads(gate), self.o_norm.weight, self.eps).flatten(-2))

    def _recurrence(
        self, inputs: tuple[Tensor, ...], seq_lens: tuple[int, ...] | None, state: KDAState | None
    ) -> Tensor:
        if state is None:
            return kda(*inputs, seq_lens=seq_lens)[0]
        if state.open is not None:
            return kda_replay(inputs, state.recurrent, state.open.rows, state.open.fill_B)
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
        weights = tuple(conv.weight.squeeze(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        windows = state.conv_q, state.conv_k, state.conv_v
        raw = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        extended = tuple(torch.cat([window.transpose(1, 2).to(x.dtype), x], 1) for window, x in zip(windows, raw))
        state.conv_q, state.conv_k, state.conv_v = (x[:, -self.conv_width :].transpose(1, 2) for x in extended)
        q, k, v = kda_inputs(extended[0], extended[1], extended[2], weights, num_heads=self.num_heads)
        return q[:, self.conv_width :], k[:, self.conv_width :], v[:, self.conv_width :]

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (self.num_heads, self.head_dim))

    def new_state(self, batch_size: int, *, replay: bool = False) -> KDAState:
        """The state before the first token; with `replay` tokens replay their open chunk."""
        state = empty_kda_state(batch_size, self.num_heads, self.head_dim, self.conv_width, self.o_proj.weight)
        if replay:
            rows = empty_chunk(batch_size, self.num_heads, self.head_dim, self.head_dim, self.o_proj.weight)
            state.open = OpenChunk(rows, torch.zeros(batch_size, dtype=torch.int64, device=rows[0].device))
        return state
