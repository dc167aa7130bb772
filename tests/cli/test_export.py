"""`moonlet export`: a checkpoint of a run goes out in the released layout and comes back as the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moonlet.cli import main as cli
from moonlet.config import resolve_run
from moonlet.model.hf import ExportOptions, export_released, load_released
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.text.tokenizer import train_tokenizer
from moonlet.train.checkpoint import Checkpoint, save_checkpoint

MODEL = {"preset": "nano", "vocab_size": 300, "pad_token_id": 299, "bos_token_id": 284, "eos_token_id": 285}
RECIPE = {
    "name": "tiny",
    "model": MODEL,
    "data": {"sources": [{"name": "stdlib", "kind": "stdlib"}]},
    "stages": [{"name": "one", "seq_len": 16, "tokens": 32, "batch_tokens": 32, "mixture": {"stdlib": 1.0}}],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one checkpoint of an untrained model."""
    config = resolve_run(RECIPE)
    model = K3(config.model)
    init_weights(model, seed=3)
    tokenizer = train_tokenizer(["some words, some more words and a few others"] * 3, config.model.vocab_size)
    tokenizer.save(tmp_path / "tokenizer.json")
    state = {"step": 7, "config": config.model_dump(mode="json"), "tokenizer_hash": tokenizer.hash}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    folder = tmp_path / "run" / "checkpoints"
    save_checkpoint(folder, Checkpoint(weights, {}, state, (tmp_path / "tokenizer.json").read_bytes()))
    return tmp_path / "run"


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("flags", [[], ["--plain"], ["--max-shard-mb", "1"]], ids=["released", "plain", "small shards"])
def test_a_run_goes_out_and_comes_back(run, tmp_path, flags):
    result = invoke(run, tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output
    model, report = load_released(tmp_path / "out")
    assert report.quantized == ("--plain" not in flags)
    assert f"{report.loaded} tensors" in result.output
    assert model.config == resolve_run(RECIPE).model
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert model(torch.arange(12)[None]).isfinite().all()
    options = ExportOptions.like(tmp_path / "out", report, tmp_path / "out" / "tokenizer.json")
    export_released(model, tmp_path / "again", options)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_problems_are_one_message(run, tmp_path):
    assert "no run directory" in invoke(tmp_path / "nowhere", tmp_path / "out").output
    assert not (tmp_path / "out").exists()
    result = invoke(run, run)
    assert result.exit_code == 1 and "not an empty folder" in result.output
