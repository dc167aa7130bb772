"""A sandbox of a manager in this process.

Short calls hold off a pause until they end. Long ones (the wait for a command, its output, changes of files) do not: a
pause cuts them, they wait for the resume and go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moonlet.errors import GuestFileError, SandboxDiedError, SandboxError, SandboxNotFoundError, SandboxTimeoutError
from moonlet.sandbox.api import ExecResult, FileEvent, FileInfo, Output, Process, ProcessInfo, Sandbox, SandboxInfo
from moonlet.sandbox.guest.client import POLL_WAIT_S, Guest, GuestProcess
from moonlet.sandbox.guest.files import guest_path
from moonlet.sandbox.guest.stream import MAX_BODY_BYTES, Request
from moonlet.sandbox.guest.transcript import Launch, Poll, Transcript

if TYPE_CHECKING:
    from moonlet.sandbox.manager import Manager

_ANSWER_S = 30.0  # beyond what a call is asked to wait
_FULL_S = 0.05  # until a piece of input is offered again
_Result = TypeVar("_Result")


class LocalSandbox(Sandbox):
    """`id` names a sandbox of `manager`; making this object checks nothing and costs nothing."""

    def __init__(self, manager: Manager, sandbox_id: str) -> None:
        self.id = sandbox_id
        self._manager = manager

    # -- commands -----------------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        launch = self._launch(command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin is not None)
        transcript = Transcript()
        async with self._manager.guest(self.id) as guest:  # the first look travels with the start
            started = guest.stream.request("start", **launch.request())
            first = guest.stream.request("poll", command=launch.command_id, wait_s=POLL_WAIT_S)
            try:
                pid = (await started.wait(_ANSWER_S)).number("pid")
            except BaseException:
                first.cancel()
                guest.stream.post("reap", command=launch.command_id, kill=True)
                raise
        process = LocalProcess(self, launch.command_id, pid)
        feeder = None if stdin is None else asyncio.ensure_future(process.feed(stdin))
        try:
            await process.follow(transcript, first)
            return transcript.result()
        finally:
            first.cancel()
            if feeder is not None:
                feeder.cancel()
            await self._forget(launch.command_id, is_over=transcript.is_complete)

    def _launch(self, command: str | Sequence[str], *, env: Mapping[str, str] | None, **options: object) -> Launch:
        info = self._manager.peek(self.id)
        merged = {**self._manager.env(self.id), **(env or {})}
        return Launch.of(command, env=merged, output_bytes=info.limits.output_bytes, **options)

    async def _forget(self, command_id: str, *, is_over: bool) -> None:
        """A command that nobody can ask for any more; one that still runs is killed, after the resume if need be."""
        with contextlib.suppress(SandboxError):
            guest = self._manager.guest_now(self.id)
            if guest is not None:
                guest.stream.post("reap", command=command_id, kill=not is_over)
            elif not is_over:
                self._manager.when_running(self.id, lambda later: later.reap(command_id, kill=True))

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        tag: str = "",
        pty: tuple[int, int] | None = None,
    ) -> LocalProcess:
        launch = self._launch(command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin, tag=tag, pty=pty)
        async with self._manager.guest(self.id) as guest:
            return LocalProcess(self, launch.command_id, (await guest.start(launch)).pid)

    async def processes(self) -> list[ProcessInfo]:
        async with self._manager.guest(self.id) as guest:
            return await guest.processes()

    async def process(self, name: str | int) -> LocalProcess:
        async with self._manager.guest(self.id) as guest:
            found = await guest.process(name)
        return LocalProcess(self, found.command_id, found.pid)

    async def long_call(self, call: Callable[[Guest], Awaitable[_Result]]) -> _Result:
        """The result of `call`, which is repeated after every pause that cuts it."""
        while True:
            guest = await self._manager.running(self.id)
            try:
                return await call(guest)
            except (SandboxDiedError, SandboxTimeoutError):
                await self._manager.check_cut(self.id, guest)

    # -- files --------------------------------------------------------------------------------------------------------
    async def read_file(self, path: str) -> bytes:
        async with self._manager.guest(self.id) as guest:
            return await guest.read_file(path)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.write_file(path, data, mode=mode)

    async def upload(self, source: Path, path: str) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.upload(source, path)

    async def download(self, path: str, target: Path) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.download(path, target)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        async with self._manager.guest(self.id) as guest:
            return await guest.list_files(path, depth=depth)

    async def stat(self, path: str) -> FileInfo:
        async with self._manager.guest(self.id) as guest:
            return await guest.stat(path)

    async def make_dir(self, path: str) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.make_dir(path)

    async def remove(self, path: str) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.remove(path)

    async def rename(self, path: str, to: str) -> None:
        async with self._manager.guest(self.id) as guest:
            await guest.rename(path, to)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        watch = secrets.token_hex(8)
        async with self._manager.guest(self.id) as guest:
            await guest.stream.call("watch", watch=watch, path=guest_path(path), recursive=recursive)
        try:
            while True:
                reply = await self.long_call(
                    lambda guest: guest.stream.call(
                        "changes", watch=watch, wait_s=POLL_WAIT_S, timeout_s=POLL_WAIT_S + _ANSWER_S
                    )
                )
                for item in reply.objects("events"):
                    kind = item.get("kind")
                    if kind in ("create", "write", "remove", "rename", "chmod"):
                        yield FileEvent(str(item.get("path")), kind)
                if reply.flag("overflow"):
                    raise SandboxError(f"more changed below {path} than could be kept; list it and watch again")
        finally:
            with contextlib.suppress(SandboxError):
                if (now := self._manager.guest_now(self.id)) is not None:
                    now.stream.post("unwatch", watch=watch)

    # -- the machine --------------------------------------------------------------------------------------------------
    async def info(self) -> SandboxInfo:
        return await self._manager.info(self.id)

    async def set_timeout(self, ttl_s: float | None) -> None:
        await self._manager.set_timeout(self.id, ttl_s)

    async def pause(self) -> None:
        await self._manager.pause(self.id)

    async def resume(self) -> None:
        await self._manager.resume(self.id)

    async def snapshot(self, name: str | None = None) -> str:
        return await self._manager.snapshot(self.id, name)

    async def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        children = await self._manager.fork(self.id, count)
        return [child if isinstance(child, Exception) else LocalSandbox(self._manager, child.id) for child in children]

    async def destroy(self) -> None:
        with contextlib.suppress(SandboxNotFoundError):
            await self._manager.destroy(self.id)


class LocalProcess(Process):
    """A command of a `LocalSandbox`. It keeps no output: every reader starts at the first byte."""

    def __init__(self, sandbox: LocalSandbox, command_id: str, pid: int) -> None:
        self._sandbox = sandbox
        self.command_id = command_id
        self.pid = pid

    async def output(self) -> AsyncIterator[Output]:
        transcript = Transcript()
        while not transcript.is_complete:
            for piece in transcript.add(await self._poll(transcript.offsets)):
                yield piece

    async def wait(self) -> ExecResult:
        transcript = Transcript()
        await self.follow(transcript)
        return transcript.result()

    async def follow(self, transcript: Transcript, first: Request | None = None) -> None:
        """Poll until the transcript is complete; `first` is a poll that is under way already."""
        while not transcript.is_complete:
            transcript.add(await self._poll(transcript.offsets, first))
            first = None

    async def _poll(self, offsets: tuple[int, int], under_way: Request | None = None) -> Poll:
        async def look(guest: Guest) -> Poll:
            nonlocal under_way
            if under_way is not None and under_way.stream is guest.stream:
                request, under_way = under_way, None
                return Poll.of(await request.wait(POLL_WAIT_S + _ANSWER_S))
            return await guest.poll(self.command_id, offsets)

        return await self._sandbox.long_call(look)

    async def write_stdin(self, data: bytes, *, close: bool = False) -> None:
        """Returns when the command has read nearly all of it, also across pauses.

        Raises GuestFileError (EPIPE) if it reads no more.
        """
        pieces = [data[at : at + MAX_BODY_BYTES] for at in range(0, len(data), MAX_BODY_BYTES)] or [b""]
        for at, piece in enumerate(pieces):
            while not await self._write_piece(piece, close=close and at == len(pieces) - 1):
                await asyncio.sleep(_FULL_S)

    async def _write_piece(self, piece: bytes, *, close: bool) -> bool:
        """False if the agent holds too much that the command has not read yet."""
        manager, name = self._sandbox._manager, self._sandbox.id
        async with manager.guest_when_running(name) as guest:
            written = guest.stream.request("stdin", body=piece, command=self.command_id, close=close)
            with contextlib.suppress(SandboxNotFoundError):  # `written` says it better
                # Answered in order: now the piece is the agent's, whatever cuts the wait for it to be read.
                await guest.stream.call("poll", command=self.command_id, wait_s=0)
        try:
            await written.wait(None)
        except GuestFileError as error:
            if error.code == "EAGAIN":
                return False
            raise
        except (SandboxDiedError, SandboxTimeoutError):
            await manager.check_cut(name, guest)
        return True

    async def feed(self, data: bytes) -> None:
        """Standard input of an `exec`; a command that does not read all of it is no error, as in a pipeline."""
        with contextlib.suppress(SandboxError):
            await self.write_stdin(data, close=True)

    async def signal(self, number: int) -> None:
        async with self._sandbox._manager.guest(self._sandbox.id) as guest:
            await GuestProcess(guest, self.command_id, self.pid).signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        async with self._sandbox._manager.guest(self._sandbox.id) as guest:
            await GuestProcess(guest, self.command_id, self.pid).resize(rows, columns)

    async def kill(self) -> None:
        async with self._sandbox._manager.guest(self._sandbox.id) as guest:
            await GuestProcess(guest, self.command_id, self.pid).kill()
