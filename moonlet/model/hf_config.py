"""`config.json` of a released checkpoint, both ways. Nothing falls back: every key is an architecture field that we
know, a key that we know to be without effect on the mathematics, or an error (k3_model.md sections 3 and 5).

Three forms are understood: the released wrapper with `text_config` and `vision_config`, a flat text configuration with
the same fields, and Kimi Linear's class, whose fixed properties are spelled out in one table below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.config import ModelConfig, VisionConfig
from moonlet.errors import CheckpointError, ConfigError, nearest_name

WRAPPER_CLASS = "KimiK3ForConditionalGeneration"
TEXT_CLASS = "KimiK3ForCausalLM"
KIMI_LINEAR_CLASS = "KimiLinearForCausalLM"

# What the class KimiLinearForCausalLM computes, in K3's terms. Its configuration cannot say otherwise: the keys do not
# exist there. If any of them does, the file describes a K3 text model and must have all of them.
KIMI_LINEAR: dict[str, Any] = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}
KIMI_LINEAR_ATTENTION: dict[str, Any] = {"gate_lower_bound": None, "use_full_rank_gate": False}
# Keys that the same class may leave out because it has one answer, or names differently.
KIMI_LINEAR_FIXED: dict[str, Any] = {"topk_method": "noaux_tc"}
KIMI_LINEAR_RENAMED = {"model_max_length": "max_position_embeddings"}

# Written once for the wrapper; the text model reads them too.
SHARED_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
MEDIA_KEY = "media_placeholder_token_id"

QUANT_FORMAT = "mxfp4-pack-quantized"
# Bookkeeping of the file and of the library that wrote it.
# fmt: off
_LIBRARY_KEYS = (
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "dtype", "ignore_index",
    "initializer_range", "is_decoder", "is_encoder_decoder", "id2label", "label2id", "model_type", "num_labels",
    "output_attentions", "output_hidden_states", "problem_type", "pruned_heads", "quantization_config", "return_dict",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache", "use_unified_vision_chunk",
    "video_placeholder",
)
# fmt: on
# K3 and Kimi Linear rotate nothing (mla_use_nope is checked), and every kind of head has its own size.
_UNUSED_TEXT_KEYS = ("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "model_max_length")
IGNORED_TEXT_KEYS = frozenset((*_LIBRARY_KEYS, *_UNUSED_TEXT_KEYS))
IGNORED_VISION_KEYS = frozenset(_LIBRARY_KEYS)
WRAPPER_KEYS = frozenset((*_LIBRARY_KEYS, *SHARED_KEYS, MEDIA_KEY, "text_config", "vision_config"))


@dataclass(frozen=True)
class ReleasedConfig:
    """A configuration file, understood."""

    text: ModelConfig
    vision: VisionConfig | None
    raw: dict[str, Any]  # the file as it is

    @property
    def media_token_id(self) -> int | None:
        return self.raw.get(MEDIA_KEY)


def read_config(path: Path) -> ReleasedConfig:
    """Read `config.json`, or the one in folder `path`.

    Raises:
        CheckpointError: there is no such file or it is not JSON.
        ConfigError: a key is missing, unknown or wrong, or the class is not one of ours.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {file.name} in '{file.parent}': it is not a released checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"'{file}' is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"'{file}' holds a {type(raw).__name__}, not a table of keys")
    return parse_config(raw, str(file))


def parse_config(raw: dict[str, Any], where: str = "config.json") -> ReleasedConfig:
    """Understand a configuration that was already read; errors as `read_config`."""
    for key in ("text_config", "vision_config"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ConfigError(f"{where}: '{key}' must be a table, got {raw[key]!r}")
    _check_class(raw, where)
    if "text_config" not in raw:
        return ReleasedConfig(_parse_flat(raw, where), None, raw)
    for key in raw:
        if key not in WRAPPER_KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest_name(key, WRAPPER_KEYS)}")
    text = _parse_text(_with_shared_keys(raw, where), f"{where} text_config")
    vision = raw.get("vision_config")
    if vision is None:
        return ReleasedConfig(text, None, raw)
    if not isinstance(raw.get(MEDIA_KEY), int):
        raise ConfigError(f"{where}: missing key '{MEDIA_KEY}', which a model with vision needs")
    known = {key: value for key, value in vision.items() if key not in IGNORED_VISION_KEYS}
    return ReleasedConfig(text, VisionConfig.parse(known, f"{where} vision_config"), raw)


