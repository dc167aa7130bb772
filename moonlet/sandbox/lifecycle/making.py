"""Requests for new sandboxes: what a repeated one gets, and what is left of one that nobody waits for any more: nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Any

from moonlet.errors import ConfigError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import SandboxInfo, SandboxSpec
from moonlet.sandbox.generations import settled
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.copying import capture, collect_snapshots
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.creating import create, make_plan, new_box
from moonlet.sandbox.lifecycle.forking import start_children
from moonlet.sandbox.lifecycle.killing import begin_kill
from moonlet.sandbox.lifecycle.transition import outcome, transition
from moonlet.sandbox.records import CreateKey

_MAX_KEY_CHARS = 256


class Maker:
    """Creates and forks of one manager, each a task that `close` ends."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tasks: set[asyncio.Task[Any]] = set()
        self._by_key: dict[str, tuple[str, asyncio.Task[SandboxInfo]]] = {}

    async def close(self) -> None:
        """End what is being made; none of it is there afterwards."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, spec: SandboxSpec, key: str | None) -> SandboxInfo:
        if key is not None:
            return await self._create_once(spec, key)
        (info,) = await self._unless_deserted(self._create_alone(spec))
        return info

    async def _create_alone(self, spec: SandboxSpec) -> list[SandboxInfo]:
        return [await self._create(spec, None)]

    async def _create_once(self, spec: SandboxSpec, key: str) -> SandboxInfo:
        if not 0 < len(key) <= _MAX_KEY_CHARS:
            raise ConfigError(f"an idempotency key has 1 to {_MAX_KEY_CHARS} characters")
        request = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True, default=str).encode()).hexdigest()
        if key not in self._by_key:
            task = self._start(self._create_or_find(spec, key, request))
            self._by_key[key] = (request, task)
            task.add_done_callback(lambda _: self._by_key.pop(key, None))
        wanted, task = self._by_key[key]
        _require_same(key, wanted, request)
        await asyncio.wait([task])
        return outcome(task)

    async def _create_or_find(self, spec: SandboxSpec, key: str, request: str) -> SandboxInfo:
        found = await self._core.write(self._core.records.key, key)
        if found is None:
            return await self._create(spec, CreateKey(key, "", request))
        _require_same(key, found.request, request)
        return self._core.box(found.sandbox_id).row.info()

    async def _create(self, spec: SandboxSpec, key: CreateKey | None) -> SandboxInfo:
        self._core.admit(running=1, total=1)
        plan = await make_plan(self._core, spec)
        box = new_box(self._core, plan)
        named = None if key is None else replace(key, sandbox_id=box.id)
        task = box.begin("create", create(self._core, box, named))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await settled(asyncio.ensure_future(asyncio.wait([task])))
            raise
        if task.cancelled():
            raise SandboxNotFoundError(f"sandbox {box.id} was destroyed while it was being created")
        task.result()
        return box.row.info()

    async def fork(self, box: Box, count: int) -> list[SandboxInfo | Exception]:
        if not 1 <= count <= self._core.config.max_total:
            raise ConfigError(f"a fork makes 1 to {self._core.config.max_total} copies, not {count}")
        self._core.admit(running=count, total=count)
        return await self._unless_deserted(self._fork(box, count))

    async def _fork(self, box: Box, count: int) -> list[SandboxInfo | Exception]:
        core = self._core
        with core.holding(core.new_id("snap")) as snapshot_id:
            snapshot = await transition(box, "fork", lambda: capture(core, box, snapshot_id, None), joins=False)
            children = await start_children(core, box, snapshot, count)
        await collect_snapshots(core)
        return children

    # -- tasks --------------------------------------------------------------------------------------------------------
    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unless_deserted(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """The sandboxes that `work` makes; if the caller is cancelled, nobody knows of them, and they are destroyed."""
        task = self._start(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await settled(asyncio.ensure_future(self._undo(task)))
            raise
        return outcome(task)

    async def _undo(self, task: asyncio.Task[list[Any]]) -> None:
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None:
            return
        boxes = [self._core.boxes.get(info.id) for info in task.result() if isinstance(info, SandboxInfo)]
        kills = [begin_kill(self._core, box) for box in boxes if box is not None]
        if kills:
            await asyncio.wait(kills)


def _require_same(key: str, known: str, request: str) -> None:
    if known != request:
        raise SandboxStateError(f"the idempotency key {key!r} was used with another request: take a new key")
