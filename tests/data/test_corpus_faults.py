"""Preparation that is killed, that meets a full disk, or that runs twice at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moonlet.data.corpus import Corpus, prepare_corpus
from moonlet.errors import DataError, StorageError

_SCRIPT = """
import json, sys, time
from pathlib import Path
from moonlet.config import resolve_run
from moonlet.data.corpus import prepare_corpus
table, folder, pause = json.loads(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def progress(phase, done, total):
    print(phase, flush=True)
    time.sleep(pause)
prepare_corpus(resolve_run(table), folder, progress=progress)
"""


def start(config, folder: Path, pause: float) -> subprocess.Popen[str]:
    """Prepare in a process of its own that pauses at each report of progress."""
    table = json.dumps(config.model_dump(mode="json", exclude_none=True))
    command = [sys.executable, "-c", _SCRIPT, table, str(folder), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("phase", ["reading", "training the tokenizer", "tokenising"])
def test_kill_and_start_again(config, tmp_path, digest, phase):
    """Nothing counts as prepared, and the next call gives what an undisturbed one gives."""
    process = start(config, tmp_path / "data", pause=0.05)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == phase:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert (tmp_path / "data.partial").is_dir()
    assert not (tmp_path / "data").exists()
    prepare_corpus(config, tmp_path / "data")
    prepare_corpus(config, tmp_path / "calm")
    assert digest(tmp_path / "data") == digest(tmp_path / "calm")
    assert not (tmp_path / "data.partial").exists()


def test_a_folder_with_something_else_in_it_stays_as_it_is(config, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="is not a corpus"):
        prepare_corpus(config, tmp_path / "data")
    assert (tmp_path / "data" / "notes.txt").read_text() == "mine"
    (tmp_path / "data" / "notes.txt").unlink()
    assert prepare_corpus(config, tmp_path / "data").heldout


def test_two_at_once(config, tmp_path):
    """One works, the other waits and opens the result."""
    rivals = [start(config, tmp_path / "data", pause=0.01) for _ in range(2)]
    outputs = [process.communicate()[0].split("\n") for process in rivals]
    assert [process.returncode for process in rivals] == [0, 0]
    assert sorted("reading" in output for output in outputs) == [False, True]
    assert Corpus(tmp_path / "data").heldout


@pytest.mark.parametrize("limit", [4_000, 60_000, 120_000])
def test_full_disk_leaves_nothing_behind(config, tmp_path, limit):
    """A limit on the size of files makes writes fail as a full disk does, without root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(StorageError, match="free some space"):
            prepare_corpus(config, tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]
    assert prepare_corpus(config, tmp_path / "data").heldout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_file_system(config, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        with pytest.raises(StorageError, match=r"No space left.*free some space"):
            prepare_corpus(config, mount / "data")
        assert [path.name for path in mount.iterdir()] == ["data.lock"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(config, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="permissions"):
            prepare_corpus(config, tmp_path / "data")
    finally:
        tmp_path.chmod(0o700)
