"""Destroy: in any state, any number of times. One that does not succeed stays listed, and is tried again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from moonlet.sandbox.api import State
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.copying import collect_snapshots
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.creating import forget
from moonlet.sandbox.lifecycle.machines import close_guest, stop_watching

_PATIENCE_S = 2.0  # a caller that does not notice that its call has ended is not waited for

log = logging.getLogger(__name__)


def begin_kill(core: Core, box: Box) -> asyncio.Task[Any]:
    """Cancel whatever goes on with the box and destroy it; joins a kill that goes on already."""
    if box.task is not None and box.kind == "kill":
        return box.task
    before = box.task
    if before is not None:
        before.cancel()
    return box.begin("kill", _kill(core, box, before))


async def _kill(core: Core, box: Box, before: asyncio.Task[Any] | None) -> None:
    if before is not None:
        await asyncio.wait([before])
    if box.is_gone:
        return
    await core.try_save(box, state=State.KILLING)  # a full disk must not keep what fills it from being removed
    await stop_watching(box)
    close_guest(box)  # ends the calls in flight
    async with box.lock.quiet(_PATIENCE_S):
        if box.machine is not None:
            await box.machine.destroy()
            box.machine = None
        await forget(core, box)
    await collect_snapshots(core)
