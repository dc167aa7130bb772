"""Gated Multi-head Latent Attention without rotation (k3_model.md section 1).

B sequences, T new tokens, S tokens so far, D hidden, H heads, G key/value heads (H a multiple of G), N nope dim,
P shared ("rope", never rotated) dim, V value dim, R latent width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.state import MLAState, PagedMLAState, empty_mla_state
from moonlet.ops.mla import absorbed_attention, causal_attention, max_logit, max_logit_bound, streamed_attention
from moonlet.ops.mla_pages import attend_pages
from moonlet.ops.sigmoid import sigmoid

# The two low-rank norms use the released class's default and not the configured epsilon.
LORA_EPS = 1e-6
KEY_BLOCK = 1024  # cached tokens whose keys and values are expanded at a time
MIN_ROWS = 4  # matrix libraries take another path for products of fewer rows


class TrackedLogits(NamedTuple):
    """Queries and keys of one forward pass, kept for QK-Clip."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    seq_lens: tuple[int, ...] | None


class GatedMLA(nn.Module):
    """x [B, T, D] -> [B, T, D]. With `state` it attends to the cached latents and appends the new ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.nope_dim, self.rope_dim, self.value_dim = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent_dim, self.q_lora_rank = config.kv_lora_rank, config.q_lora_rank
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        hidden, query = config.hidden_size, self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_lora_rank is None:
            self.q_proj = linear(hidden, query)
        else:
            self.q_a_proj = linear(hidden, self.q_lora_rank)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, LORA_EPS)
            self.q_b_proj = linear(self.q_lora_rank, query)
        self.kv_a_proj_with_mqa = linear(hidden, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LORA_EPS)
        self.kv_b_proj = linear(self.latent_dim, self.num_kv_heads * (self.nope_dim + self.value_dim))
        self.has_gate = config.mla_use_output_gate
        if self.has_gate:
            self.g_proj = linear(hidden, self.num_heads * self.value_dim)
        self.o_proj = linear(self.num_heads * self.value_dim, hidden)
        self.track_logits = False
        self.tracked: TrackedLogits | None = None

    def forward(
        self, x_BTD: Tensor, seq_lens: tuple[int, ...] | None = None, state: MLAState | PagedMLAState | None = None
    ) -> Tensor:
        q_BTHK, rows_BTL = self._query(x_BTD), self._latent_rows(x_BTD)
        if state is None:
            o_BTHV = self._expanded(q_BTHK, rows_BTL, seq_lens)
        elif isinstance(state, PagedMLAState):
            o_BTHV = self._paged(q_BTHK, rows_BTL, state)
        else:
            o_BTHV = self._cached(q_BTHK, state.append(rows_BTL))
        o_BTC = o_BTHV.flatten(-2)
        if self.has_gate:
            o_BTC = o_BTC * sigmoid(self.g_proj(x_BTD)).to(o_BTC.dtype)
        return self.o_proj(o_BTC.to(x_BTD.dtype))

    def _query(self, x_BTD: Tensor) -> Tensor:
        q = self.q_proj(x_BTD) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        return q.unflatten(-1, (self.num_heads, self.nope_dim + self.rope_dim))

    def _latent_rows(self, x_BTD: Tensor) -> Tensor:
        """What the cache holds of a token: the normalised latent and the shared key part, [B, T, R + P]."""
        latent, rope = self.kv_a_proj_with_mqa(x_BTD).split([self.latent_dim, self.rope_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), rope], dim=-1)

    def expand(self, rows_BSL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H, N + P] and values [B, S, H, V] of cached rows."""
        latent, rope = rows_BSL.split([self.latent_dim, self.rope_dim], dim=-1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_kv_heads, self.nope_dim + self.value_dim))
        expanded = expanded.repeat_interleave(self.num_heads // self.num_kv_heads, dim=2)
        k_nope, v = expanded.split([self.nope_dim, self.value_dim], dim=-1)
        shared = rope.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        return torch.cat([k_nope, shared], dim=-1), v

    def _expanded(self, q_BTHK: Tensor, rows_BSL: Tensor, seq_lens: tuple[int, ...] | None) -> Tensor:
        k_BSHK, v_BSHV = self.expand(rows_BSL)
        if self.track_logits:
            self.tracked = TrackedLogits(q_BTHK.detach(), k_BSHK.detach(), seq_lens)
        return causal_attention(q_BTHK, k_BSHK, v_BSHV, self.scale, seq_lens)

    def _cached(self, q_BTHK: Tensor, rows_BSL: Tensor) -> Tensor:
        num_queries, num_keys = q_BTHK.shape[1], rows_BSL.shape[1]
        if num_queries == 1:
            return self._absorbed(q_BTHK, rows_BSL)
        if num_queries == num_keys:
            return self._expanded(q_BTHK, rows_BSL, None)
        return self._streamed(q_BTHK, rows_BSL)

    def _streamed(self, q_BTHK: Tensor, rows_BSL: Tensor) -> Tensor:
        blocks = (self._expand_whole(block) for block in rows_BSL.split(KEY_BLOCK, dim=1))
        return streamed_attention(q_BTHK, blocks, rows_BSL.shape[1], self.scale)

    def _expand_whole(self, rows_BSL: Tensor) -> tuple[Tensor, Tensor]:
        """`expand` of one block, with bits that do not depend on how many rows it has."""
        num_rows = rows_BSL.shape[1]
        k, v = self.expand(F.pad(rows_BSL, (0, 0, 0, max(0, MIN_ROWS - num_rows))))
        return k[:, :num_rows], v[:, :num_rows]

    def _absorbed(self, q_BTHK: Tensor, rows_BSL: Tensor) -> Tensor:
        q_nope, q_rope = q_BTHK.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, rope = rows_BSL.split([self.latent_dim, self.rope_dim], dim=-1)
        return absorbed_attention(q_nope, q_rope, latent, rope, self._up_projections(), self.scale)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """What expands a latent into each head's key [H, N, R] and value [H, V, R]."""
        up = self.kv_b_proj.weight.view(self.num_kv_heads, self.nope_dim + self.value_dim, self.latent_dim)
        up = up.repeat_interleave(self.num_heads // self.num_kv_heads, dim=0)
        up_k, up_v = up.split([self.nope_dim, self.value_dim], dim=1)
        return up_k, up_v

    def _paged(self, q_BTHK: Tensor, rows_BTL: Tensor, state: PagedMLAState) -> Tensor:
        """New tokens of sequences whose rows lie in pages: absorbed where it is one token each and nothing is replayed."""
        state.append(rows_BTL)
        num_new = q_BTHK.shape[1]
        if num_new > 1 or state.replay:
            sequences = zip(q_BTHK.split(1), state.rows(num_new))
            return torch.cat([self._streamed(q, rows) for q, rows in sequences])
        up_k_HNR, up_v_HVR = self._up_projections()
        q_nope, q_rope = q_BTHK.squeeze(1).split([self.nope_dim, self.rope_dim], dim=-1)
        q_BHL = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope, up_k_HNR), q_rope], dim=-1)
        mixed_BHR = attend_pages(q_BHL, state.pool, state.tables, state.lengths + 1, self.latent_dim, self.scale)
        return torch.einsum("bhr,hvr->bhv", mixed_BHR, up_v_HVR.to(mixed_BHR.dtype)).unsqueeze(1)

    def tracked_max_logit(self, threshold: float) -> Tensor | None:
        """Largest attention logit of each head [H] in the last tracked forward; None when no head can exceed `threshold`.

        The Cauchy-Schwarz bound settles most steps; the exact maximum is computed only when the bound does not.
        """
        if self.tracked is None:
            return None
        q_BTHK, k_BTHK, seq_lens = self.tracked
        self.tracked = None
        if bool((max_logit_bound(q_BTHK, k_BTHK, self.scale) <= threshold).all()):
            return None
        return max_logit(q_BTHK, k_BTHK, self.scale, seq_lens)

    def new_state(self, batch_size: int) -> MLAState:
        return empty_mla_state(batch_size, self.latent_dim + self.rope_dim, self.o_proj.weight)