def released_config(text: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """The wrapper form for a text model of our own; `parse_config` reads it back to an equal one."""
    inner = text.model_dump(mode="json") | {"model_type": "kimi_linear", "dtype": "bfloat16"}
    raw = {"architectures": [WRAPPER_CLASS], "model_type": "kimi_k3", "dtype": "bfloat16", "text_config": inner}
    raw |= {key: inner[key] for key in SHARED_KEYS}
    return with_quantization(raw, quantized)


def with_quantization(raw: dict[str, Any], quantized: bool) -> dict[str, Any]:
    """`raw` with the right `quantization_config`: an existing one is kept, a missing one is added."""
    holder = dict(raw.get("text_config", raw))
    if not quantized:
        holder.pop("quantization_config", None)
    elif "quantization_config" not in holder:
        holder["quantization_config"] = _quantization_config()
    return raw | {"text_config": holder} if "text_config" in raw else holder


def _check_class(raw: dict[str, Any], where: str) -> None:
    known = (WRAPPER_CLASS, TEXT_CLASS, KIMI_LINEAR_CLASS)
    for name in raw.get("architectures") or ():
        if name not in known:
            raise ConfigError(f"{where}: class '{name}' is not one of {', '.join(known)}")
    for holder in (raw, raw.get("text_config") or {}):
        quant = holder.get("quantization_config")
        if quant is not None and quant.get("format") != QUANT_FORMAT:
            raise ConfigError(
                f"{where}: weights in format '{quant.get('format')}' cannot be read, only '{QUANT_FORMAT}'"
            )


def _with_shared_keys(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The text configuration; keys that only the wrapper has are taken from there."""
    text = dict(raw["text_config"])
    for key in SHARED_KEYS:
        if key in raw and text.setdefault(key, raw[key]) != raw[key]:
            raise ConfigError(f"{where}: '{key}' is {raw[key]} outside and {text[key]} inside text_config")
    return text


def _parse_flat(table: dict[str, Any], where: str) -> ModelConfig:
    is_kimi_linear = KIMI_LINEAR_CLASS in (table.get("architectures") or ())
    return _parse_text(_from_kimi_linear(table) if is_kimi_linear else table, where)


def _parse_text(table: dict[str, Any], where: str) -> ModelConfig:
    return ModelConfig.parse({key: value for key, value in table.items() if key not in IGNORED_TEXT_KEYS}, where)


def _from_kimi_linear(table: dict[str, Any]) -> dict[str, Any]:
    """Spell out what the class fixes, unless the table describes a K3 text model under this name."""
    attention = table.get("linear_attn_config")
    if (
        not isinstance(attention, dict)
        or KIMI_LINEAR.keys() & table.keys()
        or KIMI_LINEAR_ATTENTION.keys() & attention.keys()
    ):
        return table
    renamed = {new: table[old] for old, new in KIMI_LINEAR_RENAMED.items() if old in table}
    completed = KIMI_LINEAR_FIXED | renamed | table | KIMI_LINEAR
    return completed | {"linear_attn_config": attention | KIMI_LINEAR_ATTENTION}


def _quantization_config() -> dict[str, Any]:
    """MXFP4 of the routed experts in the terms of compressed-tensors."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights |= {"dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax"}
    group = {"format": QUANT_FORMAT, "targets": ["Linear"], "weights": weights}
    ignored = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower")
    ignored += ("mm_projector", "routed_expert_(down|up)_proj", "_res_proj", r"block_sparse_moe\.gate")
    return {
        "quant_method": "compressed-tensors",
        "format": QUANT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        "ignore": [f"re:.*{name}.*" for name in ignored],
    }
