"""Hundreds of machines of the backend namespace."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from moonlet.sandbox.api import Limits
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.processes import all_pids, command_line

MIB = 1 << 20
AS_ROOT = os.geteuid() == 0


@pytest.mark.slow
def test_five_hundred_machines_leave_nothing(tmp_path: Path) -> None:
    """Started, used and destroyed with 50 alive at once: no process, mount, group, folder or descriptor is left."""
    from moonlet.sandbox.api import SandboxSpec
    from moonlet.sandbox.local import LocalSandbox
    from moonlet.sandbox.manager import Manager, ServiceConfig

    async def one(manager: Manager, number: int) -> int:
        spec = SandboxSpec(limits=Limits(memory_bytes=128 * MIB), ttl_s=600)
        box = LocalSandbox(manager, (await manager.create(spec)).id)
        await box.write_file("n", str(number).encode())
        assert (await box.exec("setsid sleep 600 & cat n")).text == str(number)
        usage = await manager.usage(box.id)
        await box.destroy()
        return usage.memory_bytes

    async def work() -> list[int]:
        config = ServiceConfig(tmp_path / "s", backend="namespace", max_running=64)
        async with Manager(config, backends={"namespace": NamespaceBackend()}) as manager:
            gate = asyncio.Semaphore(50)

            async def guarded(number: int) -> int:
                async with gate:
                    return await one(manager, number)

            await guarded(-1)
            before = _resources(manager._core.label)
            used = await asyncio.gather(*(guarded(number) for number in range(500)))
            assert list((tmp_path / "s/sandboxes").iterdir()) == []
            assert _resources(manager._core.label) == before
        return used

    used = asyncio.run(work())
    assert sorted(used)[len(used) // 2] <= 8 * MIB


def _resources(label: str) -> dict[str, object]:
    """What is held now, on this host, by this process and by machines of this label."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "groups": [at for at, _, _ in os.walk("/sys/fs/cgroup") if f"/{label}/" in at],
        "processes": [pid for pid in all_pids() if any(f"/{label}/" in word for word in command_line(pid))],
    }
