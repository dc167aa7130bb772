"""`config.json`: nothing falls back. Every architecture key is asked for, every unknown key is an error (B15)."""

from __future__ import annotations

import copy
import json

import pytest
from conftest import GOLDEN, golden_stems

from moonlet.config import ModelConfig, preset_names, resolve_model
from moonlet.errors import CheckpointError, ConfigError
from moonlet.model.hf_config import SHARED_KEYS, parse_config, read_config, released_config
from moonlet.model.size import count_parameters

RELEASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")) or ["absent"]

# Kimi-Linear-48B-A3B-Instruct as published, without its auto_map.
KIMI_LINEAR_48B = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def release(golden, name) -> dict:
    return json.loads((golden.folder / name / "config.json").read_text())


def without(raw: dict, *path: str) -> dict:
    raw = copy.deepcopy(raw)
    table = raw
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    return raw


def keys_of(model: type) -> list[str]:
    return list(model.model_fields)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_wrapper_is_understood(golden, name):
    config = read_config(golden.folder / name)
    assert config.raw == release(golden, name)
    assert (
        config.text.model_dump().items() >= {key: config.raw[key] for key in SHARED_KEYS if key in config.raw}.items()
    )
    assert config.vision is not None and config.vision.text_hidden_size == config.text.hidden_size
    assert config.media_token_id == config.raw["media_placeholder_token_id"]


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_every_architecture_key_is_asked_for(golden, name):
    raw = release(golden, name)
    shared_out = {key: value for key, value in raw.items() if key not in SHARED_KEYS}
    paths = [("text_config", key) for key in keys_of(ModelConfig)]
    paths += [("text_config", "linear_attn_config", key) for key in raw["text_config"]["linear_attn_config"]]
    paths += [("vision_config", key) for key in raw["vision_config"] if not key.startswith("_")]
    for path in paths:
        with pytest.raises(ConfigError, match=rf"missing key '(linear_attn_config\.)?{path[-1]}'"):
            parse_config(without(shared_out, *path))
    with pytest.raises(ConfigError, match="media_placeholder_token_id"):
        parse_config(without(raw, "media_placeholder_token_id"))


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("g_text_*"))
def test_golden_flat_configuration_asks_for_every_key(golden, stem):
    info = golden.info(stem)
    raw = info.get("config") or golden.info(f"{stem}.weights")
    assert parse_config(raw).text == ModelConfig.parse(raw)
    for key in raw:
        with pytest.raises(ConfigError, match=f"missing key '{key}'"):
            parse_config(without(raw, key))


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_unknown_keys_name_their_neighbour(golden, name):
    raw = release(golden, name)
    for table, wrong, right in [
        ([], "media_placeholder_token", "media_placeholder_token_id"),
        (["text_config"], "num_experts_per_tok", "num_experts_per_token"),
        (["text_config", "linear_attn_config"], "gate_lower_bond", "gate_lower_bound"),
        (["vision_config"], "patch_sise", "patch_size"),
    ]:
        changed = copy.deepcopy(raw)
        target = changed
        for key in table:
            target = target[key]
        target[wrong] = 1
        with pytest.raises(ConfigError, match=f"unknown key '.*{wrong}' .did you mean '{right}'"):
            parse_config(changed)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_contradictions_are_errors(golden, name):
    raw = release(golden, name)
    with pytest.raises(ConfigError, match=r"eos_token_id.*outside.*inside"):
        parse_config(raw | {"eos_token_id": raw["eos_token_id"] - 1})
    with pytest.raises(ConfigError, match="class 'LlamaForCausalLM' is not one of"):
        parse_config(raw | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="format 'pack-quantized' cannot be read"):
        parse_config(raw | {"quantization_config": {"format": "pack-quantized"}})
    with pytest.raises(ConfigError, match="'vision_config' must be a table"):
        parse_config(raw | {"vision_config": [1]})


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_token_ids_may_stand_in_the_wrapper_only(golden, name):
    raw = release(golden, name)
    for key in SHARED_KEYS:
        raw["text_config"].pop(key, None)
    assert parse_config(raw).text == parse_config(release(golden, name)).text


def test_kimi_linear_is_spelled_out():
    text = parse_config(KIMI_LINEAR_48B).text
    assert text.attn_res_block_size is None and text.routed_expert_hidden_size is None
    assert not text.latent_moe_use_norm and not text.mla_use_output_gate
    assert text.linear_attn_config.gate_lower_bound is None and not text.linear_attn_config.use_full_rank_gate
    assert text.max_position_embeddings == KIMI_LINEAR_48B["model_max_length"]
    size = count_parameters(text)
    assert (round(size.total / 1e9), round(size.active / 1e9)) == (49, 3)


@pytest.mark.parametrize("key", [key for key in KIMI_LINEAR_48B if key in keys_of(ModelConfig)])
def test_kimi_linear_falls_back_on_nothing_else(key):
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        parse_config(without(KIMI_LINEAR_48B, key))


def test_a_half_k3_under_the_name_of_kimi_linear_is_an_error():
    with pytest.raises(
        ConfigError, match=r"missing key 'activation_situ_beta'.*missing key 'routed_expert_hidden_size'"
    ):
        parse_config(KIMI_LINEAR_48B | {"attn_res_block_size": 12})


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("quantized", [True, False])
def test_our_own_models_read_back_equal(preset, quantized):
    text = resolve_model({"preset": preset})
    raw = json.loads(json.dumps(released_config(text, quantized=quantized)))
    assert parse_config(raw).text == text
    assert ("quantization_config" in raw["text_config"]) == quantized


def test_files_that_are_not_configurations(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    for content, message in [("{", "not valid JSON"), ("[1]", "holds a list"), ("\xff", "not valid JSON")]:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(CheckpointError, match=message):
            read_config(tmp_path)
