"""The service kills itself at the k-th operation of a transition, for every k; what the next one finds is old or new, whole.

An operation is a change of the disk (files, records) or a step of the backend. Nothing in the product knows of this.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.managed import (  # noqa: F401  # a fixture
    machines,
    managed,
    names,
    new_sandbox,
    no_machine_outlives_its_test,
)
from sandbox.scripted_backend import ScriptedBackend

from moonlet.sandbox.api import SandboxSpec, State
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager

_FILE_OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "link", "symlink", "mkfifo")
_RESUMED = ("second_pause", "resume")  # on a disk, without its processes: that is how the scripted backend saves
_DATA = bytes(range(256)) * 2000


# -- the process that dies --------------------------------------------------------------------------------------------
class Trap:
    """Counts operations once it is armed, and kills this process before the `last`-th."""

    def __init__(self, last: int) -> None:
        self.count = 0
        self.last = last
        self.is_armed = False
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            if not self.is_armed:
                return
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in _FILE_OPERATIONS:
            setattr(os, name, self._wrapped(getattr(os, name)))
        trap = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
                if sql.startswith(("INSERT", "DELETE", "COMMIT")):
                    trap.step()
                return super().execute(sql, *args)

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **options: connect(*args, **options, factory=Connection)  # type: ignore[assignment]

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.step()
            return call(*args, **options)

        return wrapped


class TrappedBackend(ScriptedBackend):
    trap: Trap | None = None

    async def step(self, name: str) -> None:
        if self.trap is not None:
            self.trap.step()
        await super().step(name)


Transition = Callable[[Manager, LocalSandbox], Awaitable[object]]


async def _create(manager: Manager, sandbox: LocalSandbox) -> None:
    await manager.create(SandboxSpec(metadata={"new": "1"}), idempotency_key="key")


async def _resume(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.resume()


async def _second_pause(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.pause()


async def _pause(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.pause()


async def _snapshot(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.snapshot("snap")


async def _fork(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.fork(2)


async def _destroy(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.destroy()


async def _destroy_paused(manager: Manager, sandbox: LocalSandbox) -> None:
    await sandbox.destroy()


async def _delete_snapshot(manager: Manager, sandbox: LocalSandbox) -> None:
    await manager.delete_snapshot("before")


TRANSITIONS = {
    transition.__name__.strip("_"): transition
    for transition in (
        _create,
        _pause,
        _second_pause,
        _resume,
        _snapshot,
        _fork,
        _destroy,
        _destroy_paused,
        _delete_snapshot,
    )
}


def run_until_trapped(folder: Path, name: str, frees_memory: bool, last: int) -> int | None:
    """The number of operations of the transition if it got to its end, None if the process died in it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            count = asyncio.run(_doomed(folder, name, frees_memory, last))
            os.write(writer, str(count).encode())
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (0 if answer else -signal.SIGKILL)
    return int(answer) if answer else None


async def _doomed(folder: Path, name: str, frees_memory: bool, last: int) -> int:
    trap = Trap(last)
    trap.install()
    backend = TrappedBackend(frees_memory=frees_memory)
    backend.trap = trap
    manager = await managed(folder, backend).__aenter__()
    sandbox = await new_sandbox(manager, metadata={"source": "1"})
    (folder.parent / f"source {last}").write_text(sandbox.id)
    await sandbox.write_file("data", _DATA)
    await sandbox.start("while true; do echo >> ticks; sleep 0.01; done", tag="counter")
    if name == "second_pause":
        await sandbox.pause()
        await sandbox.resume()
    if name in ("resume", "destroy_paused"):
        await sandbox.pause()
    if name == "delete_snapshot":
        await sandbox.snapshot("before")
    trap.is_armed = True
    await TRANSITIONS[name](manager, sandbox)
    trap.is_armed = False
    return trap.count


