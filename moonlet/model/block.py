"""A decoder layer: attention (KDA or Gated MLA) and a feed-forward part (dense MLP or LatentMoE)."""

from __future__ import annotations

from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.attn_residuals import Site, make_site
from moonlet.model.gated_mla import GatedMLA
from moonlet.model.kda import KimiDeltaAttention
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.mlp import MLP
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.state import KDAState, MLAState


class DecoderLayer(nn.Module):
    """Layer `index` (0-based). The model's loop reads and adds; the layer only computes its two sub-layers."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.self_attn = KimiDeltaAttention(config) if config.is_kda(index) else GatedMLA(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        if config.is_moe(index):
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        self.is_moe = config.is_moe(index)
        if config.attn_res_block_size is not None:
            # Layer 0 has no source before its attention: its pair is stored, as released, and never used.
            self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(hidden, eps), linear(hidden, 1)
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(hidden, eps), linear(hidden, 1)

    def attention(self, h_BTD: Tensor, seq_lens: tuple[int, ...] | None, state: KDAState | MLAState | None) -> Tensor:
        return self.self_attn(self.input_layernorm(h_BTD), seq_lens, state)

    def feed_forward(self, h_BTD: Tensor, valid_BT: Tensor | None, forced_NK: Tensor | None) -> Tensor:
        h_BTD = self.post_attention_layernorm(h_BTD)
        return self.block_sparse_moe(h_BTD, valid_BT, forced_NK) if self.is_moe else self.mlp(h_BTD)

    def sites(self) -> list[Site]:
        """The places of this layer that mix, in reading order."""
        attention = make_site(f"layer{self.index}.pre_attn", self.self_attention_res_norm, self.self_attention_res_proj)
        feed_forward = make_site(f"layer{self.index}.pre_ffn", self.mlp_res_norm, self.mlp_res_proj)
        return [feed_forward] if self.index == 0 else [attention, feed_forward]
