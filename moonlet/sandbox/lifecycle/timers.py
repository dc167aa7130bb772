"""What happens to sandboxes by the clock: time to live, idle pause, disk quota. Never while a transition runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from moonlet.errors import MoonletError
from moonlet.sandbox.api import FailReason, State
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import close_guest, fail

_RETRY_S = 30.0
_QUOTA_EVERY_S = 5.0
_QUOTA_SHARE = 20.0  # of the time one part is spent on looking, where there are many machines
_LONGEST_SLEEP_S = 60.0

log = logging.getLogger(__name__)


class Timers:
    """`pause` and `destroy` are the manager's."""

    def __init__(
        self, core: Core, pause: Callable[[str], Awaitable[object]], destroy: Callable[[str], Awaitable[object]]
    ) -> None:
        self._core = core
        self._pause = pause
        self._destroy = destroy

    async def run(self) -> None:
        """Act on what is due, sleep until the next is."""
        while True:
            self._core.timers_changed.clear()
            soonest = _LONGEST_SLEEP_S
            for box in list(self._core.boxes.values()):
                left = self.due_at(box) - time.monotonic()
                if left > 0:
                    soonest = min(soonest, left)
                else:
                    box.retry_at = time.monotonic() + _RETRY_S
                    self._core.spawn(self._act(box), f"timer of {box.id}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest):
                    await self._core.timers_changed.wait()

    def due_at(self, box: Box) -> float:
        """When the sandbox has to be looked at, by time.monotonic()."""
        if box.state != State.RUNNING or box.is_gone:
            return float("inf")
        return max(min(self._end_of_life(box), _end_of_idleness(box)), box.retry_at)

    def _end_of_life(self, box: Box) -> float:
        return float("inf") if box.deadline is None else box.deadline + self._core.config.scoring_slack_s

    async def _act(self, box: Box) -> None:
        while box.task is not None:
            await asyncio.wait([box.task])
        if box.is_gone or box.state != State.RUNNING:
            box.retry_at = 0.0
            return
        try:
            if time.monotonic() >= self._end_of_life(box):
                await self._expire(box)
            elif time.monotonic() >= _end_of_idleness(box):
                await self._pause_idle(box)
            box.retry_at = 0.0
        except MoonletError as error:
            log.error("sandbox %s: its time is over, but: %s; next try in %g s", box.id, error, _RETRY_S)
        finally:
            self._core.timers_changed.set()

    async def _expire(self, box: Box) -> None:
        log.info("sandbox %s: its time to live is over", box.id)
        if box.row.spec.on_timeout == "kill":
            await self._destroy(box.id)
        else:
            await self._pause(box.id)

    async def _pause_idle(self, box: Box) -> None:
        """A command that runs is work, whether or not somebody waits for it."""
        guest = box.guest
        if guest is None or any(process.is_running for process in await guest.processes()):
            box.touch()
            return
        log.info("sandbox %s: idle", box.id)
        await self._pause(box.id)

    # -- disk ---------------------------------------------------------------------------------------------------------
    async def watch_disks(self) -> None:
        """End machines that use more disk than they may."""
        while True:
            start = time.monotonic()
            await self.check_disks()
            await asyncio.sleep(max(_QUOTA_EVERY_S, _QUOTA_SHARE * (time.monotonic() - start)))

    async def check_disks(self) -> None:
        for box in list(self._core.boxes.values()):
            machine = box.machine
            if machine is None or box.state != State.RUNNING:
                continue
            try:
                box.usage = await in_thread(machine.usage)
            except Exception as error:
                log.warning("sandbox %s: its usage cannot be read: %s", box.id, error)
                continue
            if box.usage.disk_bytes > box.row.spec.limits.disk_bytes:
                log.warning("sandbox %s uses more disk than it may: %d bytes", box.id, box.usage.disk_bytes)
                close_guest(box)
                async with box.lock.write():
                    if box.machine is machine:
                        await fail(self._core, box, FailReason.DISK_FULL)


def _end_of_idleness(box: Box) -> float:
    idle_s = box.row.spec.idle_pause_s
    if idle_s is None:
        return float("inf")
    return (time.monotonic() if box.lock.num_readers else box.used_at) + idle_s
