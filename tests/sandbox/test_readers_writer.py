"""The lock between calls and transitions."""

from __future__ import annotations

import asyncio

import pytest

from moonlet.sandbox.readers_writer import ReadersWriter


async def _hold(lock: ReadersWriter, log: list[str], name: str, until: asyncio.Event, *, writes: bool = False) -> None:
    async with lock.write() if writes else lock.read():
        log.append(f"+{name}")
        await until.wait()
        log.append(f"-{name}")


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_readers_share_and_a_waiting_writer_goes_first() -> None:
    async def run() -> list[str]:
        lock, log, go = ReadersWriter(), [], asyncio.Event()
        tasks = [asyncio.create_task(_hold(lock, log, name, go)) for name in "ab"]
        await _turns()
        tasks.append(asyncio.create_task(_hold(lock, log, "W", go, writes=True)))
        await _turns()
        tasks.append(asyncio.create_task(_hold(lock, log, "c", go)))
        await _turns()
        assert log == ["+a", "+b"]
        go.set()
        await asyncio.gather(*tasks)
        return log

    log = asyncio.run(run())
    assert log[:4] == ["+a", "+b", "-a", "-b"]
    assert log[4:] == ["+W", "-W", "+c", "-c"]


def test_a_writer_that_gives_up_lets_readers_in() -> None:
    async def run() -> None:
        lock, log, go = ReadersWriter(), [], asyncio.Event()
        reader = asyncio.create_task(_hold(lock, log, "a", go))
        await _turns()
        with pytest.raises(TimeoutError):
            async with lock.write(patience_s=0.01):
                pass
        async with lock.read():
            assert lock.num_readers == 2
        go.set()
        await reader
        async with lock.write(patience_s=0):
            assert lock.num_readers == 0

    asyncio.run(run())


def test_a_writer_cuts_readers_after_its_patience_is_over() -> None:
    async def run() -> list[str]:
        lock, log, go = ReadersWriter(), [], asyncio.Event()
        reader = asyncio.create_task(_hold(lock, log, "a", go))
        await _turns()
        async with lock.write(patience_s=0.01, cut=go.set):
            log.append("W")
        await reader
        return log

    assert asyncio.run(run()) == ["+a", "-a", "W"]


def test_quiet_goes_on_beside_readers_that_stay() -> None:
    async def run() -> None:
        lock = ReadersWriter()
        async with lock.read(), lock.quiet(0.01):
            assert lock.num_readers == 1
        async with lock.quiet(0.01):
            reader = asyncio.create_task(_hold(lock, [], "a", asyncio.Event()))
            await _turns()
            assert lock.num_readers == 0  # it is a writer now
        await _turns()
        assert lock.num_readers == 1
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    asyncio.run(run())


def test_cancelled_waiters_leave_no_trace() -> None:
    async def run() -> None:
        lock, go = ReadersWriter(), asyncio.Event()
        reader = asyncio.create_task(_hold(lock, [], "a", go))
        await _turns()
        waiting = [
            asyncio.create_task(_hold(lock, [], "w", go, writes=writes)) for writes in (True, False, True, False)
        ]
        await _turns()
        waiting[0].cancel()
        waiting[1].cancel()
        await _turns()
        go.set()
        results = await asyncio.gather(reader, *waiting, return_exceptions=True)
        assert [type(result) for result in results[1:3]] == [asyncio.CancelledError] * 2
        assert results[3:] == [None, None]
        async with lock.write(patience_s=0):
            pass

    asyncio.run(run())
