"""What the manager promises while nothing fails: states, joins, limits, keys, clocks. On the scripted backend."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox.managed import (  # noqa: F401  # a fixture
    machines,
    managed,
    names,
    new_sandbox,
    no_machine_outlives_its_test,
)
from sandbox.scripted_backend import ScriptedBackend

from moonlet.errors import (
    SandboxNotFoundError,
    SandboxStateError,
)
from moonlet.sandbox.api import Output, State
from moonlet.sandbox.manager import Manager

BOTH = pytest.mark.parametrize("frees_memory", [True, False], ids=["to disk", "in memory"])


@BOTH
def test_a_life(tmp_path: Path, frees_memory: bool) -> None:
    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=frees_memory)) as manager:
            sandbox = await new_sandbox(manager, env={"WHO": "world"}, metadata={"task": "7"})
            info = await sandbox.info()
            assert (info.state, info.backend, info.metadata) == (State.RUNNING, "scripted", {"task": "7"})
            result = await sandbox.exec('echo "hello $WHO $MORE"; echo oops >&2; exit 3', env={"MORE": "!"})
            assert (result.exit_code, result.text, result.error_text) == (3, "hello world !\n", "oops\n")
            await sandbox.write_file("deep/file", b"\0\xff" * 100_000)
            for _ in range(3):
                await sandbox.pause()
                await sandbox.pause()
                assert (await sandbox.info()).state == State.PAUSED
                with pytest.raises(SandboxStateError, match="resume it first"):
                    await sandbox.exec("true")
                await sandbox.resume()
                await sandbox.resume()
                assert await sandbox.read_file("deep/file") == b"\0\xff" * 100_000
            assert [info.id for info in await manager.list(metadata={"task": "7"})] == [sandbox.id]
            assert await manager.list(metadata={"task": "8"}) == []
            await sandbox.destroy()
            await sandbox.destroy()
            with pytest.raises(SandboxNotFoundError):
                await sandbox.info()
            assert await manager.list() == []
            assert (machines(tmp_path), names(tmp_path)) == ([], [])

    asyncio.run(run())


def test_a_pause_by_the_clock_keeps_every_byte(tmp_path: Path) -> None:
    """B73: three cycles of 5 MB, paused by the deadline."""

    async def run() -> None:
        async with managed(tmp_path, scoring_slack_s=0.0) as manager:
            sandbox = await new_sandbox(manager, ttl_s=600)
            digests = []
            for cycle in range(3):
                data = os.urandom(5 << 20)
                digests.append(hashlib.sha256(data).hexdigest())
                await sandbox.write_file(f"file {cycle}", data)
                await sandbox.set_timeout(0.01)
                await state_of(manager, sandbox.id, State.PAUSED)
                await manager.resume(sandbox.id, ttl_s=600)
                for number, digest in enumerate(digests):
                    found = hashlib.sha256(await sandbox.read_file(f"file {number}")).hexdigest()
                    assert found == digest, f"file {number} in cycle {cycle}"

    asyncio.run(run())


async def state_of(manager: Manager, sandbox_id: str, *states: State) -> None:
    """Wait for one of the states."""
    box = manager._core.box(sandbox_id)
    async with asyncio.timeout(20):
        await box.until(lambda: box.is_gone or (box.state in states and box.task is None))


def test_a_command_goes_on_through_a_freeze_and_its_caller_waits(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=False)) as manager:
            sandbox = await new_sandbox(manager)
            script = "for i in 1 2 3 4 5; do echo $i; read line; echo got $line; done"
            process = await sandbox.start(script, stdin=True)
            waiting = asyncio.create_task(process.wait())
            seen: asyncio.Queue[Output] = asyncio.Queue()

            async def watch() -> None:
                async for piece in process.output():
                    seen.put_nowait(piece)

            watching = asyncio.create_task(watch())
            assert (await seen.get()).data.startswith(b"1")
            for number in range(5):
                await sandbox.pause()
                writing = asyncio.create_task(process.write_stdin(f"{number}\n".encode()))
                await asyncio.sleep(0)
                assert not writing.done() and not waiting.done()
                await sandbox.resume()
                await writing
            result = await waiting
            await watching
            assert result.text == "".join(f"{i + 1}\ngot {i}\n" for i in range(5))
            again = await (await sandbox.process(process.command_id)).wait()
            assert again == result

    asyncio.run(run())


def test_a_long_input_is_whole_after_pauses(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=False)) as manager:
            sandbox = await new_sandbox(manager)
            data = os.urandom(6 << 20)
            task = asyncio.create_task(sandbox.exec("sha256sum", stdin=data))
            while not task.done():
                await sandbox.pause()
                await sandbox.resume()
                await asyncio.wait([task], timeout=0.01)
            assert (await task).text.split()[0] == hashlib.sha256(data).hexdigest()

    asyncio.run(run())


def test_a_pause_waits_for_a_transfer_and_then_cuts_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, drain_s=0.1) as manager:
            sandbox = await new_sandbox(manager)

            async def slow() -> AsyncIterator[bytes]:
                yield b"x" * 1000
                await asyncio.Event().wait()  # a client that sends no more

            async def send() -> None:
                async with manager.guest(sandbox.id) as guest:
                    await guest.upload(slow(), "target")

            upload = asyncio.create_task(send())
            box = manager._core.box(sandbox.id)
            while not box.lock.num_readers:
                await asyncio.sleep(0)
            await sandbox.write_file("short", b"x" * 1000)  # other calls go on
            await sandbox.pause()
            with pytest.raises(SandboxStateError, match="paused in the middle"):
                await upload
            await sandbox.resume()
            whole = [file.name for file in await sandbox.list_files() if not file.name.startswith(".moonlet-")]
            assert whole == ["short"]

    asyncio.run(run())


def test_a_cancelled_exec_leaves_no_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, ScriptedBackend(frees_memory=False)) as manager:
            sandbox = await new_sandbox(manager)
            for pauses in (False, True):
                task = asyncio.create_task(sandbox.exec("touch started; sleep 1000", timeout_s=None))
                while not [file for file in await sandbox.list_files() if file.name == "started"]:
                    await asyncio.sleep(0.01)
                if pauses:
                    await sandbox.pause()
                task.cancel()
                await asyncio.wait([task])
                if pauses:
                    await sandbox.resume()
                while await sandbox.processes():
                    await asyncio.sleep(0.01)
                await sandbox.remove("started")

    asyncio.run(run())


# -- at once ----------------------------------------------------------------------------------------------------------
def test_the_same_transitions_join_and_others_wait(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            backend.steps.clear()
            await asyncio.gather(*(sandbox.pause() for _ in range(10)))
            assert backend.steps.count("save") == 1
            await asyncio.gather(*(sandbox.resume() for _ in range(10)))
            assert backend.steps.count("restore") == 1
            mixed = [sandbox.pause(), sandbox.resume(), sandbox.snapshot("a"), sandbox.pause(), sandbox.resume()]
            results = await asyncio.gather(*mixed, return_exceptions=True)
            assert all(not isinstance(result, Exception) or isinstance(result, SandboxStateError) for result in results)
            await sandbox.resume()
            assert (await sandbox.exec("echo alive")).text == "alive\n"

    asyncio.run(run())


def test_a_caller_that_goes_away_does_not_stop_a_pause(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            reached, go_on = asyncio.Event(), asyncio.Event()
            backend.faults["save"] = halt(reached, go_on)
            task = asyncio.create_task(sandbox.pause())
            await reached.wait()
            assert (await sandbox.info()).state == State.PAUSING
            task.cancel()
            await asyncio.wait([task])
            joined = asyncio.create_task(sandbox.pause())
            await asyncio.sleep(0)
            go_on.set()
            await joined
            assert (await sandbox.info()).state == State.PAUSED
            assert backend.steps.count("save") == 1

    asyncio.run(run())


def halt(reached: asyncio.Event, go_on: asyncio.Event):
    """A fault that stops at a step until it may go on."""

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    return wait


@pytest.mark.parametrize("step", ["launch", "launched", "save", "saved", "restore", "restored", "freeze", "thaw"])
def test_destroy_in_the_middle_of_anything(tmp_path: Path, step: str) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=step not in ("freeze", "thaw"))
        async with managed(tmp_path, backend) as manager:
            reached = asyncio.Event()
            if step.startswith("launch"):
                backend.faults[step] = halt(reached, asyncio.Event())
                task = asyncio.create_task(new_sandbox(manager))
                await reached.wait()
                (name,) = manager.ids()
            else:
                sandbox = await new_sandbox(manager)
                name = sandbox.id
                if step in ("restore", "restored", "thaw"):
                    await sandbox.pause()
                backend.faults[step] = halt(reached, asyncio.Event())
                paused = step in ("restore", "restored", "thaw")
                task = asyncio.create_task(sandbox.resume() if paused else sandbox.pause())
                await reached.wait()
            await asyncio.gather(manager.destroy(name), manager.destroy(name))
            with pytest.raises(SandboxNotFoundError):
                await task
            with pytest.raises(SandboxNotFoundError):
                await manager.destroy(name)
            assert (manager.ids(), machines(tmp_path), names(tmp_path)) == ([], [], [])

    asyncio.run(run())


def test_destroy_while_calls_are_in_flight(tmp_path: Path) -> None:
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
            await sandbox.destroy()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [SandboxNotFoundError] * 3, results

    asyncio.run(run())
