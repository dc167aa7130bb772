"""`moonlet train`: the table of --explain, and the flags of resuming."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny_run

from moonlet.config import dump_toml, load_recipe

ROOT = Path(__file__).resolve().parents[2]


def moonlet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonlet", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_explain_names_the_group_of_every_parameter():
    done = moonlet("--explain", ROOT / "recipes" / "laptop.toml")
    assert done.returncode == 0, done.stderr
    groups = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if len(line.split()) > 5}
    assert groups["model.layers.0.self_attn.q_proj.weight"] == "muon_per_head"
    assert groups["model.layers.1.block_sparse_moe.experts.w13"] == "muon"
    assert groups["model.embed_tokens.weight"] == groups["lm_head.weight"] == "adamw"


def test_a_wrong_pattern_is_one_message():
    done = moonlet("--explain", ROOT / "recipes" / "laptop.toml", 'optim.groups={"*.q_prjo.weight"="adamw"}')
    assert done.returncode == 1 and "matches no parameter" in done.stderr and "Traceback" not in done.stderr


def test_train_resume_and_reset(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    tiny_run.write_texts(tmp_path / "texts")
    recipe, run = tmp_path / "tiny.toml", tmp_path / "run"
    stages = [{"name": "a", "seq_len": 32, "tokens": 512, "batch_tokens": 64, "mixture": {"text": 1}}]
    recipe.write_text(dump_toml(tiny_run.config(tmp_path / "texts", stages=stages)))
    done = moonlet(recipe, "--out", run)
    assert done.returncode == 0, done.stderr
    assert "step 8/8" in done.stdout and (run / "checkpoints" / "step_8").is_dir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in metrics} >= {"train", "heldout"}
    assert moonlet(recipe, "--out", run).returncode == 1
    changed = ("stages.0.tokens=640", 'optim.groups={"*o_proj.weight"="adamw"}')
    refused = moonlet(recipe, *changed, "--out", run, "--resume")
    assert refused.returncode == 1 and "--reset-optimizer" in refused.stderr
    done = moonlet(recipe, *changed, "--out", run, "--resume", "--reset-optimizer")
    assert done.returncode == 0 and (run / "checkpoints" / "step_10").is_dir(), done.stderr
    assert load_recipe(run / "config.resolved.toml").stages[0].tokens == 640
