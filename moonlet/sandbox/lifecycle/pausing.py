"""Pause and resume. A pause is done when the row says so, and only then the live machine goes; a resume keeps what the
pause saved until the next pause has saved something newer. Whatever fails on the way, the sandbox is as before."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonlet.sandbox.api import State
from moonlet.sandbox.generations import (
    check_space,
    generation_folder,
    in_thread,
    remove_tree,
    whole_folder,
)
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.copying import collect_snapshots
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import (
    as_sandbox_error,
    close_guest,
    error_reason,
    fail,
    let_go,
    open_guest,
    refresh,
    run_on,
    start_machine,
    watch,
)
from moonlet.sandbox.records import SandboxRow

log = logging.getLogger(__name__)


# -- pause ------------------------------------------------------------------------------------------------------------
async def pause(core: Core, box: Box) -> None:
    """Raises StorageError for a full disk (the sandbox runs on) and SandboxDiedError if the machine died meanwhile."""
    if not box.is_gone and box.state == State.PAUSED:
        return
    box.require(State.RUNNING)
    await core.save(box, state=State.PAUSING)
    async with box.lock.write(patience_s=core.config.drain_s, cut=lambda: close_guest(box)):
        try:
            close_guest(box)
            await (_save_generation(core, box) if box.row.caps.frees_memory else _freeze(core, box))
        except Exception as error:
            await run_on(core, box, error)
            raise as_sandbox_error(error, f"sandbox {box.id} could not be paused") from error
        if box.row.caps.frees_memory:
            await _drop_live(core, box)


async def _freeze(core: Core, box: Box) -> None:
    assert box.machine is not None
    await box.machine.freeze()
    await core.save(box, state=State.PAUSED)


async def _save_generation(core: Core, box: Box) -> None:
    assert box.machine is not None
    usage = await in_thread(box.machine.usage)
    await in_thread(check_space, core.config.state_dir, usage.memory_bytes, core.config.reserve_bytes)
    number = box.row.generation + 1
    target = generation_folder(box.folder, number)
    async with whole_folder(target) as image:
        await box.machine.save(image, is_final=True)
    try:
        await core.save(box, state=State.PAUSED, generation=number, is_live=False, origin="")
    except Exception:  # not recorded; a cancelled one is
        await in_thread(remove_tree, target)
        raise


async def _drop_live(core: Core, box: Box) -> None:
    """What a finished pause leaves over; the reaper removes what cannot be removed now."""
    await let_go(box)
    try:
        await in_thread(_remove_older, box.folder, box.row.generation)
    except OSError as error:
        log.error("sandbox %s: an older generation could not be removed: %s", box.id, error)
    await collect_snapshots(core)


def _remove_older(folder: Path, generation: int) -> None:
    for path in folder.glob("gen-*"):
        if re.fullmatch(r"gen-\d+", path.name) and int(path.name[4:]) < generation:
            remove_tree(path)


# -- resume -----------------------------------------------------------------------------------------------------------
async def resume(core: Core, box: Box, ttl_s: float | None) -> None:
    """Raises SandboxStateError if another version saved the machine; after any error the sandbox is paused as before."""
    if not box.is_gone and box.state == State.RUNNING:
        await extend(core, box, ttl_s)
        return
    box.require(State.PAUSED)
    await core.save(box, state=State.RESUMING)
    async with box.lock.write():
        try:
            if box.machine is not None:
                await _thaw(core, box)
            else:
                what = f"sandbox {box.id}"
                await core.matching_backend(box.row.backend, box.row.version, what)
                await start_machine(core, box, box.image)
            await core.save(box, new_lease(ttl_s), state=State.RUNNING, is_live=True)
            watch(core, box)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # a cancelled one is being destroyed
                await _stay_paused(core, box, error)
            raise


async def _thaw(core: Core, box: Box) -> None:
    assert box.machine is not None
    await box.machine.thaw()
    await open_guest(core, box)
    await refresh(box)


async def _stay_paused(core: Core, box: Box, error: BaseException) -> None:
    log.warning("sandbox %s could not be resumed: %s", box.id, error)
    if box.row.is_live and box.machine is not None:  # was frozen in RAM
        try:
            close_guest(box)
            await box.machine.freeze()
        except Exception as second:
            await fail(core, box, error_reason(second))
            return
    else:
        await let_go(box)
    await core.try_save(box, state=State.PAUSED)


# -- time to live -----------------------------------------------------------------------------------------------------
async def extend(core: Core, box: Box, ttl_s: float | None) -> None:
    """At least `ttl_s` from now on; never shortens, `Manager.set_timeout` does."""
    if ttl_s is not None and box.row.expires_at is not None and time.time() + ttl_s > box.row.expires_at:
        await core.save(box, new_lease(ttl_s))


def new_lease(ttl_s: float | None) -> Callable[[SandboxRow], dict[str, Any]]:
    """Changes of a row for a life of at least `ttl_s` from now on, None: as long as it was given last."""

    def derive(row: SandboxRow) -> dict[str, Any]:
        spec = row.spec if ttl_s is None else replace(row.spec, ttl_s=ttl_s)
        expires_at = None if spec.ttl_s is None else max(time.time() + spec.ttl_s, row.expires_at or 0.0)
        return {"spec": spec, "expires_at": expires_at}

    return derive
