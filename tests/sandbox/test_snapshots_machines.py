"""Snapshots that one service keeps in a shared place and another starts machines from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.managed import managed, new_sandbox

from moonlet.errors import SandboxNotFoundError, StorageError, TemplateError
from moonlet.sandbox.api import Caps, Limits, SandboxSpec
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager, ServiceConfig

BACKENDS = [
    "namespace",
    pytest.param("gvisor", marks=pytest.mark.slow),
    pytest.param("microvm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_machine_moves_to_another_service(
    backend: str, tmp_path: Path, require_backend: Callable[[str], Caps]
) -> None:
    caps = require_backend(backend)

    def service(name: str) -> Manager:
        config = ServiceConfig(tmp_path / name, backend=backend, snapshot_url=str(tmp_path / "shared"))
        return Manager(config, backends={backend: make_backend(backend)})

    async def new(manager: Manager, template: str = "host") -> LocalSandbox:
        spec = SandboxSpec(template=template, limits=Limits(memory_bytes=256 << 20), ttl_s=None)
        return LocalSandbox(manager, (await manager.create(spec)).id)

    async def count_of(box: LocalSandbox) -> int:
        return int((await box.read_file("count")).strip() or 0)

    async def run() -> None:
        async with service("one") as first:
            box = await new(first)
            await box.start("i=0; while :; do i=$((i+1)); echo $i > next; mv next count; sleep 0.05; done")
            while "count" not in [info.name for info in await box.list_files()]:
                await asyncio.sleep(0.02)
            snapshot = await box.snapshot("moved")
            await box.destroy()
        async with service("two") as second:
            boxes = await asyncio.gather(new(second, snapshot), new(second, snapshot))
            before = await count_of(boxes[0])
            if caps.fork_processes:
                while await count_of(boxes[0]) <= before:
                    await asyncio.sleep(0.02)
            assert before > 0 and (await boxes[1].exec("echo x > own; cat own")).text == "x\n"
            await boxes[0].destroy()
            await second.delete_snapshot(snapshot)
            assert (await boxes[1].exec("cat own")).text == "x\n", "what was started from it lives on"
            await boxes[1].destroy()
        async with service("three") as third:
            with pytest.raises(TemplateError):
                await new(third, snapshot)
        assert [path for path in (tmp_path / "shared" / "objects").rglob("*") if path.is_file()] == []

    asyncio.run(run())


def test_a_place_that_cannot_be_written_fails_the_snapshot(tmp_path: Path) -> None:
    """The sandbox goes on, and no id is visible."""

    async def run() -> None:
        async with managed(tmp_path / "s", snapshot_url="/proc/nothing") as manager:
            box = await new_sandbox(manager)
            with pytest.raises(StorageError, match="cannot write"):
                await box.snapshot()
            assert (await box.exec("echo on")).text == "on\n"
            assert await manager.snapshots() == []
            with pytest.raises(SandboxNotFoundError):
                await manager.delete_snapshot("snapnothing")

    asyncio.run(run())
