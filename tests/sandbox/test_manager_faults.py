"""What the manager promises when something fails: the sandbox is as before, or failed with a reason; nothing is left."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.managed import (  # noqa: F401  # a fixture
    machines,
    managed,
    names,
    new_sandbox,
    no_machine_outlives_its_test,
)
from sandbox.scripted_backend import ScriptedBackend, ScriptedMachine

from moonlet.errors import (
    SandboxDiedError,
    SandboxError,
    SandboxTimeoutError,
    StorageError,
)
from moonlet.sandbox.api import State
from moonlet.sandbox.backend import Usage
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def machine_of(manager: Manager, sandbox_id: str) -> ScriptedMachine:
    machine = manager._core.box(sandbox_id).machine
    assert isinstance(machine, ScriptedMachine)
    return machine


async def works(sandbox: LocalSandbox) -> bool:
    return (await sandbox.exec("echo works; cat f")).text == "works\nkept"


# -- starting ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["prepare", "launch", "launched"])
@pytest.mark.parametrize("error", [full_disk(), SandboxTimeoutError("too slow"), ValueError("x")], ids=type)
def test_a_create_that_fails_was_never_there(tmp_path: Path, step: str, error: Exception) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            backend.faults[step] = error
            with pytest.raises(type(error)):
                await new_sandbox(manager)
            assert (await manager.list(list(State)), names(tmp_path), machines(tmp_path)) == ([], [], [])
            assert await manager.create()

    asyncio.run(run())


def test_a_machine_that_does_not_start_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend, create_timeout_s=0.2) as manager:
            for step in ("launch", "launched"):
                backend.faults[step] = asyncio.Event().wait  # type: ignore[assignment]
                with pytest.raises(SandboxTimeoutError, match="create_timeout_s"):
                    await new_sandbox(manager)
            backend.agent = ("/bin/sh", "-c", "sleep 1000")  # lives, and does not say hello
            with pytest.raises(SandboxTimeoutError):
                await new_sandbox(manager)
            assert (await manager.list(list(State)), names(tmp_path), machines(tmp_path)) == ([], [], [])

    asyncio.run(run())


def test_a_machine_that_dies_while_it_starts_is_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend(agent=("/bin/sh", "-c", "sleep 0.2; echo no kernel >&2"))
        async with managed(tmp_path, backend, create_timeout_s=1000) as manager:
            with pytest.raises(SandboxDiedError, match="no kernel"):
                await new_sandbox(manager)
            assert (await manager.list(list(State)), names(tmp_path), machines(tmp_path)) == ([], [], [])

    asyncio.run(run())


_REFUSES_TO_RESEED = """
import json, sys
for line in sys.stdin.buffer:
    try:
        request = json.loads(line.lstrip(b"."))
    except ValueError:
        continue
    sys.stdin.buffer.read(request.get("bytes", 0))
    if request["op"] == "hello":
        answer = {"hello": request["nonce"], "protocol": 1, "epoch": "x", "pid": 1, "time": 0}
    elif request["op"] == "reseed":
        answer = {"id": request["id"], "ok": False, "error": "EPERM", "message": "no entropy for you"}
    else:
        answer = {"id": request["id"], "ok": True}
    print(json.dumps(answer), flush=True)
