"""Whole runs: straight, killed, interrupted, resumed, on one rank and on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from moonlet.config import RunConfig, load_recipe
from moonlet.errors import CheckpointError, ConfigError, NonFiniteError
from moonlet.train.checkpoint import Checkpoint, latest_complete, load_checkpoint
from moonlet.train.pretrain import choose_dtype, pretrain
from moonlet.train.rundir import RunDirectory

SCRIPT = Path(tiny_run.__file__)


def run_on(corpus_folder: Path, root: Path) -> RunDirectory:
    """A run directory with the prepared corpus in it."""
    root.mkdir()
    (root / "data").symlink_to(corpus_folder)
    return RunDirectory(root)


@pytest.fixture
def new_run(tmp_path: Path, corpus_folder: Path) -> Any:
    """`new_run(name)` -> a run directory that nothing has happened in."""
    return lambda name: run_on(corpus_folder, tmp_path / name)


@pytest.fixture(scope="module")
def straight_run(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`straight_run(num_processes)` -> the run of 20 steps that was never stopped."""
    folder = tmp_path_factory.mktemp("straight")

    @cache
    def build(num_processes: int) -> RunDirectory:
        config = tiny_run.config(corpus_folder.parent / "texts", train={"num_processes": num_processes})
        run = run_on(corpus_folder, folder / str(num_processes))
        pretrain(config, run, open_sink=tiny_run.open_told)
        return run

    return build


def start(config: RunConfig, run: RunDirectory, how: str, kill_at: int | None = None) -> subprocess.Popen[str]:
    """The run as a process of its own."""
    table = run.root / "config.json"
    table.write_text(json.dumps(config.model_dump(mode="json")))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "TINY_RUN_KILL_AT": str(kill_at or "")}
    command = [sys.executable, str(SCRIPT), str(table), str(run.root), how]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def final(run: RunDirectory) -> Checkpoint:
    return load_checkpoint(latest_complete(run.checkpoints))


def assert_same_end(ours: RunDirectory, theirs: RunDirectory) -> None:
    """Bit for bit: losses, weights, optimiser, place in the data."""
    assert tiny_run.losses(ours.root) == tiny_run.losses(theirs.root)
    left, right = final(ours), final(theirs)
    assert left.step == right.step
    assert left.state["data"] == right.state["data"]
    for a, b in ((left.model, right.model), (left.optimizer, right.optimizer)):
        assert a.keys() == b.keys()
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_run_resumes_to_the_same_numbers(recipe: Any, new_run: Any, straight_run: Any, num_processes: int):
    """B40: 20 straight steps equal 12 + kill -9 + resume from step 10."""
    config, killed = recipe(train={"num_processes": num_processes}), new_run("killed")
    process = start(config, killed, "fresh", kill_at=13)
    assert process.wait(timeout=200) == -signal.SIGKILL
    assert max(tiny_run.losses(killed.root)) == 12
    assert latest_complete(killed.checkpoints).name == "step_10"
    pretrain(config, killed, resume=True, open_sink=tiny_run.open_told)
    assert sorted(tiny_run.losses(killed.root)) == list(range(1, 21))
    assert_same_end(killed, straight_run(num_processes))
    resumed = [line for line in tiny_run.told(killed.root) if line.get("event") in ("resume", "done")]
    assert [line["step"] for line in resumed] == [10, 20]


