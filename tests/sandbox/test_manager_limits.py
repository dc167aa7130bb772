"""The manager's limits: how many at once, what is refused, how long something lives, how much it may use."""

from __future__ import annotations

import asyncio
import os
import time
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
    ConfigError,
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    TemplateError,
)
from moonlet.sandbox.api import ExecResult, Limits, SandboxInfo, SandboxSpec, State
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager

BOTH = pytest.mark.parametrize("frees_memory", [True, False], ids=["to disk", "in memory"])


async def state_of(manager: Manager, sandbox_id: str, *states: State) -> None:
    """Wait for one of the states."""
    box = manager._core.box(sandbox_id)
    async with asyncio.timeout(20):
        await box.until(lambda: box.is_gone or (box.state in states and box.task is None))


def halt(reached: asyncio.Event, go_on: asyncio.Event):
    """A fault that stops at a step until it may go on."""

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    return wait


def test_two_hundred_creates_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, max_running=200) as manager:
            made = await asyncio.gather(*(new_sandbox(manager, metadata={"n": str(n)}) for n in range(200)))
            results = await asyncio.gather(*(box.exec(f"echo {n}") for n, box in enumerate(made)))
            assert [result.text for result in results] == [f"{n}\n" for n in range(200)]
            assert len(machines(tmp_path)) == 200
            with pytest.raises(SandboxLimitError):
                await new_sandbox(manager)
            await asyncio.gather(*(box.pause() for box in made[:100]))
            await asyncio.gather(*(box.destroy() for box in made))
            assert (machines(tmp_path), names(tmp_path)) == ([], [])
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 100, descriptors

    asyncio.run(run())


# -- limits and keys --------------------------------------------------------------------------------------------------
def test_limits_say_when_to_try_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, max_running=2, max_total=3) as manager:
            first, second = await asyncio.gather(new_sandbox(manager), new_sandbox(manager))
            with pytest.raises(SandboxLimitError, match="max_running") as caught:
                await new_sandbox(manager)
            assert 1 <= caught.value.retry_after_s <= 30
            with pytest.raises(SandboxLimitError):
                await first.fork(1)
            await first.pause()
            third = await new_sandbox(manager)
            with pytest.raises(SandboxLimitError):
                await first.resume()
            assert (await first.info()).state == State.PAUSED
            await third.pause()
            with pytest.raises(SandboxLimitError, match="max_total"):
                await new_sandbox(manager)
            await second.destroy()
            await asyncio.gather(first.resume(), third.resume())

    asyncio.run(run())


def test_one_free_place_goes_to_one_of_many(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, max_running=1, max_total=5) as manager:
            boxes = []
            for _ in range(4):
                boxes.append(await new_sandbox(manager))
                await boxes[-1].pause()
            results = await asyncio.gather(*(box.resume() for box in boxes), return_exceptions=True)
            assert sorted(type(result).__name__ for result in results) == ["NoneType"] + ["SandboxLimitError"] * 3

    asyncio.run(run())


def test_a_key_makes_one_sandbox(tmp_path: Path) -> None:
    async def run() -> None:
        spec = SandboxSpec(metadata={"a": "b"})
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            backend.faults["launch"] = ValueError("no")
            with pytest.raises(ValueError):
                await manager.create(spec, idempotency_key="k")
            infos = await asyncio.gather(*(manager.create(spec, idempotency_key="k") for _ in range(5)))
            assert len({info.id for info in infos}) == 1
            with pytest.raises(SandboxStateError, match="another request"):
                await manager.create(SandboxSpec(), idempotency_key="k")
            assert (await manager.create(spec, idempotency_key="other")).id != infos[0].id
        async with managed(tmp_path, backend) as manager:
            assert (await manager.create(spec, idempotency_key="k")).id == infos[0].id
            await manager.destroy(infos[0].id)
            with pytest.raises(SandboxNotFoundError):
                await manager.create(spec, idempotency_key="k")
        async with managed(tmp_path, backend) as manager:
            with pytest.raises(SandboxNotFoundError):
                await manager.create(spec, idempotency_key="k")

    asyncio.run(run())


def test_a_create_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """B77: without a key nobody could find it again; with one the next try gets it."""

    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            for step in ("prepare", "launch", "launched"):
                for key in (None, f"key {step}"):
                    reached, go_on = asyncio.Event(), asyncio.Event()
                    backend.faults[step] = halt(reached, go_on)
                    task = asyncio.create_task(manager.create(SandboxSpec(), idempotency_key=key))
                    await reached.wait()
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled()
                    go_on.set()
                    if key is None:
                        assert (manager.ids(), machines(tmp_path)) == ([], [])
                    else:
                        await manager.destroy((await manager.create(SandboxSpec(), idempotency_key=key)).id)
            assert (machines(tmp_path), names(tmp_path)) == ([], [])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"template": "hots"}, TemplateError),
        ({"backend": "scriptd"}, Exception),
        ({"ttl_s": -1}, ConfigError),
        ({"ttl_s": float("nan")}, ConfigError),
        ({"ttl_s": 1e9}, ConfigError),
        ({"ttl_s": None}, ConfigError),
        ({"allow_hosts": ("a b",)}, ConfigError),
        ({"limits": Limits(memory_bytes=0)}, ConfigError),
        ({"on_timeout": "explode"}, ConfigError),
        ({"idle_pause_s": 0}, ConfigError),
        ({"env": {"A=B": "1"}}, ConfigError),
        ({"env": {"A": "1\0"}}, ConfigError),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is(tmp_path: Path, options: dict, error: type) -> None:
    async def run() -> None:
        async with managed(tmp_path, max_ttl_s=3600) as manager:
            with pytest.raises(error):
                await new_sandbox(manager, **options)
            assert (manager.ids(), names(tmp_path)) == ([], [])

    asyncio.run(run())


