"""Five hundred sandboxes in one run, fifty at once: what they cost, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moonlet.sandbox.api import Caps, Limits, SandboxSpec
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.manager import Manager, ServiceConfig
from moonlet.sandbox.pool import Lease, Pool, PoolConfig
from moonlet.sandbox.state_dir import label_of

MAX_IDLE_BYTES = 8 << 20
SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20))


def processes(label: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if label.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


def mounts(*words: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if any(word in line for word in words)]


def cgroups(label: str) -> list[str]:
    """Groups of machines. The empty group of the label itself is kept for the next one."""
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(folder) == label:
            found += [os.path.join(folder, name) for name in names]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count, at_once", [(500, 50)])
def test_nothing_of_five_hundred_is_left(
    count: int, at_once: int, tmp_path: Path, require_backend: Callable[[str], Caps]
) -> None:
    require_backend("namespace")
    state_dir = tmp_path / "s"
    most, memory = 0, []

    async def work(lease: Lease, number: int, manager: Manager, full: asyncio.Event) -> None:
        nonlocal most
        most = max(most, len(manager.ids()))
        if most >= at_once:
            full.set()
        if number < at_once:
            await full.wait()
            memory.append((await manager.usage(lease.sandbox.id)).memory_bytes)
        await lease.sandbox.write_file("note", str(number).encode())
        assert (await lease.sandbox.exec("cat note")).text == str(number)

    async def run() -> None:
        config = ServiceConfig(state_dir, backend="namespace", max_running=at_once)
        async with Manager(config, backends={"namespace": make_backend("namespace")}) as manager:
            full = asyncio.Event()
            pool_config = PoolConfig(max_running=at_once, max_alive=at_once, warm=0)
            async with Pool(manager, pool_config) as pool:
                await asyncio.gather(
                    *(pool.run(lambda lease, n=n: work(lease, n, manager, full), SPEC) for n in range(count))
                )
                stats = pool.stats()
            assert stats.created == stats.destroyed == count and stats.retries == 0
            assert manager.ids() == []

    descriptors = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    label = label_of(state_dir)
    assert most == at_once
    assert max(memory) <= MAX_IDLE_BYTES, f"an idle sandbox takes {max(memory) >> 20} MiB"
    assert processes(label) == [] and mounts(label, str(state_dir)) == [] and cgroups(label) == []
    assert list((state_dir / "sandboxes").iterdir()) == [] and list((state_dir / "snapshots").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors
