"""`moonlet run` from a recipe to a report on real text, as a user calls it; interrupted and resumed to the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = """
name = "tiny"
[model]
preset = "nano"
vocab_size = 512
pad_token_id = 511
bos_token_id = 496
eos_token_id = 498
hidden_size = 32
intermediate_size = 32
moe_intermediate_size = 16
routed_expert_hidden_size = 16
num_experts = 4
num_experts_per_token = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
[model.linear_attn_config]
head_dim = 16
num_heads = 2
[data]
max_bytes = 300_000
heldout_fraction = 0.1
sources = [{ name = "code", kind = "stdlib" }]
[[stages]]
name = "short"
seq_len = 64
tokens = 2560
batch_tokens = 256
mixture = { code = 1.0 }
[[stages]]
name = "long"
seq_len = 256
tokens = 2560
batch_tokens = 512
mixture = { code = 1.0 }
[train]
micro_batch_tokens = 256
checkpoint_every = 3
log_every = 1
[eval]
heldout_tokens = 600
prompts = ["def "]
sample_tokens = 8
"""


def moonlet(*arguments: str, cwd: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "moonlet", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "tiny.toml").write_text(RECIPE)
    code, out, err = finish(moonlet("run", "tiny.toml", cwd=folder))
    assert code == 0, err
    assert "held-out bits per byte" in out and "report.html" in out
    return folder


def test_a_run_leaves_a_report_and_its_figures(straight):
    run = straight / "runs" / "tiny"
    results = json.loads((run / "results.json").read_text())
    heldout = json.loads((run / "eval" / "heldout.json").read_text())
    assert [stage["stage"] for stage in heldout["by_stage"]] == ["short", "long"]
    assert set(heldout["compressors"]) == {"xz", "gzip", "bz2"}
    assert results["headline"]
    page = (run / "report.html").read_text()
    assert "<html" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert (straight / "runs" / "latest").resolve() == run.resolve()
    steps = [step for step, _ in losses(run)]
    assert steps == list(range(1, 16))


def test_killed_and_resumed_to_the_same_numbers(straight, tmp_path):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    process = moonlet("run", "tiny.toml", cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    deadline = time.monotonic() + 200
    while not (run / "checkpoints" / "step_6" / "COMPLETE").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = finish(moonlet("run", "tiny.toml", cwd=tmp_path))
    assert code == 1 and "--resume" in err, "a second run must not overwrite the first"
    code, _, err = finish(moonlet("run", "tiny.toml", "--resume", cwd=tmp_path))
    assert code == 0, err
    assert losses(run) == losses(straight / "runs" / "tiny")
    for name in ("heldout", "samples"):
        left, right = (folder / "runs" / "tiny" / "eval" / f"{name}.json" for folder in (tmp_path, straight))
        assert left.read_text() == right.read_text()


def test_a_dry_run_prints_the_resolved_recipe_and_writes_nothing(tmp_path):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    code, out, _ = finish(moonlet("run", "tiny.toml", "stages.0.tokens=512", "--dry-run", cwd=tmp_path))
    assert code == 0 and "tokens = 512" in out and "vocab_size = 512" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("optim.muon_rl=0.1", "did you mean 'muon_lr'"),
        ("model.hidden_sise=3", "did you mean 'hidden_size'"),
        ('data.sources=[{name="code",kind="text",path="nothing-here"}]', "nothing-here"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(tmp_path, change, expected):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    code, _, err = finish(moonlet("run", "tiny.toml", change, cwd=tmp_path))
    assert code == 1 and expected in err and "Traceback" not in err
