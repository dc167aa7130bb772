"""Loading released checkpoints: golden logits, and every way in which a folder can be wrong (B13, B14)."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, golden_stems
from safetensors.torch import load_file, save_file

from moonlet.config import resolve_model
from moonlet.errors import CheckpointError
from moonlet.model.hf import ExportOptions, export_released, load_released
from moonlet.model.hf_files import INDEX_NAME, SINGLE_NAME
from moonlet.model.hf_layout import layout
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.model.multimodal import K3Multimodal

RELEASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")) or ["absent"]
LOGITS = {"atol": 2e-4, "rtol": 2e-4}
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
    "routed_expert_hidden_size": 32,
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16},
}


def release_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE_NAME)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copy_release(golden, name, tmp_path) -> Path:
    return Path(shutil.copytree(golden.folder / name, tmp_path / "copy", copy_function=shutil.copyfile))


@pytest.fixture
def release(golden, request, tmp_path):
    """(folder to write to, tensors, configuration) of a golden release."""
    source = golden.folder / request.param
    return tmp_path / "folder", release_tensors(source), json.loads((source / "config.json").read_text())


each_release = pytest.mark.parametrize("release", RELEASES, indirect=True)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_release_gives_its_logits(golden, name, caplog):
    with caplog.at_level(logging.INFO, logger="moonlet"):
        model, report = load_released(golden.folder / name)
    assert isinstance(model, K3Multimodal) and not model.training
    count = golden.info(f"{name}_expected")["n_tensors"]
    assert report.loaded == report.expected == count
    assert f"{count} loaded / {count} expected" in caplog.text
    expected = golden.tensors(f"{name}_expected")
    for case in sorted({key.split("/")[0] for key in expected}):
        want = golden.tensors(f"{name}_expected", case)
        with torch.no_grad():
            logits = model(want["input_ids"], want.get("pixel_values"), want.get("grid_thws", ()))
        torch.testing.assert_close(logits, want["logits"], **LOGITS)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_text_half_alone(golden, name):
    whole, _ = load_released(golden.folder / name)
    text, report = load_released(golden.folder / name, text_only=True)
    assert isinstance(text, K3) and report.skipped > 0
    for name, value in text.state_dict().items():
        assert torch.equal(value, whole.state_dict()[f"language_model.{name}"]), name


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("g_text_*"))
def test_golden_plain_folders_give_their_logits_and_loss(golden, stem, tmp_path):
    """No prefix, no index, float32 experts; the loss of the first step is that of the weights, not of a lost head."""
    info, everything = golden.info(stem), golden.tensors(stem)
    if (golden.folder / f"{stem}.weights.json").is_file():
        config, weights = golden.info(f"{stem}.weights"), golden.tensors(f"{stem}.weights")
    else:
        config, weights = info["config"], golden.tensors(stem, "param")
    model, report = load_released(write_folder(tmp_path / "plain", weights, config))
    assert report.loaded == len(weights) and not report.quantized
    compared = 0
    for run in sorted({name.split("/")[0] for name in everything if name.endswith("/logits")}):
        want = golden.tensors(stem, run)
        if "input_ids" in want and "attention_mask" not in want:
            logits = model(want["input_ids"])
            torch.testing.assert_close(logits, want["logits"], **LOGITS)
            compared += 1
            if "loss" in want:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), want["labels"][:, 1:].flatten())
                torch.testing.assert_close(loss.view(-1), want["loss"].view(-1), **LOGITS)
    assert compared


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_float_experts_under_the_prefix(golden, stem, tmp_path):
    info, weights = golden.info(f"{stem}.weights"), golden.tensors(f"{stem}.weights")
    model, report = load_released(write_folder(tmp_path / "plain", weights, info))
    assert isinstance(model, K3Multimodal) and report.loaded == len(weights)
    for case in sorted({name.split("/")[0] for name in golden.tensors(stem) if name.endswith("/merged_embeds")}):
        want = golden.tensors(stem, case)
        logits = model(want["input_ids"], want["pixel_values"], want["grid_thws"], want["attention_mask"])
        torch.testing.assert_close(logits, want["logits"], **LOGITS)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_bfloat16_keeps_what_is_released_as_float32(golden, name):
    full, _ = load_released(golden.folder / name)
    half, _ = load_released(golden.folder / name, dtype=torch.bfloat16)
    float32 = {weight.parameter for entry in layout(full.config) if entry.dtype == "F32" for weight in entry.weights()}
    named = dict(half.named_parameters()) | dict(half.named_buffers())
    for name, value in (dict(full.named_parameters()) | dict(full.named_buffers())).items():
        dtype = torch.float32 if name.removeprefix("language_model.") in float32 else torch.bfloat16
        assert named[name].dtype == dtype, name
        assert torch.equal(named[name].float(), value.detach()), f"{name} is stored in 16 bits at most"


@pytest.mark.golden
@each_release
def test_golden_A_log_in_every_stored_form(release):
    folder, tensors, config = release
    name = next(key for key in tensors if key.endswith(".A_log"))
    heads, padded = config["text_config"]["linear_attn_config"]["num_heads"], tensors[name]
    reference, _ = load_released(write_folder(folder, tensors, config))
    for form in (padded[:heads], padded[: heads + 1], padded[:heads].view(1, 1, heads, 1)):
        model, _ = load_released(write_folder(folder, tensors | {name: form.clone()}, config))
        assert torch.equal(model.get_parameter(name), reference.get_parameter(name))
    for tail in (1e-3, math.nan):
        wrong = padded.clone()
        wrong[-1] = tail
        with pytest.raises(CheckpointError, match=r"A_log has 128 entries for \d+ heads, and the rest is not zero"):
            load_released(write_folder(folder, tensors | {name: wrong}, config))
    with pytest.raises(CheckpointError, match=r"wrong shape .*A_log"):
        load_released(write_folder(folder, tensors | {name: padded[: heads - 1].clone()}, config))


def kinds_in_batches(tensors: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """One tensor of each kind, in batches small enough for an error message that lists them all."""
    kinds: dict[str, str] = {}
    for name in sorted(tensors):
        kinds.setdefault(".".join("N" if part.isdigit() else part for part in name.split(".")), name)
    return list(batched(kinds.values(), 20))


def batched(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    names = iter(names)
    while batch := tuple(islice(names, size)):
        yield batch


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_released(folder)
    return str(caught.value)


@pytest.mark.golden
@each_release
def test_golden_every_kind_of_missing_tensor_is_named(release):
    folder, tensors, config = release
    for names in kinds_in_batches(tensors):
        rest = {key: value for key, value in tensors.items() if key not in names}
        message = refusal(write_folder(folder, rest, config))
        assert all(f"missing {name}" in message for name in names)


@pytest.mark.golden
@each_release
def test_golden_unexpected_tensors_are_named_all_at_once(release):
    folder, tensors, config = release
    layers = config["text_config"]["num_hidden_layers"]
    extra = [
        "language_model.lm_haed.weight",
        f"language_model.model.layers.{layers}.input_layernorm.weight",
        "head.bias",
    ]
    with pytest.raises(CheckpointError) as caught:
        load_released(write_folder(folder, tensors | {name: torch.zeros(1) for name in extra}, config))
    assert all(f"unexpected {name}" in str(caught.value) for name in extra)
    assert f"{len(tensors)} found / {len(tensors)} expected" in str(caught.value)


@pytest.mark.golden
@each_release
def test_golden_a_head_under_another_name_is_not_a_random_head(release):
    folder, tensors, config = release
    renamed = {
        name.replace("language_model.lm_head", "language_model.model.lm_head"): value for name, value in tensors.items()
    }
    with pytest.raises(
        CheckpointError, match=r"(?s)missing language_model\.lm_head.*unexpected language_model\.model\.lm_head"
    ):
        load_released(write_folder(folder, renamed, config))


@pytest.mark.golden
@each_release
def test_golden_wrong_shapes_and_types_are_named(release):
    folder, tensors, config = release
    for names in kinds_in_batches(tensors):
        taller = {name: torch.cat([tensors[name], tensors[name][:1]]) for name in names if not name.endswith("A_log")}
        message = refusal(write_folder(folder, tensors | taller, config))
        assert all(f"wrong shape {name}: {list(value.shape)}, expected" in message for name, value in taller.items())
        other = {name: torch.int8 if tensors[name].is_floating_point() else torch.float32 for name in names}
        message = refusal(
            write_folder(folder, tensors | {name: tensors[name].to(other[name]) for name in names}, config)
        )
        assert all(f"wrong type {name}: " in message for name in names)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_missing_shard_is_named(golden, name, tmp_path):
    folder = copy_release(golden, name, tmp_path)
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of \\d+ files: {gone.name}"):
        load_released(folder)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("kept", [0, 4, 100, -1000, -1])
def test_golden_shard_cut_short_is_named(golden, name, tmp_path, kept):
    folder = copy_release(golden, name, tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{shard.name}' is cut short"):
        load_released(folder)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_index_faults(golden, name, tmp_path):
    folder = copy_release(golden, name, tmp_path)
    index = json.loads((folder / INDEX_NAME).read_text())
    first, *rest = index["weight_map"]
    index["weight_map"] = {key: index["weight_map"][key] for key in rest}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"disagree about 1 tensors: {first}"):
        load_released(folder)
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    both = load_file(two)
    save_file(both | dict([next(iter(load_file(one).items()))]), two)
    with pytest.raises(CheckpointError, match=f"is in both {one.name} and {two.name}"):
        load_released(folder)
    (folder / INDEX_NAME).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="not an index"):
        load_released(folder)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
        load_released(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_released(folder)


def test_a_trained_model_is_still_trained_after_export_and_import(tmp_path):
    """B14: the first loss of a loaded model is that of the model that was saved, far below a random head's ln V."""
    model = K3(resolve_model(TINY))
    init_weights(model, seed=0)
    ids = torch.arange(24).repeat(2, 2) % 11 + 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    def loss_of(candidate) -> torch.Tensor:
        return F.cross_entropy(candidate(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    for _ in range(12):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    export_released(model, tmp_path / "out", ExportOptions(quantize_experts=False))
    loaded, report = load_released(tmp_path / "out")
    before, after = loss_of(model).item(), loss_of(loaded).item()
    assert report.loaded == report.expected
    assert after < math.log(model.config.vocab_size) - 1 and after == pytest.approx(before, abs=0.1)


_MEASURE = """
import re, sys
from pathlib import Path
from moonlet.model.hf import load_released
# Not ru_maxrss: that of the parent is inherited.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
model, _ = load_released(Path(sys.argv[1]))
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((peak() - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_holds_the_model_in_memory_once(tmp_path):
    """Peak memory of a process that loads 50 MB of float32 weights from MXFP4 and BF16 files."""
    wide = {"num_experts": 12, "moe_intermediate_size": 512, "routed_expert_hidden_size": 320, "vocab_size": 20_000}
    model = K3(resolve_model(TINY | wide))
    init_weights(model, seed=0)
    export_released(model, tmp_path / "out")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 40e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    # The mapped files count too (0.2 here), and what is loaded late. Below 0.9 the measurement itself would be wrong.
    assert 0.9 < float(done.stdout) < 1.7