# -- what is found afterwards -----------------------------------------------------------------------------------------
async def check(folder: Path, name: str, frees_memory: bool, original: str, *, is_over: bool) -> None:
    backend = ScriptedBackend(frees_memory=frees_memory)
    async with managed(folder, backend) as manager:
        boxes = {info.id: info for info in await manager.list(list(State))}
        assert {info.state for info in boxes.values()} <= {State.RUNNING, State.PAUSED}
        in_memory = [info.id for info in boxes.values() if info.state == State.RUNNING or not frees_memory]
        assert machines(folder) == sorted(in_memory)
        _check_folders(folder, manager)
        snapshots = await manager.snapshots()
        source = [LocalSandbox(manager, info.id) for info in boxes.values() if "source" in info.metadata]
        others = [LocalSandbox(manager, info.id) for info in boxes.values() if "new" in info.metadata]
        await _check_outcome(name, boxes[source[0].id].state if source else None, is_over=is_over)
        if name == "fork":
            assert len(source) == (3 if is_over else len(source)) and len(source) in (1, 3)
        if name == "create":
            again = await manager.create(SandboxSpec(metadata={"new": "1"}), idempotency_key="key")
            assert [other.id for other in others] in ([], [again.id])
            assert others or not is_over
            others = [LocalSandbox(manager, again.id)]
        for snapshot in snapshots:
            others.append(await new_sandbox(manager, template=snapshot.id))
            assert await others[-1].read_file("data") == _DATA
        for sandbox in source:
            goes_on = not frees_memory or (boxes[sandbox.id].state == State.RUNNING and name not in _RESUMED)
            await _check_whole(sandbox, counts=goes_on and sandbox.id == original)
        for sandbox in [*source, *others]:
            assert (await sandbox.exec("echo on")).text == "on\n"
            await sandbox.destroy()
        for snapshot in snapshots:
            await manager.delete_snapshot(snapshot.id)
        assert (manager.ids(), machines(folder), names(folder)) == ([], [], [])


def _check_folders(folder: Path, manager: Manager) -> None:
    """A folder of each live machine, one generation of each that has one, those of the snapshots, and nothing else."""
    wanted = set()
    for box in manager._core.boxes.values():
        wanted.add(f"sandboxes/{box.id}")
        if box.machine is not None:
            wanted.add(f"sandboxes/{box.id}/live")
        if box.image is not None:
            wanted.add(f"sandboxes/{box.id}/{box.image.name}")
        if box.row.origin:
            wanted.add(f"snapshots/{box.row.origin}")
    wanted |= {f"snapshots/{snapshot}" for snapshot in manager._core.snapshots}
    assert names(folder) == sorted(wanted)


async def _check_outcome(name: str, state: State | None, *, is_over: bool) -> None:
    before, after = {
        "create": (State.RUNNING, State.RUNNING),
        "pause": (State.RUNNING, State.PAUSED),
        "second_pause": (State.RUNNING, State.PAUSED),
        "resume": (State.PAUSED, State.RUNNING),
        "snapshot": (State.RUNNING, State.RUNNING),
        "fork": (State.RUNNING, State.RUNNING),
        "destroy": (State.RUNNING, None),
        "destroy_paused": (State.PAUSED, None),
        "delete_snapshot": (State.RUNNING, State.RUNNING),
    }[name]
    assert state in ((after,) if is_over else (before, after))


async def _check_whole(sandbox: LocalSandbox, *, counts: bool) -> None:
    """No byte is lost, and the process that counts goes on if it never had to be given up."""
    await sandbox.resume()
    assert await sandbox.read_file("data") == _DATA
    if counts:
        (counter,) = await sandbox.processes()
        assert counter.is_running
        size = (await sandbox.stat("ticks")).size
        while (await sandbox.stat("ticks")).size == size:
            await asyncio.sleep(0.005)


_OFTEN = {("create", True), ("pause", True), ("pause", False), ("resume", True), ("fork", True), ("destroy", True)}
_CASES = [
    pytest.param(name, frees, marks=() if (name, frees) in _OFTEN else pytest.mark.slow, id=f"{name}-{where}")
    for name in TRANSITIONS
    for frees, where in ((True, "disk"), (False, "memory"))
]


@pytest.mark.parametrize(("name", "frees_memory"), _CASES)
def test_killed_at_every_operation(tmp_path: Path, name: str, frees_memory: bool) -> None:
    count, last = None, 0
    while count is None:
        last += 1
        folder = tmp_path / str(last)
        count = run_until_trapped(folder, name, frees_memory, last)
        try:
            original = (tmp_path / f"source {last}").read_text()
            asyncio.run(check(folder, name, frees_memory, original, is_over=count is not None))
        except BaseException as error:
            error.add_note(f"killed before operation {last}")
            raise
    assert last == count + 1 and count >= 2
