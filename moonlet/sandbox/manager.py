"""The manager of one state directory: everything that can be done with its sandboxes, by any number of callers at once.

    state_dir/  service.lock  sandboxes.sqlite3  sandboxes/ID/{live,gen-0001}  snapshots/ID/{snapshot.json,image}  templates/

Transitions are tasks of the manager: a caller that is cancelled or disconnects stops waiting, the transition goes on. Two
that ask for the same join; one that asks for another waits; destroy cancels what goes on.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonlet.errors import (
    SandboxError,
    SandboxStateError,
)
from moonlet.sandbox.api import SandboxInfo, SandboxSpec, State
from moonlet.sandbox.backend import Backend, Usage
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.lifecycle.box import ENDED, Box
from moonlet.sandbox.lifecycle.calls import calling, check_cut
from moonlet.sandbox.lifecycle.copying import capture, delete_snapshot, publish_snapshot
from moonlet.sandbox.lifecycle.core import Core, HostTemplate, Templates
from moonlet.sandbox.lifecycle.creating import check_ttl
from moonlet.sandbox.lifecycle.killing import begin_kill
from moonlet.sandbox.lifecycle.machines import close_guest, read_logs
from moonlet.sandbox.lifecycle.making import Maker
from moonlet.sandbox.lifecycle.pausing import extend, pause, resume
from moonlet.sandbox.lifecycle.recovery import recover
from moonlet.sandbox.lifecycle.timers import Timers
from moonlet.sandbox.lifecycle.transition import outcome, transition
from moonlet.sandbox.network import Denied
from moonlet.sandbox.reaper import reap, reap_for_ever
from moonlet.sandbox.records import Records, SnapshotInfo
from moonlet.sandbox.settings import ServiceConfig
from moonlet.sandbox.state_dir import locked_state_dir

if TYPE_CHECKING:
    from moonlet.sandbox.guest.client import Guest

__all__ = ["Manager", "ServiceConfig"]

_LISTED = set(State) - {State.CREATING, State.KILLING}

log = logging.getLogger(__name__)


class Manager:
    """`async with Manager(config) as manager:`, one per state directory at a time; all calls from one event loop.

    Leaving the block pauses what runs, so that nothing is lost. `backends` and `templates` are those of this machine if
    not given.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        backends: Mapping[str, Backend] | None = None,
        templates: Templates | None = None,
    ) -> None:
        self.config = config
        self._core = Core(
            config,
            _backends() if backends is None else backends,
            templates or template_store(config.state_dir / "templates", config.template_cache_bytes),
            _repository(config),
        )
        self._maker = Maker(self._core)
        self._stack = AsyncExitStack()
        self._is_open = False

    async def __aenter__(self) -> Manager:
        core = self._core
        async with AsyncExitStack() as stack:
            stack.enter_context(locked_state_dir(self.config.state_dir))
            core.records = Records(self.config.state_dir / "sandboxes.sqlite3")
            stack.callback(core.close_records)
            stack.push_async_callback(core.stop_tasks)
            await recover(core)
            await reap(core)
            self._stack = stack.pop_all()
        timers = Timers(core, self.pause, self.destroy)
        core.spawn(timers.run(), "timers")
        core.spawn(timers.watch_disks(), "disk watch")
        core.spawn(reap_for_ever(core), "reaper")
        self._is_open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, pause_running: bool = True) -> None:
        """Stop. What runs is paused, or goes on without us and is taken up by the next manager. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self._maker.close()
            await asyncio.gather(*(self._finish(box, pause_running) for box in [*self._core.boxes.values()]))
        finally:
            await self._stack.aclose()

    async def _finish(self, box: Box, pause_running: bool) -> None:
        while box.task is not None:
            await asyncio.wait([box.task])
        try:
            if pause_running and box.state == State.RUNNING:
                await transition(box, "pause", lambda: pause(self._core, box))
        except Exception as error:
            log.error("sandbox %s could not be paused, it runs on without the service: %s", box.id, error)
        close_guest(box)
        box.let_template_go()  # of this process; the records keep it for the next manager
        box.announce()

    # -- making -------------------------------------------------------------------------------------------------------
    async def create(self, spec: SandboxSpec | None = None, *, idempotency_key: str | None = None) -> SandboxInfo:
        """A sandbox that runs. The same key gives the same sandbox; without a key a caller that is cancelled leaves none.

        Raises TemplateError, BackendUnavailableError, SandboxLimitError, SandboxTimeoutError, ConfigError, StorageError;
        SandboxStateError if the key came with another spec, SandboxNotFoundError if its sandbox is destroyed by now.
        """
        self._require_open()
        return await self._maker.create(spec or SandboxSpec(), idempotency_key)

    async def fork(self, sandbox_id: str, count: int = 1) -> list[SandboxInfo | Exception]:
        """Copies of a running sandbox, each that started or its error. Raises if none can be made of it."""
        return await self._maker.fork(self._box(sandbox_id), count)

    # -- looking ------------------------------------------------------------------------------------------------------
    async def info(self, sandbox_id: str) -> SandboxInfo:
        return self.peek(sandbox_id)

    def peek(self, sandbox_id: str) -> SandboxInfo:
        """`info` without waiting."""
        return self._box(sandbox_id).row.info()

    def ids(self) -> builtins.list[str]:
        """All sandboxes, those that are only just being made or destroyed too."""
        return builtins.list(self._core.boxes)

    @property
    def templates(self) -> Any:
        """The template store."""
        return self._core.templates

    @property
    def num_reaped(self) -> int:
        """Leftovers that were found and removed so far, for metrics."""
        return self._core.num_reaped

    async def list(
        self, states: Collection[State] | None = None, metadata: Mapping[str, str] | None = None
    ) -> list[SandboxInfo]:
        """Oldest first; those that are only just being made or destroyed if their state is asked for, or stuck."""
        wanted = _LISTED if states is None else set(states)
        return [
            box.row.info()
            for box in sorted(self._core.boxes.values(), key=lambda box: (box.row.created_at, box.id))
            if (box.state in wanted or (states is None and box.state == State.KILLING and box.task is None))
            and all(box.row.spec.metadata.get(name) == value for name, value in (metadata or {}).items())
        ]

    def counts(self) -> dict[str, int]:
        """Sandboxes by state, and `snapshots`, for metrics."""
        counts = Counter({str(state): 0 for state in State})
        counts.update(str(box.state) for box in self._core.boxes.values())
        return {**counts, "snapshots": sum(not snapshot.is_hidden for snapshot in self._core.snapshots.values())}

    async def usage(self, sandbox_id: str) -> Usage:
        """What its machine uses now; nothing if there is none in memory."""
        box = self._box(sandbox_id)
        return Usage() if box.machine is None else await in_thread(box.machine.usage)

    async def logs(self, sandbox_id: str) -> bytes:
        """What the machine itself printed last (not the commands in it), also after its death."""
        return await in_thread(read_logs, self._box(sandbox_id))

    def env(self, sandbox_id: str) -> dict[str, str]:
        """Environment of every command: that of the template, the way to the proxy, then that of the spec."""
        box = self._box(sandbox_id)
        template = box.template.env if box.template else {}
        return {**template, **(box.proxy.env if box.proxy else {}), **box.row.spec.env}

    def on_denied(self, call: Callable[[str, Denied], None]) -> None:
        """`call` gets (sandbox, what was refused) whenever a sandbox asks for a host that it may not reach."""
        self._core.on_denied = call

    # -- transitions --------------------------------------------------------------------------------------------------
    async def pause(self, sandbox_id: str) -> SandboxInfo:
        """Idempotent. Raises StorageError if there is no room; the sandbox then runs on."""
        box = self._box(sandbox_id)
        await transition(box, "pause", lambda: pause(self._core, box))
        return box.row.info()

    async def resume(self, sandbox_id: str, *, ttl_s: float | None = None) -> SandboxInfo:
        """Idempotent. A new time to live never shortens the old one; None: as long as it was given last."""
        box = self._box(sandbox_id)
        if ttl_s is not None:
            check_ttl(self._core, ttl_s)
        box.touch()
        await transition(box, "resume", lambda: resume(self._core, box, ttl_s), before=lambda: self._admit_resume(box))
        if ttl_s is not None:
            await extend(self._core, box, ttl_s)
        return box.row.info()

    def _admit_resume(self, box: Box) -> None:
        if box.state == State.PAUSED:
            self._core.admit(running=1)

    async def snapshot(self, sandbox_id: str, name: str | None = None) -> str:
        """Keep a copy of the running machine; returns an id that `SandboxSpec.template` takes. Raises StorageError."""
        box = self._box(sandbox_id)
        box.touch()
        snapshot_id = self._core.new_id("snap")
        snapshot = await transition(
            box, "snapshot", lambda: capture(self._core, box, snapshot_id, name or ""), joins=False
        )
        await publish_snapshot(self._core, snapshot)
        return snapshot.id

    async def snapshots(self) -> builtins.list[SnapshotInfo]:
        """Those of this state directory, oldest first."""
        visible = (snapshot for snapshot in self._core.snapshots.values() if not snapshot.is_hidden)
        return sorted(visible, key=lambda snapshot: (snapshot.created_at, snapshot.id))

    async def delete_snapshot(self, name: str) -> None:
        """By id or name; sandboxes that were started from it live on. Raises SandboxNotFoundError."""
        await delete_snapshot(self._core, name)

    async def destroy(self, sandbox_id: str) -> None:
        """In any state, cancelling what goes on. Raises SandboxNotFoundError if there is none, which means success too."""
        box = self._box(sandbox_id)
        task = begin_kill(self._core, box)
        await asyncio.wait([task])
        outcome(task)

    async def set_timeout(self, sandbox_id: str, ttl_s: float | None) -> None:
        """The time to live from now on; None: until it is destroyed."""
        box = self._box(sandbox_id)
        check_ttl(self._core, ttl_s)
        box.touch()
        expires_at = None if ttl_s is None else time.time() + ttl_s
        await self._core.save(box, lambda row: {"spec": replace(row.spec, ttl_s=ttl_s)}, expires_at=expires_at)

    def touch(self, sandbox_id: str) -> None:
        """Somebody used it: the idle pause waits anew."""
        self._box(sandbox_id).touch()

    # -- the guest ----------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def guest(self, sandbox_id: str) -> AsyncIterator[Guest]:
        """The agent of a running sandbox, for calls that end soon: a pause waits for the end of the block, but not long.

        Raises SandboxStateError while it is paused, SandboxDiedError with the reason if the machine is gone.
        """
        async with calling(self._core, self._box(sandbox_id)) as guest:
            yield guest

    @asynccontextmanager
    async def guest_when_running(self, sandbox_id: str) -> AsyncIterator[Guest]:
        """As `guest`, but a sandbox that is paused is waited for."""
        while True:
            await self.running(sandbox_id)
            async with AsyncExitStack() as stack:
                try:
                    guest = await stack.enter_async_context(self.guest(sandbox_id))
                except SandboxStateError:  # paused again
                    continue
                yield guest
                return

    def guest_now(self, sandbox_id: str) -> Guest | None:
        """The agent if it can be spoken to at this moment."""
        return self._box(sandbox_id).guest

    def when_running(self, sandbox_id: str, call: Callable[[Guest], Coroutine[Any, Any, Any]]) -> None:
        """Do something in the background as soon as the sandbox runs; errors are of no interest."""

        async def later() -> None:
            with contextlib.suppress(SandboxError):
                await call(await self.running(sandbox_id))

        self._core.spawn(later(), f"later in {sandbox_id}")

    async def running(self, sandbox_id: str) -> Guest:
        """Wait until it runs, and return its agent for calls that take long: a pause cuts those, see `check_cut`."""
        box = self._box(sandbox_id)
        while True:
            await box.until(lambda: not self._is_open or box.is_gone or box.guest is not None or box.state in ENDED)
            self._require_open()
            if box.is_gone or box.state in ENDED:
                box.require()
            if box.guest is not None:
                box.touch()
                return box.guest

    async def check_cut(self, sandbox_id: str, guest: Guest) -> None:
        """After a call of `guest` failed: returns if a pause cut it, so that it may be repeated once `running` again.

        Raises SandboxDiedError or SandboxNotFoundError if the sandbox is gone, SandboxTimeoutError if it runs and is deaf.
        """
        await check_cut(self._core, self._box(sandbox_id), guest)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _box(self, sandbox_id: str) -> Box:
        self._require_open()
        return self._core.box(sandbox_id)

    def _require_open(self) -> None:
        if not self._is_open:
            raise SandboxStateError(
                "the manager of these sandboxes is closed: open it with `async with Manager(config)`"
            )


def _backends() -> Mapping[str, Backend]:
    from moonlet.sandbox.choose import all_backends

    return all_backends()


def template_store(folder: Path, cache_bytes: int) -> Templates:
    """The templates that are kept in `folder`."""
    try:
        from moonlet.sandbox.template.store import open_store
    except ModuleNotFoundError:
        return HostTemplate()
    return open_store(folder.parent, cache_bytes)


def _repository(config: ServiceConfig) -> Any:
    if config.snapshot_url is None:
        return None
    from moonlet.sandbox.snapshots import SnapshotRepository

    return SnapshotRepository(config.snapshot_url)
