"""Forks: copies of a running sandbox that go on from the same moment, each on its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from moonlet.errors import SandboxStateError
from moonlet.sandbox.api import SandboxInfo, State
from moonlet.sandbox.generations import settled
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.creating import Plan, abandon, begin_life, new_box
from moonlet.sandbox.lifecycle.machines import watch
from moonlet.sandbox.records import SnapshotInfo

log = logging.getLogger(__name__)


async def start_children(core: Core, source: Box, snapshot: SnapshotInfo, count: int) -> list[SandboxInfo | Exception]:
    """Children of a hidden snapshot, each on its own; all that started become visible at once."""
    backend = await core.matching_backend(snapshot.backend, snapshot.version, f"sandbox {source.id}")
    plan = Plan(source.row.spec, backend.name, await backend.probe(), snapshot.template_id, snapshot)
    children: list[Box] = []
    errors: dict[int, Exception] = {}
    try:
        for _ in range(count):
            children.append(new_box(core, plan))
        await core.write(core.records.put, *(child.row for child in children))
        tasks = [child.begin("create", begin_life(core, child)) for child in children]
        await asyncio.wait(tasks)
        for number, task in enumerate(tasks):
            if task.cancelled():
                errors[number] = SandboxStateError(f"child {children[number].id} was destroyed while it started")
            elif (error := task.exception()) is not None:
                errors[number] = error if isinstance(error, Exception) else SandboxStateError(str(error))
        await _commit_children(core, [child for number, child in enumerate(children) if number not in errors])
    except BaseException:
        await settled(asyncio.ensure_future(_forget_all(core, children)))
        raise
    for number in errors:
        if not children[number].is_gone and children[number].kind != "kill":
            await abandon(core, children[number])
    return [errors.get(number) or child.row.info() for number, child in enumerate(children)]


async def _commit_children(core: Core, children: list[Box]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for child in children:
            await stack.enter_async_context(child.saving)
        now = time.time()
        rows = []
        for child in children:
            if not child.is_gone and child.kind != "kill":
                ttl_s = child.row.spec.ttl_s
                expires_at = None if ttl_s is None else now + ttl_s
                rows.append((child, replace(child.row, state=State.RUNNING, is_live=True, expires_at=expires_at)))
        await core.write(core.records.put, *(row for _, row in rows))
        for child, row in rows:
            if child.machine is not None:
                core.publish(child, row)
                watch(core, child)


async def _forget_all(core: Core, children: list[Box]) -> None:
    tasks = [child.task for child in children if child.task is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    await asyncio.gather(*(abandon(core, child) for child in children))
