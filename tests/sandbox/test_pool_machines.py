"""The pool over a manager: on a backend without isolation, and for real in namespaces."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.managed import managed
from sandbox.scripted_backend import ScriptedBackend

from moonlet.errors import SandboxTimeoutError
from moonlet.sandbox.api import Caps, Limits, SandboxSpec, State
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.manager import Manager, ServiceConfig
from moonlet.sandbox.pool import Lease, Pool, PoolConfig

SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20))
ACTIVE = {State.CREATING, State.RUNNING, State.RESUMING, State.PAUSING}


def new_manager(backend: str, folder: Path) -> Manager:
    if backend == "scripted":
        return managed(folder)
    return Manager(ServiceConfig(folder, backend=backend), backends={backend: make_backend(backend)})


async def agent(lease: Lease, number: int, turns: int = 3) -> None:
    """Notes each turn in a file; between two of them the model thinks."""
    for turn in range(turns):
        result = await lease.sandbox.exec(f"echo {number}.{turn} >> notes; cat notes")
        assert result.text.split() == [f"{number}.{past}" for past in range(turn + 1)]
        async with lease.idle():
            await asyncio.sleep(0.05)


@pytest.fixture(params=["scripted", "namespace", pytest.param("gvisor", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, require_backend: Callable[[str], Caps]) -> str:
    if request.param != "scripted":
        require_backend(request.param)
    return request.param


def test_twelve_agents_on_three_places(backend: str, tmp_path: Path) -> None:
    most = 0

    async def watch(manager: Manager) -> None:
        nonlocal most
        while True:
            counts = manager.counts()
            most = max(most, sum(counts[state] for state in ACTIVE))
            await asyncio.sleep(0.005)

    async def run() -> None:
        async with new_manager(backend, tmp_path / "s") as manager:
            watcher = asyncio.create_task(watch(manager))
            async with Pool(manager, PoolConfig(max_running=3, max_alive=12, warm=1, idle_grace_s=0)) as pool:
                await asyncio.gather(
                    *(pool.run(lambda lease, number=number: agent(lease, number), SPEC) for number in range(12))
                )
                stats = pool.stats()
            assert stats.pauses > 0 and stats.resumes > 0
            watcher.cancel()
            assert manager.ids() == []
        assert 0 < most <= 3

    asyncio.run(run())


def test_cancelled_at_random_points(backend: str, tmp_path: Path) -> None:
    """Ten rounds of leases of which each is cancelled somewhere, and the pool closed in between (B77)."""
    dice = random.Random(7)

    async def run() -> None:
        async with new_manager(backend, tmp_path / "s") as manager:
            for _ in range(10):
                async with Pool(manager, PoolConfig(max_running=2, max_alive=5, warm=1, idle_grace_s=0)) as pool:
                    tasks = [
                        asyncio.create_task(pool.run(lambda lease, number=number: agent(lease, number), SPEC))
                        for number in range(4)
                    ]
                    for task in tasks:
                        await asyncio.sleep(dice.uniform(0, 0.1))
                        task.cancel()
                    if dice.random() < 0.5:
                        await asyncio.gather(*tasks, return_exceptions=True)
                assert manager.ids() == []
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(end) for end in ends} <= {asyncio.CancelledError, type(None)}

    asyncio.run(run())


def test_a_start_that_fails_is_repeated(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    backend.faults["launch"] = SandboxTimeoutError("the machine did not answer")

    async def run() -> None:
        async with managed(tmp_path / "s", backend) as manager, Pool(manager, PoolConfig(warm=0)) as pool:
            await pool.run(lambda lease: agent(lease, 0, turns=1), SPEC)
            assert pool.stats().retries == 1 and backend.steps.count("launch") == 2
            assert manager.ids() == []

    asyncio.run(run())


def test_the_heartbeat_keeps_leases_alive(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            managed(tmp_path / "s", scoring_slack_s=0.0) as manager,
            Pool(manager, PoolConfig(warm=0, orphan_ttl_s=0.8)) as pool,
            pool.lease(SPEC) as lease,
        ):
            first = (await lease.sandbox.info()).expires_at
            for _ in range(3):
                before = (await lease.sandbox.info()).expires_at
                while (await lease.sandbox.info()).expires_at == before:
                    await asyncio.sleep(0.02)
            assert (await lease.sandbox.exec("true")).exit_code == 0
            assert first is not None

    asyncio.run(run())


def test_machines_of_a_pool_that_was_killed_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with managed(tmp_path / "s", scoring_slack_s=0.0) as manager:
            pool = Pool(manager, PoolConfig(warm=0, orphan_ttl_s=0.5))  # never entered: its heart does not beat
            lease = pool.lease(SPEC)
            await lease.__aenter__()
            while manager.ids():
                await asyncio.sleep(0.02)
            await lease.__aexit__(None, None, None)

    asyncio.run(run())
