"""How large a model is: parameters, active parameters, FLOPs, checkpoint bytes and decode state, without allocating it.

All follows from the table of released tensors; `count_built` counts the real modules, built on the meta device, so that
formula and code cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.config import ModelConfig, VisionConfig
from moonlet.model.empty import build_empty
from moonlet.model.hf_layout import Entry, layout

VISION_PARTS = ("vision tower", "projector")
_STATE_BYTES, _CACHE_BYTES = 4, 2  # KDA state in float32; convolution windows and MLA latents in bfloat16


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one token of a forward pass; training costs three times as much."""

    weights: int  # 2 for each active parameter
    kda: int  # the recurrence: decay, read, correct, read out
    mla: int  # scores and values over half of `context`, the mean of a causal mask
    context: int

    @property
    def forward(self) -> int:
        return self.weights + self.kda + self.mla


@dataclass(frozen=True)
class DecodeBytes:
    """What one sequence keeps while it decodes."""

    kda_state: int  # constant: float32 [layers, H, K, V]
    conv_windows: int  # constant
    mla_per_token: int  # the latent and the shared key part


@dataclass(frozen=True)
class Size:
    """Parameters by part, in the order of the released table, and what follows from them."""

    parts: dict[str, int]
    bytes_by_part: dict[str, int]
    active: int
    tensors: int
    checkpoint_bytes: int
    flops: Flops
    decode: DecodeBytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def text(self) -> int:
        return self.total - sum(self.parts.get(part, 0) for part in VISION_PARTS)


def count_parameters(config: ModelConfig, vision: VisionConfig | None = None, *, context: int = 8192) -> Size:
    """Size of a model in the released layout (k3_model.md section 4).

    Active parameters are those that one token of text uses: everything but the input embedding, the experts that were
    not chosen and the vision half. The checkpoint has MXFP4 experts where their widths allow it, BF16 ones elsewhere.

    Args:
        config: the text model.
        vision: its vision half, if it has one.
        context: tokens in a sequence, for the attention term of the FLOPs.
    """
    entries = layout(config, vision)
    quantized = can_quantize(config)
    parts = _sum_by_part(entries, {entry: entry.parameters for entry in entries})
    return Size(
        parts=parts,
        bytes_by_part=_sum_by_part(entries, {entry: entry.num_bytes(quantized) for entry in entries}),
        active=(active := _active(config, parts)),
        tensors=sum(entry.copies * len(entry.stored(quantized)) for entry in entries),
        checkpoint_bytes=sum(entry.num_bytes(quantized) for entry in entries),
        flops=_flops(config, active, context),
        decode=_decode_bytes(config),
    )


def can_quantize(config: ModelConfig) -> bool:
    """Whether MXFP4's blocks of 32 fit both inner widths of the routed experts."""
    return config.moe_intermediate_size % 32 == 0 and config.expert_hidden_size % 32 == 0


def count_built(config: ModelConfig, vision: VisionConfig | None = None) -> int:
    """Parameters and router biases of the modules themselves, built on the meta device."""
    model = build_empty(config, vision, media_token_id=0, device="meta")
    biases = (value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(value.numel() for value in (*model.parameters(), *biases))


def _sum_by_part(entries: list[Entry], numbers: dict[Entry, int]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for entry in entries:
        parts[entry.part] = parts.get(entry.part, 0) + numbers[entry]
    return parts


def _active(config: ModelConfig, parts: dict[str, int]) -> int:
    idle = parts["routed experts"] * (config.num_experts - config.num_experts_per_token) // config.num_experts
    text = sum(count for part, count in parts.items() if part not in VISION_PARTS)
    # A tied table works as the output head, so it counts.
    return text - idle - (0 if config.tie_word_embeddings else parts["embedding"])


def _num_layers(config: ModelConfig) -> tuple[int, int]:
    """(KDA layers, MLA layers)."""
    return len(config.linear_attn_config.kda_layers), len(config.linear_attn_config.full_attn_layers)


def _flops(config: ModelConfig, active: int, context: int) -> Flops:
    kda_layers, mla_layers = _num_layers(config)
    linear = config.linear_attn_config
    state = linear.num_heads * linear.head_dim**2
    pair = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return Flops(
        weights=2 * active,
        kda=7 * state * kda_layers,  # decay 1, prediction 2, rank-one correction 2, read-out 2
        mla=2 * pair * mla_layers * context // 2,
        context=context,
    )


def _decode_bytes(config: ModelConfig) -> DecodeBytes:
    kda_layers, mla_layers = _num_layers(config)
    linear = config.linear_attn_config
    width = linear.num_heads * linear.head_dim
    return DecodeBytes(
        kda_state=kda_layers * width * linear.head_dim * _STATE_BYTES,
        conv_windows=kda_layers * 3 * width * linear.short_conv_kernel_size * _CACHE_BYTES,
        mla_per_token=mla_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * _CACHE_BYTES,
    )
