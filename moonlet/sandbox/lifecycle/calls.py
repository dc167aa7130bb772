"""Calls to guests, and what it means when one is cut: a pause, a death, a destroy, or only a stream that broke."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from moonlet.errors import SandboxDiedError, SandboxNotFoundError, SandboxStateError, SandboxTimeoutError
from moonlet.sandbox.api import State
from moonlet.sandbox.lifecycle.box import ENDED, Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import ensure_alive

if TYPE_CHECKING:
    from moonlet.sandbox.guest.client import Guest

_VERDICT_S = 2.0  # by then it is known whether a machine that does not answer is dead
_WITH_GUEST = (State.RUNNING, State.PAUSING, State.SNAPSHOTTING, State.FORKING)


@asynccontextmanager
async def calling(core: Core, box: Box) -> AsyncIterator[Guest]:
    """See `Manager.guest`."""
    box.touch()
    async with box.lock.read():
        box.require(*_WITH_GUEST)
        guest = box.guest
        if guest is None:
            error = SandboxStateError(f"sandbox {box.id} is between two states; try again")
            raise await _explained(core, box, None, error)
        try:
            async with asyncio.timeout(None) as call:
                box.calls.add(call)
                yield guest
        except (SandboxDiedError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and not call.expired():
                raise
            raise await _explained(core, box, guest, error) from error
        finally:
            box.calls.discard(call)
            box.touch()


async def check_cut(core: Core, box: Box, guest: Guest) -> None:
    """See `Manager.check_cut`."""
    if box.guest is guest and not guest.stream.is_closed:
        raise SandboxTimeoutError(f"the agent of sandbox {box.id} does not answer; look at its logs, or destroy it")
    await _verdict(box, guest)
    if box.guest is guest:
        await _heal(core, box, guest)
    await box.until(lambda: box.is_gone or box.doom is None or box.state == State.FAILED)
    if box.is_gone or box.state in ENDED:
        box.require()


async def _explained(core: Core, box: Box, guest: Guest | None, error: Exception) -> Exception:
    """What a closed stream means, for a reader: the machine died, or a pause could not wait any longer."""
    await _verdict(box, guest)
    if box.is_gone or box.state == State.KILLING:
        return SandboxNotFoundError(f"sandbox {box.id} is gone: it was destroyed meanwhile")
    if box.state == State.FAILED or box.doom is not None:
        return box.died()
    if box.state in (State.PAUSING, State.PAUSED):
        return SandboxStateError(f"sandbox {box.id} was paused in the middle of the call: resume it and call again")
    if box.guest is guest:
        core.spawn(_heal(core, box, guest), f"heal {box.id}")  # not here, where a reader holds the lock
    return SandboxStateError(f"the connection to sandbox {box.id} was cut: {error or 'call again'}")


async def _heal(core: Core, box: Box, guest: Guest | None) -> None:
    """The stream of a machine that lives ended: open it again, or the machine counts as dead."""
    async with box.lock.write():
        if box.guest is guest and box.machine is not None and not box.is_gone and box.task is None:
            with contextlib.suppress(SandboxDiedError):
                await ensure_alive(core, box)


async def _verdict(box: Box, guest: Guest | None) -> None:
    """Wait until it is known why the stream of `guest` ended, or for long enough."""

    def is_known() -> bool:
        is_other = box.guest is not None and box.guest is not guest
        goes_on = box.state in (State.RUNNING, State.SNAPSHOTTING, State.FORKING)
        return box.is_gone or box.doom is not None or is_other or not goes_on

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_VERDICT_S):
            await box.until(is_known)
