"""Counts by formula against the released figures and against the modules themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import GOLDEN, golden_stems

from moonlet.config import ModelConfig, preset_names, resolve_model
from moonlet.config.vision import load_vision_preset
from moonlet.model.hf_layout import TEXT_PREFIX, VISION_PREFIXES, layout
from moonlet.model.size import count_built, count_parameters

PATTERNS = Path(os.environ.get("MOONLET_SPEC") or GOLDEN.parent / "spec") / "real_tensor_patterns.json"


def test_released_model_has_the_released_size():
    size = count_parameters(resolve_model({"preset": "k3"}), load_vision_preset("k3"))
    assert size.text == 2_779_484_476_000
    assert size.total == 2_779_931_834_976
    assert size.active == 104_189_612_640
    assert size.checkpoint_bytes == sum(size.bytes_by_part.values()) == 1_560_860_324_864
    assert size.tensors == 497_220
    assert size.parts["routed experts"] == 2_722_740_830_208
    assert size.bytes_by_part["routed experts"] == 1_446_456_066_048
    assert size.decode.kda_state == 434_110_464 and size.decode.mla_per_token == 27_648


def test_text_alone_counts_the_same_without_vision():
    config = resolve_model({"preset": "k3"})
    both, text = count_parameters(config, load_vision_preset("k3")), count_parameters(config)
    assert (text.total, text.active) == (both.text, both.active)


def test_every_released_tensor_has_its_shape_and_type():
    if not PATTERNS.is_file():
        pytest.skip(f"the released tensor table is not at {PATTERNS}")
    mine: dict[str, dict] = {}
    for entry in layout(resolve_model({"preset": "k3"}), load_vision_preset("k3")):
        for name, shape, dtype in entry.stored():
            name = name.replace("{layer}", "{i}").replace("{expert}", "{i}")
            name = name if name.startswith(VISION_PREFIXES) else TEXT_PREFIX + name
            count = mine.get(name, {"count": 0})["count"] + entry.copies
            mine[name] = {"count": count, "shape": list(shape), "dtype": dtype}
    assert mine == json.loads(PATTERNS.read_text())


@pytest.mark.parametrize("preset", preset_names())
def test_formula_equals_the_modules(preset):
    config, vision = resolve_model({"preset": preset}), load_vision_preset(preset)
    assert count_parameters(config, vision).total == count_built(config, vision)


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("g_text*"))
def test_golden_formula_equals_the_modules_of_every_variant(golden, stem):
    info = golden.info(stem)
    config = ModelConfig.parse(info.get("config") or golden.info(f"{stem}.weights"))
    assert count_parameters(config).total == count_built(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None, "mla_use_output_gate": False, "linear_attn_config": {"use_full_rank_gate": False}},
        {"attn_res_block_size": None, "routed_expert_hidden_size": None},
        {"num_key_value_heads": 1, "num_shared_experts": 0, "latent_moe_use_norm": False},
        {"first_k_dense_replace": 2, "moe_layer_freq": 3, "tie_word_embeddings": True},
    ],
    ids=["attention", "residuals", "sharing", "layers"],
)
def test_formula_follows_every_architecture_switch(changes):
    config = resolve_model({"preset": "nano"} | changes)
    assert count_parameters(config).total == count_built(config)


def test_flops_grow_with_the_context_and_weights_do_not():
    config = resolve_model({"preset": "nano"})
    short, long = (count_parameters(config, context=context).flops for context in (1024, 2048))
    assert long.weights == short.weights == 2 * count_parameters(config).active
    assert long.mla == 2 * short.mla and long.kda == short.kda
