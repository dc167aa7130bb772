"""What a K3 model is, in the field names of the released `config.json`.

No field has a default: the released class falls back silently (situ beta 1, latent width 0), and a model built from
such a fallback loads cleanly and talks nonsense. A missing field is an error that names it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from moonlet.config.strict import Strict
from moonlet.errors import ConfigError

Positive = Field(gt=0)


class LinearAttention(Strict):
    """Kimi Delta Attention. Layer lists are 1-based, as released."""

    full_attn_layers: list[int]
    kda_layers: list[int]
    gate_lower_bound: float | None = Field(lt=0, ge=-5)  # log-decay in (bound, 0); None: -exp(A) * softplus
    head_dim: int = Positive
    num_heads: int = Positive
    short_conv_kernel_size: int = Positive
    use_full_rank_gate: bool


class ModelConfig(Strict):
    """The text model (k3_model.md section 1)."""

    vocab_size: int = Positive
    hidden_size: int = Positive
    intermediate_size: int = Positive
    num_hidden_layers: int = Positive
    rms_norm_eps: float = Positive
    max_position_embeddings: int = Positive
    tie_word_embeddings: bool
    pad_token_id: int = Field(ge=0)
    bos_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)

    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: float | None
    activation_situ_linear_beta: float | None

    linear_attn_config: LinearAttention

    num_attention_heads: int = Positive
    num_key_value_heads: int = Positive
    q_lora_rank: int | None = Positive
    kv_lora_rank: int = Positive
    qk_nope_head_dim: int = Positive
    qk_rope_head_dim: int = Field(ge=0)
    v_head_dim: int = Positive
    mla_use_nope: bool
    mla_use_output_gate: bool

    attn_res_block_size: int | None = Positive  # decoder layers in a block; None: plain residuals

    first_k_dense_replace: int = Field(ge=0)  # the first k layers have a dense MLP
    moe_layer_freq: int = Positive
    num_experts: int = Positive
    num_experts_per_token: int = Positive
    num_shared_experts: int = Field(ge=0)
    moe_intermediate_size: int = Positive
    routed_expert_hidden_size: int | None = Positive  # the latent width; None: experts read the full width
    latent_moe_use_norm: bool
    routed_scaling_factor: float = Positive
    moe_router_activation_func: Literal["sigmoid", "softmax"]
    moe_renormalize: bool
    use_grouped_topk: bool
    num_expert_group: int = Positive
    topk_group: int = Positive
    topk_method: Literal["noaux_tc"]
    num_nextn_predict_layers: Literal[0]

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [message for wrong, message in self._rules() if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        linear, layers = self.linear_attn_config, set(range(1, self.num_hidden_layers + 1))
        listed = linear.kda_layers + linear.full_attn_layers
        return [
            (
                sorted(listed) != sorted(layers),
                f"kda_layers and full_attn_layers (1-based) must name each of the layers 1..{self.num_hidden_layers} once, "
                f"got {linear.kda_layers} and {linear.full_attn_layers}",
            ),
            (
                self.hidden_act == "situ" and None in (self.activation_situ_beta, self.activation_situ_linear_beta),
                "hidden_act 'situ' needs activation_situ_beta and activation_situ_linear_beta",
            ),
            (not self.mla_use_nope, "mla_use_nope must be true: K3 rotates nothing"),
            (
                self.num_attention_heads % self.num_key_value_heads != 0,
                "num_key_value_heads must divide num_attention_heads",
            ),
            (self.num_experts_per_token >= self.num_experts, "num_experts_per_token must be less than num_experts"),
            (self.num_experts % self.num_expert_group != 0, "num_expert_group must divide num_experts"),
            (self.topk_group > self.num_expert_group, "topk_group must not exceed num_expert_group"),
            (
                self.num_experts_per_token * self.num_expert_group > self.num_experts * self.topk_group,
                "the topk_group chosen groups hold fewer experts than num_experts_per_token",
            ),
            (self.num_expert_group > 1 and not self.use_grouped_topk, "num_expert_group > 1 needs use_grouped_topk"),
            (
                max(self.pad_token_id, self.bos_token_id, self.eos_token_id) >= self.vocab_size,
                "a special token id lies outside the vocabulary",
            ),
        ]

    def is_kda(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) is a KDA layer."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) has routed experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size


class VisionConfig(Strict):
    """MoonViT-V2 and its projector (k3_model.md section 1), in released names."""

    patch_size: int = Positive
    init_pos_emb_height: int = Positive
    init_pos_emb_width: int = Positive
    init_pos_emb_time: int = Positive
    pos_emb_type: Literal["divided_fixed"]
    pos_emb_interpolation_mode: Literal["bilinear", "bicubic"]
    vt_num_attention_heads: int = Positive
    vt_num_hidden_layers: int = Positive
    vt_hidden_size: int = Positive
    vt_intermediate_size: int = Positive
    qkv_hidden_size: int = Positive
    merge_kernel_size: list[int]
    merge_type: Literal["sd2_tpool"]
    mm_projector_type: Literal["patchmergerv2"]
    mm_hidden_size: int = Positive
    text_hidden_size: int = Positive
    projector_hidden_act: Literal["gelu"]
    projector_ln_eps: float = Positive
    norm_type: Literal["rmsnorm"]
    attn_bias: Literal[False]
    patch_embed_proj_bias: Literal[False]
    linear_bias: Literal[False]
    mlp_type: Literal["mlp2"]
    activation_func: Literal["gelu_pytorch_tanh"]


def merge_model(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it; nested tables are merged key by key."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict):
            if not isinstance(merged.get(key, {}), dict):
                raise ConfigError(f"'{key}' is not a table, so it cannot hold {sorted(value)}")
            merged[key] = merge_model(merged.get(key, {}), value)
        else:
            merged[key] = value
    return merged