"""


def test_a_machine_that_cannot_be_made_unique_is_not_given_out(tmp_path: Path) -> None:
    """B75: a clone that draws the random numbers of its siblings is worse than none."""

    async def run() -> None:
        backend = ScriptedBackend()
        refusing = (sys.executable, "-c", _REFUSES_TO_RESEED)
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            backend.agent = refusing
            with pytest.raises(SandboxError, match="no entropy"):
                await new_sandbox(manager)
            assert [str(error) for error in await sandbox.fork(2)] == ["no entropy for you"] * 2
            await sandbox.pause()
            with pytest.raises(SandboxError, match="no entropy"):
                await sandbox.resume()
            assert (await sandbox.info()).state == State.PAUSED
            assert (manager.ids(), machines(tmp_path)) == ([sandbox.id], [])

    asyncio.run(run())


# -- pause and resume -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["save", "saved", "freeze"])
@pytest.mark.parametrize("error", [full_disk(), SandboxError("broken"), ValueError("x")], ids=type)
def test_a_pause_that_fails_leaves_it_running(tmp_path: Path, step: str, error: Exception) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=step != "freeze")
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            command = await sandbox.start("sleep 0.2; echo whole")
            backend.faults[step] = error
            with pytest.raises(StorageError if isinstance(error, OSError) and step != "freeze" else SandboxError):
                await sandbox.pause()
            assert (await sandbox.info()).state == State.RUNNING
            assert await works(sandbox)
            assert (await command.wait()).text == "whole\n"
            assert not [name for name in names(tmp_path) if "gen" in name]
            await sandbox.pause()
            await sandbox.resume()
            assert await works(sandbox)

    asyncio.run(run())


@pytest.mark.parametrize("step", ["restore", "restored", "thaw"])
def test_a_resume_that_fails_leaves_it_paused(tmp_path: Path, step: str) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=step != "thaw")
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            for error in (full_disk(), SandboxTimeoutError("slow"), ValueError("x")):
                await sandbox.pause()
                backend.faults[step] = error
                with pytest.raises(type(error)):
                    await sandbox.resume()
                assert (await sandbox.info()).state == State.PAUSED
                assert (machines(tmp_path) == []) == (step != "thaw")
                await sandbox.resume()
                assert await works(sandbox)

    asyncio.run(run())


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            backend.usage = Usage(memory_bytes=1 << 60)
            for call in (sandbox.pause, sandbox.snapshot, sandbox.fork):
                with pytest.raises(StorageError, match="MiB free"):
                    await call()
                assert (await sandbox.info()).state == State.RUNNING
            assert "save" not in backend.steps
            assert await works(sandbox)

    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"only root can mount a small disk: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_really_gets_full(small_disk: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.usage = Usage()  # so that the check beforehand finds nothing wrong
        async with managed(small_disk, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            await sandbox.write_file("big", os.urandom(2 << 20))
            before = [name for name in names(small_disk) if "live" not in name]
            for call in (sandbox.pause, sandbox.snapshot, sandbox.fork):
                with pytest.raises(StorageError, match="free some space"):
                    await call()
                assert (await sandbox.info()).state == State.RUNNING
                assert await works(sandbox)
            assert [name for name in names(small_disk) if "live" not in name] == before
            assert await manager.snapshots() == []
            await sandbox.remove("big")
            await sandbox.pause()
            await sandbox.resume()
            assert await works(sandbox)

    asyncio.run(run())


# -- the records ------------------------------------------------------------------------------------------------------
def refuse(folder: Path, state: str) -> None:
    """The records refuse this state from now on, as on a full disk."""
    with sqlite3.connect(folder / "sandboxes.sqlite3") as db:
        db.execute(
            f"CREATE TRIGGER refusal BEFORE INSERT ON sandboxes WHEN NEW.state = '{state}' "
            "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
    db.close()


def accept(folder: Path) -> None:
    with sqlite3.connect(folder / "sandboxes.sqlite3") as db:
        db.execute("DROP TRIGGER refusal")
    db.close()


@pytest.mark.parametrize("frees_memory", [True, False])
def test_what_cannot_be_recorded_did_not_happen(tmp_path: Path, frees_memory: bool) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=frees_memory)
        async with managed(tmp_path, backend) as manager:
            for state in ("creating", "running"):
                refuse(tmp_path, state)
                with pytest.raises(StorageError):
                    await new_sandbox(manager)
                accept(tmp_path)
                assert (manager.ids(), names(tmp_path), machines(tmp_path)) == ([], [], [])
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            for state in ("pausing", "paused"):
                refuse(tmp_path, state)
                with pytest.raises(StorageError):
                    await sandbox.pause()
                accept(tmp_path)
                assert await works(sandbox)
                assert not [name for name in names(tmp_path) if "gen" in name]
            await sandbox.pause()
            for state in ("resuming", "running"):
                refuse(tmp_path, state)
                with pytest.raises(StorageError):
                    await sandbox.resume()
                accept(tmp_path)
                assert (await sandbox.info()).state == State.PAUSED
            await sandbox.resume()
            assert await works(sandbox)
            refuse(tmp_path, "killing")
            await sandbox.destroy()  # a full disk does not keep it from being emptied
            assert (manager.ids(), names(tmp_path), machines(tmp_path)) == ([], [], [])

    asyncio.run(run())


def test_a_snapshot_that_cannot_be_recorded_leaves_no_files(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            with sqlite3.connect(tmp_path / "sandboxes.sqlite3") as db:
                db.execute("CREATE TRIGGER r BEFORE INSERT ON snapshots BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
            db.close()
            for call in (sandbox.snapshot, sandbox.fork):
                with pytest.raises(StorageError):
                    await call()
                assert (await manager.snapshots(), os.listdir(tmp_path / "snapshots")) == ([], [])
                assert await works(sandbox)

    asyncio.run(run())


# -- snapshots and forks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["save", "saved"])
def test_a_snapshot_that_fails_is_not_there(tmp_path: Path, step: str) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            for call in (sandbox.snapshot, sandbox.fork):
                backend.faults[step] = full_disk()
                with pytest.raises(StorageError):
                    await call()
                assert (await manager.snapshots(), os.listdir(tmp_path / "snapshots")) == ([], [])
                assert await works(sandbox)

    asyncio.run(run())


def test_children_that_fail_do_not_take_their_siblings_along(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            backend.faults["restored"] = full_disk()
            children = await sandbox.fork(3)
            assert sorted(type(child).__name__ for child in children) == ["LocalSandbox", "LocalSandbox", "OSError"]
            living = [child for child in children if isinstance(child, LocalSandbox)]
            assert await works(sandbox) and all([await works(child) for child in living])
            assert sorted(manager.ids()) == sorted([sandbox.id, *(child.id for child in living)])
            assert machines(tmp_path) == sorted(manager.ids())

    asyncio.run(run())


# -- death ------------------------------------------------------------------------------------------------------------
