"""Machines that die, streams that break, leftovers, and records of another version: what the manager does about each."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
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
    BackendUnavailableError,
    SandboxDiedError,
    SandboxError,
    SandboxNotFoundError,
    SandboxStateError,
    StorageError,
)
from moonlet.sandbox.api import State
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager
from moonlet.sandbox.reaper import reap


def machine_of(manager: Manager, sandbox_id: str) -> ScriptedMachine:
    machine = manager._core.box(sandbox_id).machine
    assert isinstance(machine, ScriptedMachine)
    return machine


async def works(sandbox: LocalSandbox) -> bool:
    return (await sandbox.exec("echo works; cat f")).text == "works\nkept"


def test_a_machine_that_dies_is_noticed_by_those_who_wait_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            sandbox = await new_sandbox(manager)
            process = await sandbox.start("sleep 1000")
            calls = [
                asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=None)),
                asyncio.create_task(process.wait()),
                asyncio.create_task(anext(sandbox.watch("."))),  # type: ignore[arg-type]
            ]
            while len(await sandbox.processes()) < 2:
                await asyncio.sleep(0.001)
            machine_of(manager, sandbox.id).kill()
            async with asyncio.timeout(10):
                results = await asyncio.gather(*calls, return_exceptions=True)
            assert [(type(result), result.reason) for result in results] == [(SandboxDiedError, "crash")] * 3  # type: ignore[union-attr]
            info = await sandbox.info()
            assert (info.state, info.reason) == (State.FAILED, "crash")
            assert isinstance(await manager.logs(sandbox.id), bytes)
            for call in (sandbox.pause, sandbox.resume, sandbox.snapshot, sandbox.fork, sandbox.processes):
                with pytest.raises(SandboxDiedError, match="crash"):
                    await call()
        async with managed(tmp_path) as manager:
            assert (await manager.info(sandbox.id)).reason == "crash"
            await manager.destroy(sandbox.id)
            assert names(tmp_path) == []

    asyncio.run(run())


@pytest.mark.parametrize("step", ["save", "saved", "freeze", "thaw"])
def test_a_machine_that_dies_in_the_middle_of_a_transition(tmp_path: Path, step: str) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=step.startswith("save"))
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            if step == "thaw":
                await sandbox.pause()
            machine = machine_of(manager, sandbox.id)

            async def die() -> None:
                machine.kill()
                while machine.is_alive:
                    await asyncio.sleep(0.001)

            backend.faults[step] = die
            call = sandbox.resume if step == "thaw" else sandbox.snapshot if step == "save" else sandbox.pause
            if step == "saved":  # what was saved is whole: the machine was to go anyway
                await call()
                await sandbox.resume()
                assert (await sandbox.info()).state == State.RUNNING
                return
            with pytest.raises(SandboxDiedError):
                await call()
            box = manager._core.box(sandbox.id)
            await box.until(lambda: box.state == State.FAILED)
            await sandbox.destroy()
            assert (names(tmp_path), machines(tmp_path)) == ([], [])

    asyncio.run(run())


def test_a_machine_that_dies_while_it_is_frozen(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=False)) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.pause()
            machine_of(manager, sandbox.id).kill()
            box = manager._core.box(sandbox.id)
            await box.until(lambda: box.state == State.FAILED)
            with pytest.raises(SandboxDiedError):
                await sandbox.resume()

    asyncio.run(run())


def test_a_stream_that_breaks_is_opened_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            command = asyncio.create_task(sandbox.exec("sleep 0.5; echo end"))
            while not await sandbox.processes():
                await asyncio.sleep(0.001)
            guest = manager.guest_now(sandbox.id)
            assert guest is not None
            guest.stream.close()
            assert (await command).text == "end\n"
            assert await works(sandbox)
            manager._core.box(sandbox.id).guest.stream.close()  # type: ignore[union-attr]
            with pytest.raises(SandboxStateError, match="cut"):
                await sandbox.stat("f")
            while manager.guest_now(sandbox.id) is None or manager.guest_now(sandbox.id).stream.is_closed:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
            assert await works(sandbox)

    asyncio.run(run())


# -- destroying -------------------------------------------------------------------------------------------------------
def test_a_destroy_that_fails_stays_listed_and_is_tried_again(tmp_path: Path) -> None:
    """B77: a failure to delete must not be swallowed."""

    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            backend.faults["destroy"] = SandboxError("it holds on")
            with pytest.raises(SandboxError, match="holds on"):
                await sandbox.destroy()
            assert [(info.id, info.state) for info in await manager.list()] == [(sandbox.id, State.KILLING)]
            assert machines(tmp_path) == [sandbox.id]
            await reap(manager._core)
            assert (manager.ids(), machines(tmp_path), names(tmp_path)) == ([], [], [])
            again = await new_sandbox(manager)
            backend.faults["destroy"] = SandboxError("it holds on")
            with pytest.raises(SandboxError, match="holds on"):
                await again.destroy()
        async with managed(tmp_path, backend) as manager:
            assert (manager.ids(), machines(tmp_path), names(tmp_path)) == ([], [], [])

    asyncio.run(run())


# -- other versions ---------------------------------------------------------------------------------------------------
def test_what_another_version_saved_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend(version="1")
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            snapshot = await sandbox.snapshot()
            await sandbox.pause()
        backend.version = "2"
        async with managed(tmp_path, backend) as manager:
            again = LocalSandbox(manager, sandbox.id)
            with pytest.raises(SandboxStateError, match=r"saved by scripted 1, this machine has 2"):
                await again.resume()
            assert (await again.info()).state == State.PAUSED
            with pytest.raises(SandboxStateError, match=f"snapshot {snapshot}"):
                await new_sandbox(manager, template=snapshot)
            backend.caps = None
            with pytest.raises(BackendUnavailableError, match="the test says so"):
                await again.resume()
            backend.version, backend.caps = "1", ScriptedBackend().caps
            await again.resume()

    asyncio.run(run())


def test_a_backend_that_is_not_there_any_more(tmp_path: Path) -> None:
    class Other(ScriptedBackend):
        name = "other"

    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            paused, lost = await new_sandbox(manager), await new_sandbox(manager)
            await paused.pause()
            await manager.close(pause_running=False)
        async with managed(tmp_path, Other()) as manager:
            assert (await manager.info(paused.id)).state == State.PAUSED
            with pytest.raises(BackendUnavailableError, match="no backend 'scripted'"):
                await manager.resume(paused.id)
            assert (await manager.info(lost.id)).reason == "lost"
            await manager.destroy(paused.id)
            await manager.destroy(lost.id)
        async with managed(tmp_path, backend):
            assert machines(tmp_path) == []

    asyncio.run(run())


def test_network_is_refused_where_a_backend_has_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            with pytest.raises(BackendUnavailableError, match="allow_hosts"):
                await new_sandbox(manager, allow_hosts=("example.org",))

    asyncio.run(run())


# -- leftovers --------------------------------------------------------------------------------------------------------
def test_leftovers_are_found_by_label_and_record(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"kept")
            label = manager._core.label
            with subprocess.Popen(
                [guest_binary()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"MOONLET_LABEL": label, "MOONLET_ID": "sborphan"},
                start_new_session=True,
            ) as orphan:
                assert machines(tmp_path) == sorted([sandbox.id, "sborphan"])
                home = tmp_path / "sandboxes" / sandbox.id
                for folder in (
                    home / "gen-0009.tmp",
                    home / "gen-0007",
                    tmp_path / "sandboxes" / "sbnobody" / "live",
                    tmp_path / "snapshots" / "snapnobody",
                    tmp_path / "snapshots" / "snaphalf.tmp",
                ):
                    folder.mkdir(parents=True)
                    (folder / "file").touch()
                found = await reap(manager._core)
                assert orphan.wait() == -signal.SIGKILL
            assert len(found) == 4, found  # snapshots are collected by the way
            assert names(tmp_path) == [f"sandboxes/{sandbox.id}", f"sandboxes/{sandbox.id}/live"]
            assert manager.num_reaped == 4
            assert await works(sandbox)

    asyncio.run(run())


def test_a_sweep_never_takes_a_machine_that_is_just_being_made(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend, max_running=50) as manager:

            async def sweep() -> None:
                while not done.is_set():
                    await reap(manager._core)
                    await asyncio.sleep(0)

            done = asyncio.Event()
            sweeping = asyncio.create_task(sweep())
            made = await asyncio.gather(*(new_sandbox(manager) for _ in range(30)))
            for sandbox in made:
                await sandbox.pause()
                await sandbox.resume()
            children = await made[0].fork(5)
            done.set()
            await sweeping
            results = [await sandbox.exec("echo on") for sandbox in [*made, *children]]  # type: ignore[union-attr]
            assert [result.text for result in results] == ["on\n"] * 35

    asyncio.run(run())


def test_a_record_that_cannot_be_read_keeps_its_files_and_its_machine(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await manager.close(pause_running=False)
        with sqlite3.connect(tmp_path / "sandboxes.sqlite3") as db:
            (body,) = db.execute("SELECT body FROM sandboxes").fetchone()
            db.execute("UPDATE sandboxes SET body = '{}'")
        async with managed(tmp_path, backend) as manager:
            assert manager.ids() == []
            await reap(manager._core)
            assert machines(tmp_path) == [sandbox.id]
            assert f"sandboxes/{sandbox.id}/live" in names(tmp_path)
        with sqlite3.connect(tmp_path / "sandboxes.sqlite3") as db:
            db.execute("UPDATE sandboxes SET body = ?", (body,))
        db.close()
        async with managed(tmp_path, backend) as manager:
            assert (await LocalSandbox(manager, sandbox.id).exec("echo on")).text == "on\n"
            await manager.destroy(sandbox.id)

    asyncio.run(run())


# -- snapshots kept elsewhere -----------------------------------------------------------------------------------------
def test_a_snapshot_of_another_host(tmp_path: Path) -> None:
    async def run() -> None:
        shared = str(tmp_path / "shared")
        async with managed(tmp_path / "a", snapshot_url=shared) as manager:
            sandbox = await new_sandbox(manager, env={"A": "1"})
            await sandbox.write_file("f", b"kept")
            snapshot = await sandbox.snapshot("name")
        backend = ScriptedBackend()
        async with managed(tmp_path / "b", backend, snapshot_url=shared) as manager:
            child, sibling = await asyncio.gather(*(new_sandbox(manager, template=snapshot) for _ in range(2)))
            assert await works(child) and await works(sibling)
            assert (await child.exec("echo $A")).text == "1\n"
            assert [each.name for each in await manager.snapshots()] == ["name"]
            await manager.delete_snapshot(snapshot)
            with pytest.raises(SandboxNotFoundError):
                await manager.delete_snapshot(snapshot)
            (tmp_path / "shared" / "snapshots").rename(tmp_path / "shared" / "gone")
            (tmp_path / "shared" / "snapshots").touch()  # the store is broken
            with pytest.raises(StorageError):
                await child.snapshot()
            assert (await manager.snapshots(), await works(child)) == ([], True)

    asyncio.run(run())


@pytest.mark.parametrize("frees_memory", [True, False], ids=["to disk", "in memory"])
def test_a_machine_that_was_destroyed_did_not_die(
    tmp_path: Path, frees_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume must not watch twice: the second watcher took the end for a crash."""

    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=frees_memory)) as manager:
            sandbox = await new_sandbox(manager)
            for _ in range(3):
                await sandbox.pause()
                await sandbox.resume()
            await sandbox.destroy()
            await asyncio.sleep(0.1)

    asyncio.run(run())
    assert "died" not in caplog.text