# -- snapshots and forks ----------------------------------------------------------------------------------------------
@BOTH
def test_snapshots_start_new_ones_and_outlive_their_source(tmp_path: Path, frees_memory: bool) -> None:
    async def run() -> None:
        backend = ScriptedBackend(frees_memory=frees_memory)
        async with managed(tmp_path, backend) as manager:
            source = await new_sandbox(manager, env={"A": "1"})
            await source.write_file("f", b"then")
            snapshot = await source.snapshot("named")
            await source.write_file("f", b"now")
            await source.destroy()
            for template in (snapshot, "named"):
                child = await new_sandbox(manager, template=template, env={"B": "2"})
                assert await child.read_file("f") == b"then"
                assert (await child.exec("echo $A$B")).text == "12\n"
            assert [each.name for each in await manager.snapshots()] == ["named"]
            with pytest.raises(SandboxStateError, match="leave"):
                await new_sandbox(manager, template=snapshot, backend="other")
        async with managed(tmp_path, backend) as manager:
            await manager.delete_snapshot(snapshot)
            with pytest.raises(SandboxNotFoundError):
                await manager.delete_snapshot(snapshot)
            with pytest.raises(TemplateError):
                await new_sandbox(manager, template=snapshot)
            await manager.resume(child.id)
            assert await LocalSandbox(manager, child.id).read_file("f") == b"then"

    asyncio.run(run())


def test_a_deleted_snapshot_stays_on_the_disk_as_long_as_a_machine_may_read_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            source = await new_sandbox(manager)
            snapshot = await source.snapshot()
            child = await new_sandbox(manager, template=snapshot)
            await manager.delete_snapshot(snapshot)
            assert (await manager.snapshots(), os.listdir(tmp_path / "snapshots")) == ([], [snapshot])
            await child.pause()
            assert os.listdir(tmp_path / "snapshots") == []

    asyncio.run(run())


def test_forks_diverge_and_leave_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            source = await new_sandbox(manager, metadata={"m": "1"})
            await source.write_file("f", b"common")
            children = [child for child in await source.fork(3) if isinstance(child, LocalSandbox)]
            assert len(children) == 3
            for number, child in enumerate(children):
                assert (await child.info()).metadata == {"m": "1"}
                await child.write_file("f", f"mine {number}".encode())
            assert await source.read_file("f") == b"common"
            assert [await child.read_file("f") for child in children] == [b"mine 0", b"mine 1", b"mine 2"]
            assert await manager.snapshots() == []
            grandchild = (await children[0].fork())[0]
            assert isinstance(grandchild, LocalSandbox)
            await asyncio.gather(*(child.destroy() for child in children))
            assert await grandchild.read_file("f") == b"mine 0"
            await grandchild.pause()
            assert os.listdir(tmp_path / "snapshots") == []

    asyncio.run(run())


def test_a_fork_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            source = await new_sandbox(manager)
            for step in ("save", "saved", "restore", "restored"):
                reached, go_on = asyncio.Event(), asyncio.Event()
                backend.faults[step] = halt(reached, go_on)
                task = asyncio.create_task(source.fork(3))
                await reached.wait()
                task.cancel()
                go_on.set()
                await asyncio.wait([task])
                assert task.cancelled()
                await state_of(manager, source.id, State.RUNNING)
                assert (manager.ids(), machines(tmp_path)) == ([source.id], [source.id])
                assert (await source.exec("echo on")).text == "on\n"

    asyncio.run(run())


# -- clocks -----------------------------------------------------------------------------------------------------------
def test_the_time_to_live_and_its_slack(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path, scoring_slack_s=0.0) as manager:
            pauses = await new_sandbox(manager, ttl_s=0.05)
            dies = await new_sandbox(manager, ttl_s=0.05, on_timeout="kill")
            stays = await new_sandbox(manager, ttl_s=None)
            await state_of(manager, pauses.id, State.PAUSED)
            while dies.id in manager.ids():
                await asyncio.sleep(0.01)
            assert (await stays.info()).expires_at is None
            info = await manager.resume(pauses.id)
            assert info.expires_at is not None and info.expires_at - time.time() <= 0.05  # as it was given last
        async with managed(tmp_path, scoring_slack_s=1000.0) as manager:
            scored = await new_sandbox(manager, ttl_s=0.01)
            (info,) = [each for each in await manager.list() if each.id == scored.id]
            while time.time() < (info.expires_at or 0):
                await asyncio.sleep(0.01)
            assert (await scored.exec("echo still here")).text == "still here\n"

    asyncio.run(run())


