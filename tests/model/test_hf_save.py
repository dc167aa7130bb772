"""Writing the released layout: byte for byte back, and whole or absent."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

from moonlet.config import ModelConfig, resolve_model
from moonlet.config.vision import load_vision_preset
from moonlet.errors import CheckpointError, ConfigError, StorageError
from moonlet.model.hf import ExportOptions, export_released, load_released, read_config
from moonlet.model.hf_files import INDEX_NAME, CheckpointFiles
from moonlet.model.hf_layout import layout
from moonlet.model.hf_save import plan_shards
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.model.multimodal import K3Multimodal
from moonlet.ops.mxfp4 import dequantize

RELEASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")) or ["absent"]
TINY = {
    "preset": "nano",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "pad_token_id": 63,
    "bos_token_id": 60,
    "eos_token_id": 61,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16},
}


def tiny(**changes) -> K3:
    model = K3(resolve_model(TINY | changes))
    init_weights(model, seed=1)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_release_comes_back_byte_for_byte(golden, name, tmp_path):
    source = golden.folder / name
    model, report = load_released(source)
    export_released(model, tmp_path / "out", ExportOptions.like(source, report))
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_release_in_the_released_split_has_the_same_tensors(golden, name, tmp_path):
    """Without the source at hand: keys, types and bytes still agree; only the files are cut as released, layer by layer."""
    source = golden.folder / name
    model, _ = load_released(source)
    done = export_released(model, tmp_path / "out")
    with CheckpointFiles(source) as before, CheckpointFiles(tmp_path / "out") as after:
        assert after.headers == before.headers
        for key in before.weight_map:
            assert before.tensor(key).view(torch.uint8).equal(after.tensor(key).view(torch.uint8)), key
    assert len(done.files) == model.config.num_hidden_layers + 3 and done.tensors == len(before.weight_map)
    assert done.total_bytes == json.loads((source / INDEX_NAME).read_text())["metadata"]["total_size"]
    again = read_config(tmp_path / "out")
    assert (again.text, again.media_token_id) == (model.config, model.media_token_id)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_text_half_goes_out_alone(golden, name, tmp_path):
    source = golden.folder / name
    model, report = load_released(source, text_only=True)
    export_released(model, tmp_path / "out", ExportOptions.like(source, report))
    text, again = load_released(tmp_path / "out")
    assert isinstance(text, K3) and again.weight_map == report.weight_map
    with CheckpointFiles(source) as before, CheckpointFiles(tmp_path / "out") as after:
        assert all(torch.equal(before.tensor(key), after.tensor(key)) for key in after.weight_map)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_bytes_of_another_encoder_are_kept(golden, name, tmp_path):
    """Blocks that ours would write with a smaller scale come back as they were, and unchanged neighbours of a change too."""
    source = Path(shutil.copytree(golden.folder / name, tmp_path / "source", copy_function=shutil.copyfile))
    packed = lowered(source)
    model, report = load_released(source)
    export_released(model, tmp_path / "same", ExportOptions.like(source, report))
    assert contents(tmp_path / "same") == contents(source)

    export_released(model, tmp_path / "fresh")
    with CheckpointFiles(source) as before, CheckpointFiles(tmp_path / "fresh") as after:
        scale = packed.removesuffix("packed") + "scale"
        assert not torch.equal(before.tensor(packed), after.tensor(packed)), "the case proves something"
        assert torch.equal(
            dequantize(before.tensor(packed), before.tensor(scale), torch.float32),
            dequantize(after.tensor(packed), after.tensor(scale), torch.float32),
        )


def lowered(folder: Path) -> str:
    """Make one expert tensor of `folder` reach only 3: clear bit 2 of every code, which leaves at most 1.5, and its sign."""
    with CheckpointFiles(folder) as files:
        name = next(key for key in files.weight_map if key.endswith(".weight_packed"))
        file = folder / files.weight_map[name]
    tensors = load_file(file)
    tensors[name] &= 0b1011_1011
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_a_changed_weight_is_written_changed(golden, name, tmp_path):
    source = golden.folder / name
    model, report = load_released(source)
    stacks = {key: value for key, value in model.named_parameters() if key.endswith("experts.w2")}
    changed = next(iter(stacks))
    with torch.no_grad():
        stacks[changed][1] *= 2
    export_released(model, tmp_path / "out", ExportOptions.like(source, report))
    with CheckpointFiles(source) as before, CheckpointFiles(tmp_path / "out") as after:
        differ = {key for key in before.weight_map if not torch.equal(before.tensor(key), after.tensor(key))}
    assert differ == {changed.replace("experts.w2", "experts.1.w2.weight_scale")}, "twice the weight is the next scale"


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("limit", [None, 20_000])
def test_our_own_model_is_stable_after_one_rounding(tmp_path, quantized, limit):
    options = ExportOptions(quantize_experts=quantized, max_shard_bytes=limit)
    model = tiny()
    first = export_released(model, tmp_path / "first", options)
    loaded, report = load_released(tmp_path / "first")
    assert loaded.config == model.config and report.quantized == quantized
    export_released(loaded, tmp_path / "second", options)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    assert len(first.files) > 3
    for name, value in model.state_dict().items():
        step = 0.5 if quantized and ".experts." in name else 2**-8
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=step * value.abs().max().item(), rtol=0)


def test_types_follow_the_released_rule(tmp_path):
    model = tiny(linear_attn_config=TINY["linear_attn_config"] | {"num_heads": 3})
    export_released(model, tmp_path / "out")
    with CheckpointFiles(tmp_path / "out") as files:
        float32 = {key.split(".", 4)[-1] for key, header in files.headers.items() if header.dtype == "F32"}
        assert float32 == {
            "self_attn.A_log",
            "self_attn.dt_bias",
            "self_attn.o_norm.weight",
            *(f"self_attn.{name}_conv1d.weight" for name in "qkv"),
            "block_sparse_moe.gate.e_score_correction_bias",
        }
        packed = {key for key, header in files.headers.items() if header.dtype == "U8"}
        assert all(".experts." in key for key in packed) and packed
        A_log = files.tensor("language_model.model.layers.0.self_attn.A_log")
        assert A_log.shape == (128,) and torch.equal(A_log[:3], model.model.layers[0].self_attn.A_log)
        assert not A_log[3:].any()


def test_split_of_the_released_model():
    config, vision = resolve_model({"preset": "k3"}), load_vision_preset("k3")
    assert vision is not None
    entries = layout(config, vision)
    stored = {entry: len(entry.stored()) for entry in entries}
    files: Counter[str] = Counter()
    for weight, file in plan_shards([weight for entry in entries for weight in entry.weights()]).items():
        files[file] += stored[weight.entry]
    assert len(files) == 96 and sum(files.values()) == 497_220
    counts = [files[f"model-{number:05d}-of-000096.safetensors"] for number in range(1, 97)]
    assert counts[0] == 23 and set(counts[1:93]) == {5404, 5398} and counts[93:] == [5, 3, 165]
    assert [
        number for number, count in enumerate(counts, 1) if count == 5398
    ] == config.linear_attn_config.full_attn_layers


def test_multimodal_model_of_our_own(tmp_path):
    vision = load_vision_preset("k3")
    assert vision is not None
    small = {"vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "vt_hidden_size": 16, "vt_intermediate_size": 32}
    small |= {"qkv_hidden_size": 16, "mm_hidden_size": 16, "text_hidden_size": 32, "init_pos_emb_height": 4}
    model = K3Multimodal(resolve_model(TINY), vision.model_copy(update=small), media_token_id=62)
    init_weights(model.language_model, seed=2)
    export_released(model, tmp_path / "out")
    loaded, _ = load_released(tmp_path / "out")
    assert isinstance(loaded, K3Multimodal) and loaded.media_token_id == 62
    export_released(loaded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None, "mla_use_output_gate": False, "attn_res_block_size": None, "num_shared_experts": 0},
        {"latent_moe_use_norm": False, "routed_expert_hidden_size": None, "tie_word_embeddings": True},
        {"linear_attn_config": TINY["linear_attn_config"] | {"use_full_rank_gate": False, "gate_lower_bound": -1.0}},
    ],
    ids=["attention", "sharing", "low-rank gate"],
)
def test_every_architecture_switch_goes_both_ways(tmp_path, changes):
    model = tiny(**changes)
    export_released(model, tmp_path / "out")
    loaded, report = load_released(tmp_path / "out")
    assert report.loaded == report.expected
    ids = torch.arange(10)[None] + 3
    assert loaded(ids).shape == model(ids).shape
    export_released(loaded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_tokenizer_goes_along_and_an_empty_folder_is_fine(tmp_path):
    tokenizer = tmp_path / "some-tokenizer.json"
    tokenizer.write_text('{"version": "1.0"}')
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left by a killed export").write_text("")
    export_released(tiny(), tmp_path / "out", ExportOptions(tokenizer_path=tokenizer))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", tokenizer.name]


def test_refusals_come_before_anything_is_written(tmp_path):
    model, occupied = tiny(), tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        export_released(model, occupied)
    with pytest.raises(CheckpointError, match="multiples of 32, this model has 64 and 24"):
        export_released(tiny(moe_intermediate_size=24), tmp_path / "out")
    with pytest.raises(CheckpointError, match="weight_map differs from the model in"):
        export_released(model, tmp_path / "out", ExportOptions(weight_map={"lm_head.weight": "x.safetensors"}))
    other = model.config.model_dump() | {"vocab_size": 65}
    with pytest.raises(ConfigError, match="describes another model"):
        export_released(model, tmp_path / "out", ExportOptions(raw=ModelConfig.parse(other).model_dump()))
    assert [path.name for path in tmp_path.iterdir()] == ["occupied"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes beyond it fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 5_000, 12_000])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, limit):
    with file_size_limit(limit), pytest.raises(StorageError, match="free some space"):
        export_released(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
