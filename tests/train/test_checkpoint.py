"""Checkpoints are whole or not there: kills, cuts, full disks."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moonlet.errors import CheckpointError, NoCheckpointError, StorageError
from moonlet.train.checkpoint import (
    MARKER,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    complete_checkpoints,
    latest_complete,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    what_is_wrong,
)

FILES = [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TOKENIZER_FILE]


def checkpoint(step: int, numbers: int = 1000) -> Checkpoint:
    """Contents that depend on the step, so that a mixture of two would be noticed."""
    model = {f"layer{index}": torch.full((numbers,), float(step)) for index in range(5)}
    optimizer = {"a/b": torch.full((3, 4), step), "step": torch.tensor(float(step))}
    return Checkpoint(model, optimizer, {"step": step, "data": {"rows": [step]}}, f"tokenizer {step}".encode())


def assert_whole(path: Path) -> int:
    loaded = load_checkpoint(path)
    expected = checkpoint(loaded.step)
    for ours, theirs in ((loaded.model, expected.model), (loaded.optimizer, expected.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].flatten()[:3], tensor.flatten()[:3]) for name, tensor in theirs.items())
    assert (loaded.state, loaded.tokenizer) == (expected.state, expected.tokenizer)
    return loaded.step


def test_what_is_saved_comes_back(tmp_path: Path):
    path = save_checkpoint(tmp_path, checkpoint(7))
    assert path == tmp_path / "step_7" == latest_complete(tmp_path)
    assert assert_whole(path) == 7
    assert load_checkpoint(path, with_optimizer=False).optimizer == {}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_complete_step_is_not_written_again(tmp_path: Path):
    path = save_checkpoint(tmp_path, checkpoint(7))
    before = (path / MODEL_FILE).stat().st_mtime_ns
    save_checkpoint(tmp_path, checkpoint(7))
    assert (path / MODEL_FILE).stat().st_mtime_ns == before
    (path / MODEL_FILE).write_bytes(b"cut")
    assert assert_whole(save_checkpoint(tmp_path, checkpoint(7))) == 7


@pytest.mark.parametrize("damage", ["cut", "gone", "marker gone", "marker torn"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: str):
    """B43: the newest complete one is chosen; the damaged one is refused when named."""
    save_checkpoint(tmp_path, checkpoint(1))
    newest = save_checkpoint(tmp_path, checkpoint(2))
    target = newest / (MARKER if damage.startswith("marker") else name)
    if damage.endswith("gone"):
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[:-3])
    assert what_is_wrong(newest) is not None
    assert assert_whole(latest_complete(tmp_path)) == 1
    with pytest.raises(CheckpointError, match=r"not a usable checkpoint.*delete or move that folder"):
        load_checkpoint(newest)


@pytest.mark.parametrize("name", FILES)
def test_changed_bytes_are_found(tmp_path: Path, name: str):
    path = save_checkpoint(tmp_path, checkpoint(1))
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        load_checkpoint(path)


def test_nothing_to_resume_from(tmp_path: Path):
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(NoCheckpointError):
            latest_complete(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "step_3")


def test_steps_are_ordered_by_number(tmp_path: Path):
    for step in (9, 10, 100):
        save_checkpoint(tmp_path, checkpoint(step))
    (tmp_path / "step_1000.tmp").mkdir()
    (tmp_path / "step_old").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]


def test_rolling_ones_go_and_permanent_ones_stay(tmp_path: Path):
    for step in range(1, 8):
        save_checkpoint(tmp_path, checkpoint(step), permanent=step in (2, 4))
    (tmp_path / "step_9.tmp").mkdir()
    prune_checkpoints(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_4", "step_6", "step_7"]


def test_sigkill_at_random_moments_of_saving(tmp_path: Path):
    """B43: whatever the moment, what resume would take is whole, and no older than the last finished save."""
    random_moment = random.Random(0)
    start = time.monotonic()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "timed", checkpoint(step, numbers=20_000))
    seconds_per_save = (time.monotonic() - start) / 3
    seen = set()
    for trial in range(20):
        folder = tmp_path / str(trial)
        save_checkpoint(folder, checkpoint(1, numbers=20_000))
        child = _fork_saver(folder)
        time.sleep(random_moment.uniform(0, 4 * seconds_per_save))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = max((int(line) for line in (folder / "finished").read_text().split()), default=1)
        step = assert_whole(latest_complete(folder))
        assert step in (finished, finished + 1)
        assert_whole(save_checkpoint(folder, checkpoint(step + 1)))  # what is left over is in nobody's way
        prune_checkpoints(folder, keep_last=1)
        assert [path.name for path in folder.glob("step_*")] == [f"step_{step + 1}"]
        seen.add(step)
        shutil.rmtree(folder)
    assert len(seen) > 1, "the kills should hit different saves"


def _fork_saver(folder: Path) -> int:
    """A process that saves one checkpoint after another and notes each that was finished."""
    (folder / "finished").touch()
    child = os.fork()
    if child == 0:
        try:
            with (folder / "finished").open("w", buffering=1) as finished:
                for step in range(2, 1000):
                    save_checkpoint(folder, checkpoint(step, numbers=20_000))
                    prune_checkpoints(folder, keep_last=1)
                    print(step, file=finished)
        finally:
            os._exit(1)
    return child


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of at most 64 kB: writing further fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, small_disk: None):
    save_checkpoint(tmp_path, checkpoint(1))
    with pytest.raises(StorageError, match=r"step_2.*free some space and resume"):
        save_checkpoint(tmp_path, checkpoint(2, numbers=20_000))
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert assert_whole(latest_complete(tmp_path)) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot save the checkpoint"):
        save_checkpoint(tmp_path / "checkpoints", checkpoint(1))


def test_another_version_is_refused(tmp_path: Path):
    path = save_checkpoint(tmp_path, checkpoint(1))
    state = json.loads((path / STATE_FILE).read_text())
    assert state.pop("format") == 1
    changed = Checkpoint(checkpoint(2).model, {}, {**checkpoint(2).state, "format": 99})
    with pytest.raises(CheckpointError, match="another version"):
        load_checkpoint(save_checkpoint(tmp_path, changed))
