"""Run directories: made, reopened, locked, pointed at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonlet.config import load_recipe
from moonlet.errors import ConfigError, StorageError
from moonlet.train.rundir import open_run

HOLD = """
import sys, time
from pathlib import Path
from moonlet.config import load_recipe
from moonlet.train.rundir import open_run
with open_run(Path(sys.argv[1]), load_recipe(Path(sys.argv[2])), resume=True):
    print("open", flush=True)
    time.sleep(60)
"""


def load_recipe_of(root: Path) -> Any:
    return load_recipe(root / "config.resolved.toml")


def test_a_new_run_is_laid_out(tmp_path: Path, recipe: Any):
    with open_run(tmp_path / "runs" / "a", recipe()) as run:
        assert load_recipe_of(run.root) == recipe()
        assert run.logs == run.root / "logs" / "attempt_1" and run.logs.is_dir()
        assert (run.data, run.checkpoints) == (run.root / "data", run.root / "checkpoints")
    assert (tmp_path / "runs" / "latest").resolve() == run.root
    with open_run(tmp_path / "runs" / "b", recipe()) as other:
        pass
    assert (tmp_path / "runs" / "latest").resolve() == other.root
    assert os.readlink(tmp_path / "runs" / "latest") == "b"


def test_a_run_is_not_overwritten(tmp_path: Path, recipe: Any):
    with open_run(tmp_path / "a", recipe()):
        pass
    with pytest.raises(ConfigError, match="--resume"), open_run(tmp_path / "a", recipe(seed=1)):
        pass
    assert load_recipe_of(tmp_path / "a").seed == 0
    with open_run(tmp_path / "latest", recipe(seed=1), resume=True) as run:
        assert run.root == tmp_path / "a" and run.attempt == 2
        assert load_recipe_of(run.root).seed == 0, "a recipe that may yet be refused must not replace the old one"
        run.record(recipe(seed=1))
    assert load_recipe_of(tmp_path / "a").seed == 1


def test_one_process_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path, recipe: Any):
    with open_run(tmp_path / "a", recipe()) as run:
        pass
    command = [sys.executable, "-c", HOLD, str(run.root), str(run.config_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"
    with (
        pytest.raises(StorageError, match=f"process {holder.pid} is working in"),
        open_run(run.root, recipe(), resume=True),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with open_run(run.root, recipe(), resume=True) as again:
        assert again.attempt == 3


def test_a_place_that_cannot_be_written(tmp_path: Path, recipe: Any):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot write the run directory"),
        open_run(tmp_path / "file" / "a", recipe()),
    ):
        pass


def test_errors_inside_are_not_about_the_directory(tmp_path: Path, recipe: Any):
    with pytest.raises(FileNotFoundError), open_run(tmp_path / "a", recipe()):
        (tmp_path / "absent").read_text()


def test_a_folder_called_latest_is_left_alone(tmp_path: Path, recipe: Any):
    (tmp_path / "latest").mkdir()
    with open_run(tmp_path / "a", recipe()):
        pass
    assert not (tmp_path / "latest").is_symlink()
