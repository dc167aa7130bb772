"""One sandbox in the memory of its manager: the row as it is on the disk, and the machine if there is one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonlet.errors import SandboxDiedError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import FailReason, State
from moonlet.sandbox.backend import Machine, Template, Usage
from moonlet.sandbox.generations import generation_folder
from moonlet.sandbox.readers_writer import ReadersWriter
from moonlet.sandbox.records import SandboxRow

if TYPE_CHECKING:
    from moonlet.sandbox.guest.client import Guest
    from moonlet.sandbox.network import NetworkProxy

ACTIVE = {
    State.CREATING,
    State.RUNNING,
    State.PAUSING,
    State.RESUMING,
    State.SNAPSHOTTING,
    State.FORKING,
}

ENDED = (State.FAILED, State.KILLING)

log = logging.getLogger(__name__)


class Box:
    """`row` changes only after the change is on the disk. At most one transition (`task`, of `kind`) runs at a time."""

    def __init__(self, row: SandboxRow, folder: Path) -> None:
        self.row = row
        self.folder = folder
        self.lock = ReadersWriter()
        self.saving = asyncio.Lock()  # held while the row changes, so that no change is made to a row of before
        self.template: Template | None = None
        self.machine: Machine | None = None
        self.guest: Guest | None = None
        self.proxy: NetworkProxy | None = None
        self.calls: set[asyncio.Timeout] = set()  # those that hold the lock as readers; each can be ended
        self.watcher: asyncio.Task[None] | None = None
        self.release_template: Callable[[], None] | None = None
        self.usage = Usage()  # as it was last looked at
        self.task: asyncio.Task[Any] | None = None
        self.kind = ""
        self.is_gone = False
        self.doom: FailReason | None = None  # the machine is known to be dead, the record does not say so yet
        self.used_at = time.monotonic()
        self.deadline: float | None = None  # by time.monotonic()
        self.retry_at = 0.0  # a timer whose action failed waits until then
        self._changed = asyncio.Event()
        self.set_expiry(row.expires_at)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def state(self) -> State:
        return self.row.state

    @property
    def live(self) -> Path:
        return self.folder / "live"

    @property
    def image(self) -> Path | None:
        """The machine that the last pause saved."""
        return generation_folder(self.folder, self.row.generation) if self.row.generation else None

    @property
    def is_active(self) -> bool:
        """Whether it counts as running; one that is about to resume does."""
        return not self.is_gone and (self.state in ACTIVE or self.kind == "resume")

    def set_expiry(self, expires_at: float | None) -> None:
        """`expires_at` is wall clock time; what is left of it is counted by a clock that nobody sets."""
        self.deadline = None if expires_at is None else time.monotonic() + expires_at - time.time()

    def touch(self) -> None:
        self.used_at = time.monotonic()

    # -- changes ------------------------------------------------------------------------------------------------------
    def let_template_go(self) -> None:
        """It may be evicted as far as this box is concerned; idempotent."""
        if self.release_template is not None:
            self.release_template()
            self.release_template = None

    def publish(self, row: SandboxRow) -> None:
        if row.expires_at != self.row.expires_at:
            self.set_expiry(row.expires_at)
        if row.state != self.row.state:
            log.info("sandbox %s: %s -> %s", row.id, self.row.state, row.state)
        self.row = row
        self.announce()

    def announce(self) -> None:
        """Wake all that wait in `until`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def begin(self, kind: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a transition as a task of its own, which goes on when whoever asked for it is cancelled."""
        task = asyncio.get_running_loop().create_task(work, name=f"{kind} {self.id}")
        self.task, self.kind = task, kind
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        if self.task is task:
            self.task, self.kind = None, ""
        if not task.cancelled() and task.exception() is not None:
            log.info("sandbox %s: %s failed: %s", self.id, task.get_name().split()[0], task.exception())
        self.announce()

    # -- questions ----------------------------------------------------------------------------------------------------
    def require(self, *states: State) -> None:
        """Raises the error that says why the sandbox is in none of `states`."""
        if self.is_gone or self.state == State.KILLING:
            raise SandboxNotFoundError(f"sandbox {self.id} is gone: it was destroyed")
        if self.state in states:
            return
        if self.state == State.FAILED:
            raise self.died()
        advice = {State.PAUSED: ": resume it first", State.CREATING: ": wait until it runs"}.get(self.state, "")
        raise SandboxStateError(f"sandbox {self.id} is {self.state}{advice}")

    def died(self) -> SandboxDiedError:
        reason = self.row.reason or self.doom or FailReason.CRASH
        return SandboxDiedError(
            f"the machine of sandbox {self.id} is gone ({reason}); `moonlet sandbox logs {self.id}` shows its last words. "
            "Destroy it and make a new one",
            reason,
        )