def test_two_ranks_learn_what_one_learns(straight_run: Any):
    alone, together = straight_run(1), straight_run(2)
    ours, theirs = tiny_run.losses(together.root), tiny_run.losses(alone.root)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=2e-3)
    assert theirs[20] < theirs[1] - 1.5
    assert final(together).state["data"] == final(alone).state["data"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_interrupt_finishes_the_step_and_saves(recipe: Any, new_run: Any, num_processes: int):
    run = new_run("run")
    process = start(recipe(train={"num_processes": num_processes, "checkpoint_every": 1000}), run, "fresh")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (told_steps := tiny_run_steps(run)):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130
    assert process.stderr is not None and "Traceback" not in process.stderr.read()
    last = tiny_run.told(run.root)[-1]
    assert last == {"event": "interrupt", "step": max(tiny_run.losses(run.root))}
    assert final(run).step == last["step"] >= told_steps[0]


def tiny_run_steps(run: RunDirectory) -> list[int]:
    return list(tiny_run.losses(run.root)) if (run.root / "told.jsonl").exists() else []


def test_checkpoints_and_measurements_at_their_steps(recipe: Any, new_run: Any):
    run, seen = new_run("run"), []

    def measure(model: Any, corpus: Any, stage: Any, is_over: bool) -> list[dict[str, Any]]:
        seen.append((stage.name, is_over))
        model.eval()
        return [{"kind": "heldout", "bits_per_byte": 1.0, "loss": 2.0}]

    config = recipe(train={"heldout_every": 8, "log_every": 4, "keep_last": 1, "keep_every": 6})
    pretrain(config, run, open_sink=tiny_run.open_told, measure=measure)
    assert seen == [("short", False), ("short", True), ("long", False), ("long", True)]
    told = tiny_run.told(run.root)
    heldout = [(line["step"], line["stage"], line["tokens"]) for line in told if line.get("kind") == "heldout"]
    assert heldout == [(8, "short", 2048), (10, "short", 2560), (16, "long", 4096), (20, "long", 5120)]
    assert list(tiny_run.losses(run.root)) == [1, 4, 8, 10, 12, 16, 20]
    kept = sorted(int(path.name.removeprefix("step_")) for path in run.checkpoints.iterdir())
    assert kept == [6, 10, 12, 15, 18, 20]  # permanent: 6, 12, 18 and the ends of stages; of 5 and 15 the newest
    line = next(line for line in told if line.get("step") == 20 and line.get("kind") == "train")
    assert len(line["grad_norm_by_layer"]) == 4 and len(line["expert_load"]["model.layers.1"]) == 8
    assert line["qk_max_logit"] > 0 and line["tokens"] == 5120 and line["tokens_per_s"] > 0
    done = tiny_run.told(run.root)
    pretrain(config, run, resume=True, open_sink=tiny_run.open_told)
    assert tiny_run.losses(run.root).keys() == {1, 4, 8, 10, 12, 16, 20}
    assert [line["event"] for line in tiny_run.told(run.root)[len(done) :]] == ["start", "resume", "done"]


def test_resuming_before_the_first_checkpoint_starts_afresh(recipe: Any, new_run: Any):
    stages = [{"name": "a", "seq_len": 32, "tokens": 128, "batch_tokens": 64, "mixture": {"text": 1}}]
    fresh, resumed = new_run("fresh"), new_run("resumed")
    pretrain(recipe(stages=stages), fresh, open_sink=tiny_run.open_told)
    pretrain(recipe(stages=stages), resumed, resume=True, open_sink=tiny_run.open_told)
    assert_same_end(resumed, fresh)


def test_another_grouping_needs_the_optimiser_reset(recipe: Any, new_run: Any):
    """B37: a checkpoint whose optimiser state does not fit names the parameter and the flag."""
    stages = [{"name": "a", "seq_len": 32, "tokens": 256, "batch_tokens": 64, "mixture": {"text": 1}}]
    run = new_run("run")
    pretrain(recipe(stages=stages), run)
    longer = [{**stages[0], "tokens": 512}]
    changed = recipe(stages=longer, optim={"groups": {"*o_proj.weight": "adamw"}})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight'.*--reset-optimizer"):
        pretrain(changed, run, resume=True)
    assert not run.config_path.exists() or load_recipe(run.config_path) != changed
    pretrain(changed, run, resume=True, reset_optimizer=True, open_sink=tiny_run.open_told)
    warning = next(line for line in tiny_run.told(run.root) if line.get("event") == "warning")
    assert "stages.0.tokens" in warning["message"] and "optim.groups" in warning["message"]
    assert final(run).step == 8


@pytest.mark.parametrize(("adam_lr", "message"), [(1e38, "nothing was saved"), (1e18, "nothing was updated")])
def test_a_run_that_blows_up_saves_no_broken_weights(recipe: Any, new_run: Any, adam_lr: float, message: str):
    run = new_run("run")
    with pytest.raises(NonFiniteError, match=message):
        pretrain(recipe(optim={"adam_lr": adam_lr}, train={"checkpoint_every": 1}), run)
    for path in run.checkpoints.glob("step_*"):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in load_checkpoint(path).model.values())


def test_exact_balancing_needs_one_rank(recipe: Any, new_run: Any):
    with pytest.raises(ConfigError, match=r"balance\.method 'exact'"):
        pretrain(recipe(balance={"method": "exact"}, train={"num_processes": 2}), new_run("run"))


def test_precision_follows_the_hardware():
    cpu = torch.device("cpu")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert choose_dtype("auto", cpu) == (torch.bfloat16 if has_bf16 else torch.float32)
    assert choose_dtype("bf16", cpu) == torch.bfloat16
    assert choose_dtype("fp32", cpu) == torch.float32
