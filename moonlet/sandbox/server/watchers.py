"""Watches of directories whose events a client fetches now and then."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from moonlet.errors import SandboxError
from moonlet.sandbox.api import FileEvent
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import Reply
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.server.connect import ConnectError

POLL_WAIT_S = 20.0
ANSWER_S = 30.0  # beyond what the call is asked to wait
EVENT_KINDS = ("create", "write", "remove", "rename", "chmod")


class GuestWatch:
    """A watch in the guest. It is the agent's, so it outlives a pause; only our call for its events is cut by one."""

    def __init__(self, sandbox: LocalSandbox, path: str, recursive: bool) -> None:
        self._sandbox, self._path, self._recursive = sandbox, path, recursive
        self._name = secrets.token_hex(8)

    async def open(self, guest: Guest) -> None:
        """Changes from now on are kept. Raises GuestFileError, ConnectError if it is no directory."""
        if (await guest.stat(self._path)).kind == "file":
            raise ConnectError("invalid_argument", f"{self._path} is not a directory")
        await guest.stream.call("watch", watch=self._name, path=self._path, recursive=self._recursive)

    async def events(self) -> AsyncGenerator[FileEvent]:
        try:
            while True:
                reply = await self._sandbox.long_call(self._changes)
                for item in reply.objects("events"):
                    if item.get("kind") in EVENT_KINDS:
                        yield FileEvent(str(item.get("path")), item["kind"])
                if reply.flag("overflow"):
                    raise ConnectError("resource_exhausted", f"more changed below {self._path} than could be kept")
        finally:
            with contextlib.suppress(SandboxError):
                await self._sandbox.long_call(self._close)

    async def _changes(self, guest: Guest) -> Reply:
        timeout_s = POLL_WAIT_S + ANSWER_S
        return await guest.stream.call("changes", watch=self._name, wait_s=POLL_WAIT_S, timeout_s=timeout_s)

    async def _close(self, guest: Guest) -> None:
        guest.stream.post("unwatch", watch=self._name)


@dataclass
class Watcher:
    """Collects events for a client that asks for them now and then; the oldest go when there are too many."""

    task: asyncio.Task[None]
    events: deque[FileEvent]
    error: list[Exception] = field(default_factory=list)


class Watchers:
    """The watchers of all sandboxes, by sandbox and id."""

    def __init__(self, per_sandbox: int, max_events: int) -> None:
        self._per_sandbox, self._max_events = per_sandbox, max_events
        self._watchers: dict[tuple[str, str], Watcher] = {}

    @property
    def num_open(self) -> int:
        return sum(not watcher.task.done() for watcher in self._watchers.values())

    def admit(self, sandbox_id: str) -> None:
        """Raises ConnectError if the sandbox has as many as it may."""
        self._sweep()
        if sum(owner == sandbox_id for owner, _ in self._watchers) >= self._per_sandbox:
            raise ConnectError("resource_exhausted", f"at most {self._per_sandbox} watchers per sandbox")

    def add(self, sandbox_id: str, source: AsyncIterator[FileEvent]) -> str:
        self.admit(sandbox_id)
        watcher_id = uuid.uuid4().hex
        events: deque[FileEvent] = deque(maxlen=self._max_events)
        errors: list[Exception] = []
        task = asyncio.ensure_future(_collect(source, events, errors))
        self._watchers[sandbox_id, watcher_id] = Watcher(task, events, errors)
        return watcher_id

    def take(self, sandbox_id: str, watcher_id: object) -> list[FileEvent]:
        """What happened since the last call; the error that ended the watch, once."""
        watcher = self._get(sandbox_id, watcher_id)
        events = list(watcher.events)
        watcher.events.clear()
        if not events and watcher.error:
            raise watcher.error[0]
        return events

    def remove(self, sandbox_id: str, watcher_id: object) -> None:
        self._get(sandbox_id, watcher_id).task.cancel()
        del self._watchers[sandbox_id, str(watcher_id)]

    async def close(self) -> None:
        tasks = [watcher.task for watcher in self._watchers.values()]
        self._watchers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _get(self, sandbox_id: str, watcher_id: object) -> Watcher:
        watcher = self._watchers.get((sandbox_id, str(watcher_id)))
        if watcher is None:
            raise ConnectError("not_found", "there is no such watcher")
        return watcher

    def _sweep(self) -> None:
        ended = [key for key, watcher in self._watchers.items() if watcher.task.done()]
        for key in ended:
            del self._watchers[key]


async def _collect(source: AsyncIterator[FileEvent], events: deque[FileEvent], errors: list[Exception]) -> None:
    try:
        async for event in source:
            events.append(event)
    except Exception as error:
        errors.append(error)
