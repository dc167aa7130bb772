"""The start of a manager: what the last one left, however it ended, becomes one of the states that it promised."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from moonlet.errors import SandboxError
from moonlet.sandbox.api import FailReason, State
from moonlet.sandbox.generations import in_thread, remove_tree
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import (
    close_guest,
    fail,
    let_go,
    load_template,
    machine_spec,
    open_guest,
    unless_dead,
    watch,
)
from moonlet.sandbox.records import SandboxRow

_AT_ONCE = 8
# In these the live machine is what counts: it was not yet given up for what was being saved.
_LIVE = {State.RUNNING, State.PAUSING, State.SNAPSHOTTING, State.FORKING}

log = logging.getLogger(__name__)


def expects_machine(row: SandboxRow) -> bool:
    """Whether a machine of this row may be alive and is to be kept."""
    return row.state in _LIVE or (row.state in (State.PAUSED, State.RESUMING) and row.is_live)


async def recover(core: Core) -> None:
    """Load the records, end what no record needs, take up the machines that live."""
    rows = await core.write(core.records.sandboxes)
    for snapshot in await core.write(core.records.snapshots):
        core.snapshots[snapshot.id] = snapshot
    for row in rows:
        core.boxes[row.id] = Box(row, core.sandboxes_folder / row.id)
    await sweep_machines(core, {row.id for row in rows if expects_machine(row)} | core.records.unreadable)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def settle(box: Box) -> None:
        async with limit:
            await _settle(core, box)

    await asyncio.gather(*(settle(box) for box in list(core.boxes.values())))


async def sweep_machines(core: Core, keep: set[str]) -> list[str]:
    """Let every backend end what bears our label and is not of `keep`."""
    found = []
    for backend in core.backends.values():
        try:
            found += await backend.sweep(core.label, keep)
        except Exception as error:
            log.error("backend %s could not look for leftovers: %s", backend.name, error)
    for what in found:
        log.warning("leftover ended: %s", what)
    return found


async def _settle(core: Core, box: Box) -> None:
    try:
        await load_template(core, box)
    except Exception as error:
        log.error("sandbox %s: its template is not there: %s", box.id, error)
    try:
        if box.state in (State.CREATING, State.KILLING):
            from moonlet.sandbox.lifecycle.creating import forget

            await forget(core, box, with_key=box.state == State.CREATING)
        elif box.state in _LIVE:
            await _take_up(core, box)
        elif box.row.is_live:
            await _take_up_frozen(core, box)
        elif box.state in (State.PAUSED, State.RESUMING):
            await in_thread(remove_tree, box.live)
            if box.state != State.PAUSED:
                await core.save(box, state=State.PAUSED)
    except Exception as error:
        log.exception("sandbox %s could not be taken up: %s", box.id, error)


async def _take_up(core: Core, box: Box) -> None:
    """A machine that ran: it goes on, also where it was frozen in the middle of a pause."""
    try:
        await _attach(core, box)
        assert box.machine is not None
        await box.machine.thaw()
        # With time: many do this at once, and one that is taken for dead is lost.
        await unless_dead(box, open_guest(core, box, core.config.create_timeout_s))
    except Exception as error:
        await _lost(core, box, error)
        return
    if box.state != State.RUNNING:
        await core.save(box, state=State.RUNNING)
    watch(core, box)


async def _take_up_frozen(core: Core, box: Box) -> None:
    """A machine that is paused in RAM stays so; one that was being resumed is frozen again."""
    try:
        await _attach(core, box)
        assert box.machine is not None
        await box.machine.freeze()
    except Exception as error:
        await _lost(core, box, error)
        return
    if box.state != State.PAUSED:
        await core.save(box, state=State.PAUSED)
    watch(core, box)


async def _attach(core: Core, box: Box) -> None:
    backend = core.backends.get(box.row.backend)
    if backend is None:
        raise SandboxError(f"there is no backend {box.row.backend} any more")
    box.machine = await backend.attach(machine_spec(core, box), box.live)


async def _lost(core: Core, box: Box, error: Exception) -> None:
    """The machine is not there any more: back to the last pause, if there was one."""
    log.warning("sandbox %s: its machine did not outlive the service: %s", box.id, error)
    if box.row.generation == 0:
        await fail(core, box, FailReason.LOST)
        return
    with contextlib.suppress(Exception):
        close_guest(box)
    await let_go(box)
    await core.save(box, state=State.PAUSED, is_live=False, origin="")
