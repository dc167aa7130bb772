"""The pool on scripted sandboxes: limits, turns, spares, retries, and nothing left whatever happens when (B77)."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sandbox.scripted_sandbox import ScriptedHost, ScriptedSandbox, random_faults, run_virtually

from moonlet.errors import (
    ConfigError,
    SandboxDiedError,
    SandboxError,
    SandboxLimitError,
    SandboxStateError,
    SandboxTimeoutError,
    TemplateError,
)
from moonlet.sandbox.api import Sandbox, SandboxSpec
from moonlet.sandbox.pool import Pool, PoolConfig

SPEC = SandboxSpec()


def test_a_lease_is_a_machine_until_its_end() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(warm=0, name="rollouts")) as pool:
            async with pool.lease(replace(SPEC, metadata={"task": "7"})) as lease:
                assert (await lease.sandbox.exec("true")).exit_code == 0
                assert pool.stats().running == pool.stats().alive == 1
            assert not host.alive
            with pytest.raises(SandboxStateError, match="async with"):
                _ = lease.sandbox
        assert host.specs[0].on_timeout == "kill" and host.specs[0].ttl_s == PoolConfig.orphan_ttl_s
        assert host.specs[0].metadata == {"task": "7", "moonlet-pool": "rollouts"}

    run_virtually(run())


def test_turns_are_taken_in_the_order_of_asking() -> None:
    order: list[int] = []

    async def worker(pool: Pool, number: int) -> None:
        async with pool.lease(SPEC) as lease:
            order.append(number)
            await lease.sandbox.exec("work")

    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=2, max_alive=20, warm=0)) as pool:
            await asyncio.gather(*(worker(pool, number) for number in range(10)))
        assert host.max_running == 2

    run_virtually(run())
    assert order == list(range(10))


def test_machines_that_wait_for_the_model_give_way() -> None:
    """Twelve leases on two places: all are alive at once, since ten of them are paused."""
    inside = 0

    async def worker(pool: Pool) -> None:
        nonlocal inside
        async with pool.lease(SPEC) as lease:
            inside += 1
            for _ in range(3):
                await lease.sandbox.exec("work")
                async with lease.idle():
                    await asyncio.sleep(60)
            inside -= 1

    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=2, max_alive=12, warm=0)) as pool:
            workers = [asyncio.create_task(worker(pool)) for _ in range(12)]
            while inside < 12:
                await asyncio.sleep(1)
            assert pool.stats().paused >= 10
            await asyncio.gather(*workers)
            stats = pool.stats()
        assert host.max_running == 2 and host.max_alive == 12
        assert stats.pauses >= 12 and stats.resumes <= stats.pauses and stats.destroyed == 12

    run_virtually(run())


def test_an_idle_machine_runs_on_while_nobody_waits() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool, pool.lease(SPEC) as lease:
            async with lease.idle():
                await asyncio.sleep(1000)
            await lease.sandbox.exec("work")
            assert pool.stats().pauses == 0

    run_virtually(run())


def test_the_grace_of_an_idle_machine() -> None:
    """Somebody waits, but the model answers sooner than the grace is over."""

    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=1, warm=0, idle_grace_s=5)) as pool:
            async with pool.lease(SPEC) as lease:
                other = asyncio.create_task(pool.run(lambda lease: lease.sandbox.exec("work"), SPEC))
                for thinking_s, pauses in ((4.9, 0), (5.1, 1)):
                    async with lease.idle():
                        await asyncio.sleep(thinking_s)
                    await lease.sandbox.exec("work")
                    assert pool.stats().pauses == pauses
            await other

    run_virtually(run())


def test_spares_of_kinds_that_come_again() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=4, warm=2)) as pool:
            async with pool.lease(SPEC):
                await asyncio.sleep(10)
                assert pool.stats().spares == 0, "nothing says that this kind comes again"
            pool.warm_up(SPEC)
            await asyncio.sleep(10)
            assert pool.stats().spares == 2
            start = asyncio.get_running_loop().time()
            async with pool.lease(SPEC):
                assert asyncio.get_running_loop().time() == start, "a spare is there at once"
                await asyncio.sleep(10)
                assert pool.stats().spares == 2 and pool.stats().running == 3
            await asyncio.sleep(PoolConfig.spare_idle_s * 2)
            assert pool.stats().spares == 0 and not host.alive

    run_virtually(run())


def test_spares_give_way_to_leases_of_other_kinds() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=2, max_alive=2, warm=2)) as pool:
            pool.warm_up(SPEC)
            await asyncio.sleep(10)
            assert pool.stats().spares == 2
            async with pool.lease(replace(SPEC, template="a")), pool.lease(replace(SPEC, template="b")):
                assert pool.stats().spares == 0
        assert host.max_alive == 2

    run_virtually(run())


def test_a_dead_spare_is_passed_over() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=2, warm=1, orphan_ttl_s=40)) as pool:
            pool.warm_up(SPEC)
            await asyncio.sleep(5)
            next(iter(host.alive)).die()
            await asyncio.sleep(15)
            assert pool.stats().spares == 1 and len(host.alive) == 1, "the heartbeat found it and made another"

    run_virtually(run())


def test_setup_runs_once_on_each_machine_and_its_error_leaves_none() -> None:
    seen: list[str] = []

    async def setup(sandbox: Sandbox) -> None:
        seen.append(sandbox.id)
        await sandbox.exec("clone")
        if len(seen) > 3:
            raise RuntimeError("no such repository")

    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=1, warm=1)) as pool:
            for _ in range(3):
                async with pool.lease(SPEC, setup) as lease:
                    assert seen[-1] == lease.sandbox.id
            with pytest.raises(RuntimeError, match="no such repository"):
                async with pool.lease(SPEC, setup):
                    pass
            assert not host.alive
        assert len(seen) == len(set(seen))

    run_virtually(run())


def test_infrastructure_is_tried_again_and_other_errors_are_not() -> None:
    errors: list[Exception] = []

    async def run() -> None:
        host = ScriptedHost(fault=lambda operation: errors.pop(0) if errors and operation == "create" else None)
        async with Pool(host.create, PoolConfig(max_attempts=3, warm=0)) as pool:
            errors[:] = [SandboxTimeoutError("slow"), SandboxDiedError("gone")]
            async with pool.lease(SPEC):
                assert pool.stats().retries == 2
            errors[:] = [SandboxTimeoutError("slow")] * 3
            with pytest.raises(SandboxTimeoutError):
                await pool.run(lambda lease: lease.sandbox.exec("work"), SPEC)
            errors[:] = [TemplateError("there is no such template")]
            with pytest.raises(TemplateError):
                await pool.run(lambda lease: lease.sandbox.exec("work"), SPEC)
            assert errors == []
            errors[:] = [SandboxLimitError("full", 30.0)] * 5
            start = asyncio.get_running_loop().time()
            async with pool.lease(SPEC):
                assert asyncio.get_running_loop().time() >= start + 150, "a full service is waited for"

    run_virtually(run())


def test_retries_have_a_budget() -> None:
    async def run() -> None:
        host = ScriptedHost(fault=random_faults(1, 1.0, lambda: SandboxTimeoutError("slow"), "create"))
        async with Pool(host.create, PoolConfig(max_attempts=3, warm=0, retry_share=0.1)) as pool:
            for _ in range(200):
                with pytest.raises(SandboxTimeoutError):
                    async with pool.lease(SPEC):
                        pass
            assert pool.stats().retries == 20 and len(host.specs) == 220

    run_virtually(run())


def test_work_is_run_again_when_its_machine_dies() -> None:
    tries = itertools.count()

    async def work(lease) -> str:
        if next(tries) < 2:
            lease.sandbox.die()
            raise SandboxDiedError("gone")
        await lease.sandbox.exec("work")
        return lease.sandbox.id

    async def run() -> None:
        async with Pool(ScriptedHost().create, PoolConfig(warm=0)) as pool:
            assert await pool.run(work, SPEC) == "sandbox-2"

    run_virtually(run())


def test_what_cannot_be_destroyed_stays_listed() -> None:
    async def run() -> None:
        broken = True
        host = ScriptedHost(fault=lambda name: SandboxError("disk") if broken and name == "destroy" else None)
        async with Pool(host.create, PoolConfig(warm=0)) as pool:
            async with pool.lease(SPEC):
                pass
            assert pool.stats().undestroyed == ("sandbox-0",) and pool.stats().destroyed == 0
            assert pool.stats().alive == 0, "its place is free for others"
            broken = False
            await asyncio.sleep(PoolConfig.orphan_ttl_s)
            assert pool.stats().undestroyed == () and pool.stats().destroyed == 1 and not host.alive
            broken = True
            async with pool.lease(SPEC):
                pass
            with pytest.raises(SandboxError, match="sandbox-1"):
                await pool.close()
            broken = False
            await pool._workshop.destroy(pool._workshop.undestroyed["sandbox-1"][0])

    run_virtually(run())


def test_a_machine_whose_pause_fails_goes_on() -> None:
    async def run() -> None:
        host = ScriptedHost(fault=random_faults(1, 1.0, lambda: SandboxError("the disk is full"), "pause"))
        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool:
            async with pool.lease(SPEC) as lease:
                other = asyncio.create_task(pool.run(lambda lease: lease.sandbox.exec("work"), SPEC))
                async with lease.idle():
                    await asyncio.sleep(3)
                await lease.sandbox.exec("work")
            await other
        assert host.max_running == 1

    run_virtually(run())


def test_a_full_service_is_waited_for_in_a_resume_too() -> None:
    errors: list[Exception] = []

    async def run() -> None:
        host = ScriptedHost(fault=lambda operation: errors.pop(0) if errors and operation == "resume" else None)
        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool, pool.lease(SPEC) as lease:
            errors[:] = [SandboxLimitError("full", 30.0)] * 3
            other = asyncio.create_task(pool.run(lambda lease: lease.sandbox.exec("work"), SPEC))
            async with lease.idle():
                await other
            await lease.sandbox.exec("work")
            assert errors == [] and asyncio.get_running_loop().time() > 90

    run_virtually(run())


def test_a_lease_that_is_cancelled_does_not_wait_for_a_full_service() -> None:
    async def run() -> None:
        host = ScriptedHost(fault=random_faults(1, 1.0, lambda: SandboxLimitError("full", 30.0), "resume"))

        async def first(pool: Pool) -> None:
            async with pool.lease(SPEC) as lease, lease.idle():
                await asyncio.sleep(20)

        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool:
            waiting = asyncio.create_task(first(pool))
            await asyncio.sleep(2)
            await pool.run(lambda lease: lease.sandbox.exec("work"), SPEC)
            await asyncio.sleep(60)
            waiting.cancel()
            before = asyncio.get_running_loop().time()
            await asyncio.wait([waiting])
            assert asyncio.get_running_loop().time() < before + 5 and not host.alive

    run_virtually(run())


def test_a_cancelled_idle_is_resumed_by_name() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool, pool.lease(SPEC) as lease:
            other = asyncio.create_task(pool.run(lambda lease: lease.sandbox.exec("work"), SPEC))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20), lease.idle():
                    await asyncio.sleep(1000)
            await lease.resume()
            await lease.sandbox.exec("work")
            await other

    run_virtually(run())


def test_a_closed_pool_refuses() -> None:
    async def run() -> None:
        host = ScriptedHost()
        async with Pool(host.create, PoolConfig(max_running=1, warm=0)) as pool:
            async with pool.lease(SPEC) as lease:
                waiting = asyncio.create_task(pool.run(lambda lease: lease.sandbox.exec("work"), SPEC))
                await asyncio.sleep(0)
                await pool.close()
                assert not host.alive
                with pytest.raises(SandboxStateError, match="closed"):
                    await waiting
                with pytest.raises(SandboxStateError, match="closed"):
                    await lease.resume()
            with pytest.raises(SandboxStateError, match="closed"):
                await pool.run(lambda lease: lease.sandbox.exec("work"), SPEC)

    run_virtually(run())


@pytest.mark.parametrize("options", [{"max_running": 0}, {"max_running": 9, "max_alive": 8}, {"warm": -1}])
def test_a_configuration_that_makes_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        PoolConfig(**options)


PLANS = st.lists(
    st.tuples(
        st.integers(0, 2),  # kind
        st.lists(st.sampled_from([0.0, 0.3, 2.0, 30.0]), max_size=4),  # seconds that the model thinks
        st.sampled_from([None, None, 0.0, 0.4, 1.3, 5.0, 40.0]),  # when it is cancelled
        st.booleans(),  # whether it ends with an error
    ),
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(
    limits=st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 2)),
    plans=PLANS,
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    interrupt=st.sampled_from([None, None, 0.0, 0.7, 1.0, 2.1, 3.0, 7.7, 50.0]),
)
@example(limits=(1, 0, 1), plans=[(0, [30.0], None, False)] * 5, seed=0, faults=0.0, interrupt=None)
def test_nothing_is_left_whatever_happens_when(limits, plans, seed, faults, interrupt) -> None:
    """Errors in bodies and setups, cancelled leases, faults of every call, and Ctrl-C at any moment."""
    config = PoolConfig(limits[0], limits[0] + limits[1], limits[2])
    dice = random.Random(seed)

    def error() -> Exception:
        return dice.choice([SandboxTimeoutError("no answer"), SandboxDiedError("gone"), SandboxLimitError("full", 7.0)])

    host = ScriptedHost(
        fault=random_faults(
            seed, faults, lambda: SandboxTimeoutError("no answer"), "create", "pause", "resume", "exec"
        ),
        delay=lambda: dice.choice([0.0, 0.0, 0.1, 1.0, 3.0]),
    )

    async def setup(sandbox: Sandbox) -> None:
        await sandbox.exec("setup")
        if dice.random() < faults:
            raise RuntimeError("setup")

    async def worker(pool: Pool, plan) -> None:
        kind, thinking, _, is_wrong = plan
        async with pool.lease(replace(SPEC, template=str(kind)), setup if kind == 2 else None) as lease:
            for seconds in thinking:
                await lease.sandbox.exec("work")
                async with lease.idle():
                    await asyncio.sleep(seconds)
            await lease.sandbox.exec("work")
            if is_wrong:
                raise RuntimeError("body")

    async def run() -> list[BaseException | None]:
        async with Pool(host.create, config) as pool:
            workers = [asyncio.create_task(worker(pool, plan)) for plan in plans]
            for task, plan in zip(workers, plans):
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                if plan[2] is not None:
                    asyncio.get_running_loop().call_later(plan[2], task.cancel)
            if interrupt is not None:
                await asyncio.sleep(interrupt)
                raise KeyboardInterrupt
            async with asyncio.timeout(100_000):
                return await asyncio.gather(*workers, return_exceptions=True)

    try:
        ends = run_virtually(run())
    except KeyboardInterrupt:
        ends = None
    assert not host.alive
    assert host.max_running <= config.max_running and host.max_alive <= config.max_alive
    for end, plan in zip(ends or [], plans):
        if not faults and plan[2] is None:
            assert (end is None) != plan[3], f"{plan} ended with {end!r}"


@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_leaves_nothing(moment: int) -> None:
    """The real signal, at ten points between the first creation and the last."""
    host = ScriptedHost(delay=lambda: 0.01)

    async def worker(pool: Pool) -> None:
        async with pool.lease(SPEC) as lease:
            await lease.sandbox.exec("work")
            async with lease.idle():
                await asyncio.sleep(0.01)

    def interrupt(operation: str) -> None:
        if len(host.calls) == 1 + 5 * moment:
            os.kill(os.getpid(), signal.SIGINT)

    async def run() -> None:
        host.fault = interrupt
        async with Pool(host.create, PoolConfig(max_running=3, max_alive=8, warm=1, idle_grace_s=0)) as pool:
            await asyncio.gather(*(worker(pool) for _ in range(16)))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert not host.alive and len(host.calls) > 5 * moment


def test_scripted_sandboxes_say_what_is_wrong() -> None:
    """The limits above mean something only if the script notices a paused machine that is used."""

    async def run() -> None:
        host = ScriptedHost()
        sandbox = await host.create(SPEC)
        assert isinstance(sandbox, ScriptedSandbox)
        await sandbox.pause()
        with pytest.raises(SandboxStateError):
            await sandbox.exec("work")

    run_virtually(run())
