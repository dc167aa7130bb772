"""Configuration: nothing falls back silently, and every refusal names the key (cases/bugs.md B03, B15)."""

from __future__ import annotations

import tomllib

import pytest

from moonlet.config import ModelConfig, dump_toml, load_preset, load_recipe, preset_names, resolve_model, resolve_run
from moonlet.config.load import apply_overrides
from moonlet.errors import ConfigError


def recipe(**changes):
    table = {
        "name": "x",
        "model": {"preset": "nano"},
        "data": {"sources": [{"name": "code", "kind": "stdlib"}]},
        "stages": [{"name": "short", "seq_len": 64, "tokens": 640, "batch_tokens": 128, "mixture": {"code": 1.0}}],
    }
    return table | changes


@pytest.mark.parametrize("preset", preset_names())
def test_presets_are_complete(preset):
    assert resolve_model({"preset": preset}).num_hidden_layers > 0


def _paths(table, prefix=()):
    for key, value in table.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


@pytest.mark.parametrize("path", list(_paths(load_preset("nano"))), ids=".".join)
def test_each_architecture_field_is_required(path):
    table = load_preset("nano")
    node = table
    for part in path[:-1]:
        node = node[part]
    del node[path[-1]]
    with pytest.raises(ConfigError, match=f"missing key '{'.'.join(path)}'"):
        ModelConfig.parse(table)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"model": {"preset": "nano", "hiden_size": 3}}, "did you mean 'hidden_size'"),
        ({"model": {"preset": "nano", "linear_attn_config": {"gate_lower_bond": -5}}}, "gate_lower_bound"),
        ({"model": {"preset": "nanoo"}}, "did you mean 'nano'"),
        ({"optim": {"muon_rl": 0.1}}, "optim.muon_rl.*did you mean 'muon_lr'"),
        ({"stages": [{"name": "a", "seq_len": 64}]}, "missing key 'stages.0.tokens'"),
        ({"train": {"micro_batch_tokens": 0}}, "train.micro_batch_tokens"),
    ],
)
def test_wrong_keys_are_named(table, expected):
    with pytest.raises(ConfigError, match=expected):
        resolve_run(recipe(**table))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "must name each of the layers"),
        ({"num_experts_per_token": 16}, "less than num_experts"),
        ({"num_expert_group": 3}, "must divide num_experts"),
        ({"activation_situ_beta": "none"}, "needs activation_situ_beta"),
        ({"num_key_value_heads": 4}, "must divide num_attention_heads"),
        ({"linear_attn_config": {"gate_lower_bound": -6.0}}, "gate_lower_bound"),
        ({"pad_token_id": 4096}, "outside the vocabulary"),
    ],
)
def test_impossible_architectures_are_refused(changes, expected):
    with pytest.raises(ConfigError, match=expected):
        resolve_model({"preset": "nano", **changes})


def test_none_is_written_as_a_word():
    model = resolve_model({"preset": "nano", "q_lora_rank": "none", "linear_attn_config": {"gate_lower_bound": "none"}})
    assert model.q_lora_rank is None and model.linear_attn_config.gate_lower_bound is None
    run = resolve_run(recipe(model={"preset": "nano", "q_lora_rank": "none"}))
    assert resolve_run(tomllib.loads(dump_toml(run))) == run


def test_resolved_recipe_reads_back_equal(tmp_path):
    run = resolve_run(recipe(optim={"groups": {"*.o_proj.weight": "adamw"}}))
    (tmp_path / "r.toml").write_text(dump_toml(run))
    assert load_recipe(tmp_path / "r.toml") == run


def test_overrides_reach_into_tables_and_lists(tmp_path):
    table = apply_overrides(
        recipe(), ["stages.0.tokens=1280", "model.vocab_size=4096", "name=other", "optim.muon_lr=0.5"]
    )
    run = resolve_run(table)
    assert run.stages[0].tokens == 1280 and run.name == "other" and run.optim.muon_lr == 0.5
    assert run.model.vocab_size == 4096


@pytest.mark.parametrize("override", ["stages.3.tokens=1", "name.x=1", "name"])
def test_wrong_overrides_are_refused(override):
    with pytest.raises(ConfigError, match="override"):
        resolve_run(apply_overrides(recipe(), [override]))


def test_a_missing_or_malformed_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_recipe(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_a_stage_that_mixes_an_unknown_source_is_refused():
    stage = {"name": "a", "seq_len": 64, "tokens": 64, "batch_tokens": 64, "mixture": {"books": 1.0}}
    with pytest.raises(ConfigError, match="'books'"):
        resolve_run(recipe(stages=[stage]))


def test_none_switches_off_what_may_be_off_in_every_section():
    run = resolve_run(apply_overrides(recipe(), ["optim.qk_clip_threshold=none"]))
    assert run.optim.qk_clip_threshold is None
    assert resolve_run(tomllib.loads(dump_toml(run))) == run


def test_names_may_look_like_numbers():
    run = resolve_run(apply_overrides(recipe(), ["name=2024", "stages.0.name=256"]))
    assert (run.name, run.stages[0].name) == ("2024", "256")


def test_two_stages_of_one_name_and_a_negative_seed_are_refused():
    stage = recipe()["stages"][0]
    with pytest.raises(ConfigError, match="two stages have the same name"):
        resolve_run(recipe(stages=[stage, stage]))
    with pytest.raises(ConfigError, match="seed"):
        resolve_run(recipe(seed=-1))
