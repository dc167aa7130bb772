"""What runs on each host: a manager behind calls that can travel. Knows nothing of Ray but that its process may be killed.

Every answer is ("ok", value) or ("error", description): errors with fields of their own do not survive the way that Ray
sends exceptions. Files and watches are streams with a token, read or written piece by piece; one that nobody touches for
a while is closed, since who opened it may be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import moonlet.errors
from moonlet.errors import MoonletError, SandboxError
from moonlet.sandbox.api import Sandbox, SandboxSpec, State
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.transcript import Poll
from moonlet.sandbox.local import LocalProcess, LocalSandbox
from moonlet.sandbox.manager import Manager
from moonlet.sandbox.settings import ServiceConfig

Answer = tuple[str, Any]

PIECE_BYTES = 4 << 20
_FORGOTTEN_S = 120.0
_ACTIVE = set(State) - {State.PAUSED, State.FAILED, State.KILLING}


@dataclass
class _Stream:
    """A watch or a download (`source`), or an upload (`pieces` are what `work` writes)."""

    source: AsyncIterator[Any] | None = None
    pieces: asyncio.Queue[bytes | None] | None = None
    work: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None


class SandboxHost:
    """One per host. The manager is opened at the first call, also in a process that Ray started in place of a dead one."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._manager: Manager | None = None
        self._opening = asyncio.Lock()
        self._streams: dict[str, _Stream] = {}

    async def open(self) -> Manager:
        async with self._opening:
            if self._manager is None:
                manager = Manager(self._config)
                await manager.__aenter__()
                self._manager = manager
        return self._manager

    # -- the host -----------------------------------------------------------------------------------------------------
    async def load(self) -> Answer:
        """Process, and machines: those that run and how many may, all sandboxes and how many may be."""

        async def work() -> dict[str, int]:
            manager = await self.open()
            counts = manager.counts()
            return {
                "pid": os.getpid(),
                "running": sum(counts[state] for state in _ACTIVE),
                "max_running": self._config.max_running,
                "total": len(manager.ids()),
                "max_total": self._config.max_total,
            }

        return await answered(work())

    async def create(self, spec: SandboxSpec) -> Answer:
        async def work() -> str:
            return (await (await self.open()).create(spec)).id

        return await answered(work())

    async def find(self, sandbox_id: str) -> Answer:
        """The sandbox's info, None if it is not of this host."""

        async def work() -> Any:
            manager = await self.open()
            return await manager.info(sandbox_id) if sandbox_id in manager.ids() else None

        return await answered(work())

    async def manage(self, method: str, arguments: tuple[Any, ...] = ()) -> Answer:
        """A method of the manager."""

        async def work() -> Any:
            return await getattr(await self.open(), method)(*arguments)

        return await answered(work())

    async def close(self, pause_running: bool) -> Answer:
        async def work() -> None:
            if self._manager is not None:
                await self._manager.close(pause_running=pause_running)
                self._manager = None

        return await answered(work())

    # -- a sandbox ----------------------------------------------------------------------------------------------------
    async def call(
        self, sandbox_id: str, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Answer:
        """A method of the sandbox whose result can travel; a command comes back as (id, pid), a fork as ids and errors."""

        async def work() -> Any:
            result = await getattr(await self._sandbox(sandbox_id), method)(*arguments, **options)
            if isinstance(result, LocalProcess):
                return result.command_id, result.pid
            if method == "fork":
                return [child.id if isinstance(child, Sandbox) else describe(child) for child in result]
            return result

        return await answered(work())

    async def call_process(
        self,
        sandbox_id: str,
        command: tuple[str, int],
        method: str,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> Answer:
        async def work() -> Any:
            process = LocalProcess(await self._sandbox(sandbox_id), *command)
            return await getattr(process, method)(*arguments, **options)

        return await answered(work())

    async def poll(self, sandbox_id: str, command_id: str, offsets: tuple[int, int]) -> Answer:
        async def look(guest: Guest) -> Poll:
            return await guest.poll(command_id, offsets)

        async def work() -> Poll:
            return await (await self._sandbox(sandbox_id)).long_call(look)

        return await answered(work())

    async def _sandbox(self, sandbox_id: str) -> LocalSandbox:
        manager = await self.open()
        await manager.info(sandbox_id)
        return LocalSandbox(manager, sandbox_id)

    # -- streams ------------------------------------------------------------------------------------------------------
    async def open_watch(self, sandbox_id: str, path: str, recursive: bool) -> Answer:
        async def work() -> str:
            events = (await self._sandbox(sandbox_id)).watch(path, recursive=recursive)
            return self._register(_Stream(source=_batched(events)))

        return await answered(work())

    async def open_download(self, sandbox_id: str, path: str) -> Answer:
        async def work() -> str:
            await (await self._sandbox(sandbox_id)).stat(path)
            return self._register(_Stream(source=self._download(sandbox_id, path)))

        return await answered(work())

    async def _download(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async with (await self.open()).guest(sandbox_id) as guest:
            pieces, size = [], 0
            async for piece in guest.stream_file(path):
                pieces.append(piece)
                size += len(piece)
                if size >= PIECE_BYTES:
                    yield b"".join(pieces)
                    pieces, size = [], 0
            if pieces:
                yield b"".join(pieces)

    async def next(self, token: str) -> Answer:
        """The next piece of a download, or the next events; None at the end."""

        async def work() -> Any:
            source = self._touch(token).source
            assert source is not None
            return await anext(source, None)

        return await answered(work())

    async def open_upload(self, sandbox_id: str, path: str, mode: int) -> Answer:
        async def work() -> str:
            manager, pieces = await self.open(), asyncio.Queue(maxsize=2)

            async def received() -> AsyncIterator[bytes]:
                while (piece := await pieces.get()) is not None:
                    yield piece

            async def write() -> None:
                async with manager.guest(sandbox_id) as guest:
                    await guest.upload(received(), path, mode=mode)

            return self._register(_Stream(pieces=pieces, work=asyncio.create_task(write())))

        return await answered(work())

    async def write(self, token: str, piece: bytes | None) -> Answer:
        """A piece of an upload; None ends it, and then the file has its name."""

        async def work() -> None:
            stream = self._touch(token)
            assert stream.pieces is not None and stream.work is not None
            put = asyncio.ensure_future(stream.pieces.put(piece))
            await asyncio.wait({put, stream.work}, return_when=asyncio.FIRST_COMPLETED)
            if piece is None or stream.work.done():
                put.cancel()
                await asyncio.shield(stream.work)

        return await answered(work())

    async def drop(self, token: str) -> None:
        """Close a stream; an unfinished upload leaves nothing."""
        stream = self._streams.pop(token, None)
        if stream is None:
            return
        if stream.expiry:
            stream.expiry.cancel()
        if stream.work:
            stream.work.cancel()
            await asyncio.wait([stream.work])
        if stream.source:
            with contextlib.suppress(RuntimeError):  # a piece is being read: that call ends the source
                await stream.source.aclose()  # type: ignore[attr-defined]

    def _register(self, stream: _Stream) -> str:
        token = secrets.token_hex(8)
        self._streams[token] = stream
        self._touch(token)
        return token

    def _touch(self, token: str) -> _Stream:
        stream = self._streams.get(token)
        if stream is None:
            raise SandboxError("this transfer was closed, since nobody went on with it: begin again")
        if stream.expiry:
            stream.expiry.cancel()
        loop = asyncio.get_running_loop()
        stream.expiry = loop.call_later(_FORGOTTEN_S, lambda: asyncio.ensure_future(self.drop(token)))
        return stream


async def _batched(events: AsyncIterator[Any]) -> AsyncIterator[list[Any]]:
    async for event in events:
        yield [event]


async def answered(work: Coroutine[Any, Any, Any]) -> Answer:
    try:
        return "ok", await work
    except MoonletError as error:
        return "error", describe(error)


def describe(error: Exception) -> tuple[str, str, dict[str, Any]]:
    """An error of ours as plain values: name, message, fields."""
    return type(error).__name__, str(error), dict(vars(error))


def rebuild(described: tuple[str, str, dict[str, Any]]) -> Exception:
    """The error that was described; SandboxError for a name that this version does not know."""
    name, message, fields = described
    kind = getattr(moonlet.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, MoonletError)):
        return SandboxError(f"{name}: {message}")
    error = kind.__new__(kind)
    error.args = (message,)
    vars(error).update(fields)
    return error