def test_a_resume_never_shortens_a_life_and_set_timeout_does(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            sandbox = await new_sandbox(manager, ttl_s=1000)
            before = (await sandbox.info()).expires_at or 0
            assert (await manager.resume(sandbox.id, ttl_s=10)).expires_at == before
            await sandbox.pause()
            assert ((await manager.resume(sandbox.id, ttl_s=10)).expires_at or 0) >= before
            later = await manager.resume(sandbox.id, ttl_s=5000)
            assert (later.expires_at or 0) > before + 3000
            await sandbox.set_timeout(10)
            assert ((await sandbox.info()).expires_at or 0) < before
            await sandbox.set_timeout(None)
            await sandbox.pause()
            await sandbox.resume()
            assert (await sandbox.info()).expires_at is None

    asyncio.run(run())


def test_a_deadline_in_the_middle_of_a_transition_waits_for_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend, scoring_slack_s=0.0) as manager:
            sandbox = await new_sandbox(manager)
            reached, go_on = asyncio.Event(), asyncio.Event()
            backend.faults["saved"] = halt(reached, go_on)
            task = asyncio.create_task(sandbox.snapshot())
            await reached.wait()
            await sandbox.set_timeout(0.001)
            await asyncio.sleep(0.05)
            assert (await sandbox.info()).state == State.SNAPSHOTTING
            go_on.set()
            await task
            await state_of(manager, sandbox.id, State.PAUSED)

    asyncio.run(run())


def test_idle_sandboxes_pause_but_not_while_they_work(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path) as manager:
            idle = await new_sandbox(manager, idle_pause_s=0.1)
            busy = await new_sandbox(manager, idle_pause_s=0.1)
            process = await busy.start("sleep 1000", tag="work")
            await state_of(manager, idle.id, State.PAUSED)
            used = manager._core.box(busy.id).used_at
            while manager._core.box(busy.id).used_at < used + 0.3:  # looked at, and found at work
                await asyncio.sleep(0.02)
            assert (await busy.info()).state == State.RUNNING
            await process.kill()
            await state_of(manager, busy.id, State.PAUSED)

    asyncio.run(run())


def test_what_uses_too_much_disk_is_ended(tmp_path: Path) -> None:
    async def run() -> None:
        from dataclasses import replace

        from moonlet.sandbox.lifecycle.timers import Timers

        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager, limits=Limits(disk_bytes=1 << 20))
            call = asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=None))
            while not await sandbox.processes():
                await asyncio.sleep(0.001)
            watch = Timers(manager._core, manager.pause, manager.destroy)
            await watch.check_disks()
            assert (await sandbox.info()).state == State.RUNNING
            backend.usage = replace(backend.usage, disk_bytes=2 << 20)
            await watch.check_disks()
            info = await sandbox.info()
            assert (info.state, info.reason) == (State.FAILED, "disk_full")
            with pytest.raises(SandboxDiedError, match="disk_full"):
                await call
            assert machines(tmp_path) == []

    asyncio.run(run())


# -- one directory, one manager ---------------------------------------------------------------------------------------
def test_a_state_directory_has_one_manager(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path):
            with pytest.raises(SandboxStateError, match=f"process {os.getpid()}"):
                async with managed(tmp_path):
                    pass
        async with managed(tmp_path) as manager:
            assert manager.counts()["running"] == 0
        with pytest.raises(SandboxStateError, match="closed"):
            await manager.create()
        assert (tmp_path / "sandboxes.sqlite3").stat().st_mode & 0o777 == 0o600

    asyncio.run(run())


def test_leaving_pauses_and_the_next_manager_resumes(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with managed(tmp_path, backend) as manager:
            sandbox = await new_sandbox(manager)
            await sandbox.write_file("f", b"x")
        assert machines(tmp_path) == []
        async with managed(tmp_path, backend) as manager:
            assert (await manager.info(sandbox.id)).state == State.PAUSED
            await manager.resume(sandbox.id)
            assert await LocalSandbox(manager, sandbox.id).read_file("f") == b"x"
            await manager.close(pause_running=False)
        assert machines(tmp_path) == [sandbox.id]
        async with managed(tmp_path, backend) as manager:
            assert (await LocalSandbox(manager, sandbox.id).exec("echo on")).text == "on\n"

    asyncio.run(run())


def test_closing_ends_what_waits(tmp_path: Path) -> None:
    async def run() -> list[ExecResult | SandboxInfo | BaseException]:
        async with managed(tmp_path) as manager:
            sandbox = await new_sandbox(manager)
            calls = [asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=None))]
            while not await sandbox.processes():
                await asyncio.sleep(0.001)
        async with asyncio.timeout(10):
            return await asyncio.gather(*calls, return_exceptions=True)

    (result,) = asyncio.run(run())
    assert isinstance(result, SandboxStateError)
