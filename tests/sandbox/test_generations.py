"""Folders that appear whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moonlet.errors import StorageError
from moonlet.sandbox.generations import check_space, folder_bytes, in_thread, remove_tree, whole_folder


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with whole_folder(tmp_path / "gen-0001") as folder:
            (folder / "a").write_bytes(b"x")
            (folder / "sub").mkdir()
            os.symlink("/nowhere", folder / "sub" / "link")
            os.mkfifo(folder / "sub" / "fifo")
            assert not (tmp_path / "gen-0001").exists()

    asyncio.run(run())
    assert sorted(os.listdir(tmp_path)) == ["gen-0001"]
    assert (tmp_path / "gen-0001" / "a").read_bytes() == b"x"
    assert (tmp_path / "gen-0001").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("num_files", [3, 200])  # flushed one by one, or all at once
def test_many_files(tmp_path: Path, num_files: int) -> None:
    async def run() -> None:
        async with whole_folder(tmp_path / "g") as folder:
            for number in range(num_files):
                (folder / str(number)).write_bytes(b"x" * number)

    asyncio.run(run())
    assert len(os.listdir(tmp_path / "g")) == num_files


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), KeyboardInterrupt()]
)
def test_after_an_error_nothing_is_left(tmp_path: Path, error: BaseException) -> None:
    async def run() -> None:
        async with whole_folder(tmp_path / "g") as folder:
            (folder / "a").write_bytes(b"x")
            raise error

    with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
        asyncio.run(run())
    assert os.listdir(tmp_path) == []


def test_what_a_crash_left_does_not_get_in(tmp_path: Path) -> None:
    (tmp_path / "g.tmp" / "old").mkdir(parents=True)

    async def run() -> None:
        async with whole_folder(tmp_path / "g") as folder:
            assert os.listdir(folder) == []

    asyncio.run(run())


def test_removing_does_not_follow_links_and_opens_what_is_locked() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other users
        folder = Path(name)
        outside, tree = folder / "outside", folder / "tree"
        outside.mkdir()
        (outside / "kept").write_text("x")
        (tree / "locked" / "deep").mkdir(parents=True)
        (tree / "locked" / "deep" / "file").write_text("x")
        os.symlink(outside, tree / "locked" / "link")
        socket.socket(socket.AF_UNIX).bind(str(tree / "s"))
        os.chmod(tree / "locked" / "deep", 0)
        os.chmod(tree / "locked", 0)
        _as_somebody(folder, lambda: (remove_tree(tree), remove_tree(tree)))  # nothing there is fine
        assert not tree.exists()
        assert (outside / "kept").exists()


def _as_somebody(folder: Path, work: Callable[[], object]) -> None:
    """Root is not kept out by modes: it becomes somebody else for `work`."""
    if os.geteuid() != 0:
        work()
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_removing_what_is_deeper_than_any_path(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 200, dir_fd=here)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    assert folder_bytes(tree) > 0
    remove_tree(tree)
    assert not tree.exists()


def test_removing_many_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(10_000):
        (tree / str(number)).touch()
    remove_tree(tree)
    assert not tree.exists()


def test_several_may_remove_the_same(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(300):
        (tree / str(number) / "deep" / "er").mkdir(parents=True)
        (tree / str(number) / "deep" / "file").touch()

    async def run() -> None:
        await asyncio.gather(*(in_thread(remove_tree, tree) for _ in range(4)))

    asyncio.run(run())
    assert not tree.exists()


def test_too_little_space_is_an_error_that_says_how_much(tmp_path: Path) -> None:
    check_space(tmp_path, 1, 0)
    with pytest.raises(StorageError, match="MiB free"):
        check_space(tmp_path, 1 << 60, 0)


def test_size_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    assert 10_000 <= folder_bytes(tmp_path) < 1 << 20


def test_a_cancelled_caller_waits_for_its_thread() -> None:
    async def run() -> None:
        started, finish, log = threading.Event(), threading.Event(), []

        def work() -> None:
            started.set()
            finish.wait(10)
            log.append("done")

        task = asyncio.create_task(in_thread(work))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        finish.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["done"]

    asyncio.run(run())
