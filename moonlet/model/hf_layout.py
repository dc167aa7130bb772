"""The released checkpoint as a table: which tensors there are, their shapes and types, and where each lives in `K3`.

Everything about the layout follows from this one table: the expected keys of a checkpoint, its parameters and bytes,
the split into shards, and the views of our stacked expert parameters (k3_model.md section 3).

Names are those of the text model without the prefix `language_model.`; `{layer}` and `{expert}` stand for indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

from moonlet.config import ModelConfig, VisionConfig
from moonlet.ops.mxfp4 import BLOCK

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
A_LOG_MULTIPLE = 128  # released A_log vectors are padded with zeros to a multiple of this
_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

Dtype = Literal["BF16", "F32", "MXFP4"]
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """One kind of released weight; `layers` and `experts` say how many copies of it there are."""

    name: str
    shape: Shape
    part: str
    dtype: Dtype = "BF16"
    layers: tuple[int, ...] = ()
    experts: int = 0

    @property
    def copies(self) -> int:
        return max(1, len(self.layers)) * max(1, self.experts)

    @property
    def parameters(self) -> int:
        """Trained numbers in all copies; zero padding does not count."""
        return prod(self.shape) * self.copies

    def stored(self, quantized: bool = True) -> list[tuple[str, Shape, str]]:
        """(name, shape, dtype) of the tensors that hold one copy; routed experts are two tensors when quantised."""
        if self.dtype == "MXFP4" and quantized:
            rows, columns = self.shape
            return [
                (f"{self.name}.weight_packed", (rows, columns // 2), "U8"),
                (f"{self.name}.weight_scale", (rows, columns // BLOCK), "U8"),
            ]
        if self.dtype == "MXFP4":
            return [(f"{self.name}.weight", self.shape, "BF16")]
        if self.name.endswith(".A_log"):
            return [(self.name, (padded_length(self.shape[0]),), self.dtype)]
        return [(self.name, self.shape, self.dtype)]

    def num_bytes(self, quantized: bool = True) -> int:
        return self.copies * sum(prod(shape) * _BYTES[dtype] for _, shape, dtype in self.stored(quantized))

    def weights(self) -> Iterator[Weight]:
        """Every copy, layer by layer and expert by expert."""
        for layer in self.layers or (None,):
            for expert in range(self.experts) if self.experts else (None,):
                yield Weight(self, layer, expert)


@dataclass(frozen=True, eq=False)
class Weight:
    """One released weight, and the place of its numbers in our model."""

    entry: Entry
    layer: int | None
    expert: int | None

    @property
    def name(self) -> str:
        return self.fill(self.entry.name)

    def fill(self, name: str) -> str:
        return name.replace("{layer}", str(self.layer)).replace("{expert}", str(self.expert))

    def stored(self, quantized: bool = True) -> list[tuple[str, Shape, str]]:
        return [(self.fill(name), shape, dtype) for name, shape, dtype in self.entry.stored(quantized)]

    @property
    def is_text(self) -> bool:
        return not self.entry.name.startswith(VISION_PREFIXES)

    @property
    def parameter(self) -> str:
        """Name of the parameter (or buffer) of `K3` that holds it; experts are stacked."""
        if self.expert is None:
            return self.name
        stack = "w2" if self.name.endswith(".w2") else "w13"
        return f"{self.name.rsplit('.', 2)[0]}.{stack}"

    def view(self, parameter: Tensor) -> Tensor:
        """The part of `parameter` that is this weight: gate rows (w1) come first in w13, then up rows (w3)."""
        if self.expert is None:
            return parameter
        stack = parameter[self.expert]
        rows = self.entry.shape[0]
        return stack[rows:] if self.name.endswith(".w3") else stack[:rows]


def padded_length(num_heads: int) -> int:
    return -(-num_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE


def layout(text: ModelConfig, vision: VisionConfig | None = None) -> list[Entry]:
    """Every kind of weight in the released checkpoint of this model."""
    entries = _trunk(text) + _norms(text)
    entries += _kda(text) + _mla(text) + _dense(text) + _moe(text) + _attn_res(text)
    return entries + (_vision_tower(vision) + _projector(vision) if vision else [])


def shard_key(weight: Weight) -> tuple[int, int]:
    """Released order of shards: one for each layer, then the trunk, the projector and the vision tower."""
    if weight.layer is not None and weight.is_text:
        return 0, weight.layer
    return (1, 0) if weight.is_text else (2, 0) if weight.entry.name.startswith("mm_projector.") else (3, 0)


def _layers(config: ModelConfig, *, kda: bool | None = None, moe: bool | None = None) -> tuple[int, ...]:
    return tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if kda in (None, config.is_kda(layer)) and moe in (None, config.is_moe(layer))
    )


def _trunk(config: ModelConfig) -> list[Entry]:
    table = (config.vocab_size, config.hidden_size)
    head = [] if config.tie_word_embeddings else [Entry("lm_head.weight", table, "lm_head")]
    return [Entry("model.embed_tokens.weight", table, "embedding"), *head]


def _norms(config: ModelConfig) -> list[Entry]:
    names, width = ("input_layernorm", "post_attention_layernorm"), (config.hidden_size,)
    in_layers = [_in_layers(f"{name}.weight", width, "norms", _layers(config)) for name in names]
    return [*in_layers, Entry("model.norm.weight", width, "norms")]


def _in_layers(name: str, shape: Shape, part: str, layers: tuple[int, ...], dtype: Dtype = "BF16") -> Entry:
    return Entry(f"model.layers.{{layer}}.{name}", shape, part, dtype, layers)


def _kda(config: ModelConfig) -> list[Entry]:
    linear, hidden, layers = config.linear_attn_config, config.hidden_size, _layers(config, kda=True)
    width, head = linear.num_heads * linear.head_dim, linear.head_dim
    conv = (width, 1, linear.short_conv_kernel_size)
    gate: dict[str, Shape] = {"g_proj": (width, hidden)}
    if not linear.use_full_rank_gate:
        gate = {"g_a_proj": (head, hidden), "g_b_proj": (width, head)}
    matrices: dict[str, Shape] = {
        **{f"{name}_proj": (width, hidden) for name in "qkv"},
        "f_a_proj": (head, hidden),
        "f_b_proj": (width, head),
        "b_proj": (linear.num_heads, hidden),
        **gate,
        "o_proj": (hidden, width),
    }
    vectors: dict[str, Shape] = {
        **{f"{name}_conv1d.weight": conv for name in "qkv"},
        "A_log": (linear.num_heads,),
        "dt_bias": (width,),
        "o_norm.weight": (head,),
    }
    part = "KDA attention"
    return [_in_layers(f"self_attn.{name}.weight", shape, part, layers) for name, shape in matrices.items()] + [
        _in_layers(f"self_attn.{name}", shape, part, layers, "F32") for name, shape in vectors.items()
    ]


def _mla(config: ModelConfig) -> list[Entry]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    key, value, latent = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    query: dict[str, Shape] = {"q_proj": (heads * key, hidden)}
    if (rank := config.q_lora_rank) is not None:
        query = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (heads * key, rank)}
    shapes: dict[str, Shape] = {
        **query,
        "kv_a_proj_with_mqa": (latent + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (config.num_key_value_heads * (config.qk_nope_head_dim + value), latent),
        **({"g_proj": (heads * value, hidden)} if config.mla_use_output_gate else {}),
        "o_proj": (hidden, heads * value),
    }
    layers = _layers(config, kda=False)
    return [_in_layers(f"self_attn.{name}.weight", shape, "MLA attention", layers) for name, shape in shapes.items()]


def _dense(config: ModelConfig) -> list[Entry]:
    return _mlp("mlp", config, config.intermediate_size, "dense MLP", _layers(config, moe=False))


def _mlp(name: str, config: ModelConfig, inner: int, part: str, layers: tuple[int, ...]) -> list[Entry]:
    hidden = config.hidden_size
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [_in_layers(f"{name}.{key}.weight", shape, part, layers) for key, shape in shapes.items()]


def _moe(config: ModelConfig) -> list[Entry]:
    moe, layers = "block_sparse_moe", _layers(config, moe=True)
    num_experts, inner, width = config.num_experts, config.moe_intermediate_size, config.expert_hidden_size
    entries = [
        _in_layers(f"{moe}.gate.weight", (num_experts, config.hidden_size), "router weight", layers),
        _in_layers(f"{moe}.gate.e_score_correction_bias", (num_experts,), "router bias", layers, "F32"),
    ]
    if config.routed_expert_hidden_size is not None:
        down, up = (width, config.hidden_size), (config.hidden_size, width)
        entries.append(_in_layers(f"{moe}.routed_expert_down_proj.weight", down, "latent down/up/norm", layers))
        entries.append(_in_layers(f"{moe}.routed_expert_up_proj.weight", up, "latent down/up/norm", layers))
        if config.latent_moe_use_norm:
            entries.append(_in_layers(f"{moe}.routed_expert_norm.weight", (width,), "latent down/up/norm", layers))
    if config.num_shared_experts:
        shared = config.num_shared_experts * inner
        entries += _mlp(f"{moe}.shared_experts", config, shared, "shared experts", layers)
    return entries + [
        Entry(
            f"model.layers.{{layer}}.{moe}.experts.{{expert}}.{name}",
            shape,
            "routed experts",
            "MXFP4",
            layers,
            num_experts,
        )
        for name, shape in {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}.items()
    ]


def _attn_res(config: ModelConfig) -> list[Entry]:
    if config.attn_res_block_size is None:
        return []
    kinds: dict[str, Shape] = {"norm": (config.hidden_size,), "proj": (1, config.hidden_size)}
    inside = [
        _in_layers(f"{site}_res_{kind}.weight", shape, "AttnRes", _layers(config))
        for site in ("self_attention", "mlp")
        for kind, shape in kinds.items()
    ]
    return inside + [Entry(f"model.output_attn_res_{kind}.weight", shape, "AttnRes") for kind, shape in kinds.items()]


def _vision_tower(vision: VisionConfig) -> list[Entry]:
    width, inner, part = vision.vt_hidden_size, vision.vt_intermediate_size, "vision tower"
    blocks = tuple(range(vision.vt_num_hidden_layers))
    shapes: dict[str, Shape] = {
        "norm0": (width,),
        "norm1": (width,),
        "wqkv": (3 * vision.qkv_hidden_size, width),
        "wo": (width, vision.qkv_hidden_size),
        "mlp.fc0": (inner, width),
        "mlp.fc1": (width, inner),
    }
    patch = (width, 3, vision.patch_size, vision.patch_size)
    positions = (vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    return [
        Entry("vision_tower.patch_embed.proj.weight", patch, part),
        Entry("vision_tower.patch_embed.pos_emb.weight", positions, part),
        *(
            Entry(f"vision_tower.encoder.blocks.{{layer}}.{name}.weight", shape, part, layers=blocks)
            for name, shape in shapes.items()
        ),
        Entry("vision_tower.encoder.final_layernorm.weight", (width,), part),
    ]


def _projector(vision: VisionConfig) -> list[Entry]:
    merged = vision.mm_hidden_size * prod(vision.merge_kernel_size)
    return [
        Entry("mm_projector.proj.0.weight", (merged, merged), "projector"),
        Entry("mm_projector.proj.2.weight", (vision.text_hidden_size, merged), "projector"),
        Entry("mm_projector.post_norm.weight", (vision.text_hidden_size,), "projector"),
    ]
