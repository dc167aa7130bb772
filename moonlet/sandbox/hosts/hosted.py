"""A sandbox of another host: every call goes to the actor there."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from moonlet.errors import GuestFileError, SandboxDiedError, SandboxNotFoundError, StorageError
from moonlet.sandbox.api import ExecResult, FileEvent, FileInfo, Output, Process, ProcessInfo, Sandbox, SandboxInfo
from moonlet.sandbox.guest.transcript import Transcript
from moonlet.sandbox.hosts.actor import PIECE_BYTES, rebuild


class Host:
    """The actor of one host, as its callers see it."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """The value of a method of `SandboxHost`, or its error. A cancellation reaches the host.

        Raises SandboxDiedError with the reason "lost" if the host or its actor is gone. What it was asked to do may have
        been done; its machines live on, and the same call works again once the actor is back.
        """
        reference = self.begin(method, *arguments)
        try:
            return await self.answer(reference)
        except asyncio.CancelledError:
            self.cancel(reference)
            raise

    def begin(self, method: str, *arguments: Any) -> Any:
        """A call whose `answer` is waited for later."""
        return getattr(self.actor, method).remote(*arguments)

    def cancel(self, reference: Any) -> None:
        import ray

        ray.cancel(reference)

    async def answer(self, reference: Any) -> Any:
        from ray.exceptions import RayError

        try:
            kind, value = await reference
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise SandboxDiedError(f"the host {self.name} is lost: {lines[0]}", "lost") from error
        if kind == "error":
            raise rebuild(value)
        return value


class HostedSandbox(Sandbox):
    """A sandbox of `host`; making this object checks nothing and costs nothing."""

    def __init__(self, host: Host, sandbox_id: str) -> None:
        self.id, self.host = sandbox_id, host

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await self.host.call("call", self.id, method, arguments, options)

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
        return await self._call("exec", command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin)

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
    ) -> HostedProcess:
        options = {"timeout_s": timeout_s, "env": env, "cwd": cwd, "stdin": stdin, "tag": tag, "pty": pty}
        return HostedProcess(self, *await self._call("start", command, **options))

    async def processes(self) -> list[ProcessInfo]:
        return await self._call("processes")

    async def process(self, name: str | int) -> HostedProcess:
        return HostedProcess(self, *await self._call("process", name))

    # -- files --------------------------------------------------------------------------------------------------------
    async def read_file(self, path: str) -> bytes:
        return await self._call("read_file", path)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await self._call("write_file", path, data, mode=mode)

    async def upload(self, source: Path, path: str) -> None:
        if not await asyncio.to_thread(source.is_file):
            raise GuestFileError(f"{source} is not a file that can be uploaded", "EINVAL")
        with await asyncio.to_thread(open, source, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            async with self._stream("open_upload", self.id, path, mode) as token:
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    await self.host.call("write", token, piece)
                await self.host.call("write", token, None)

    async def download(self, path: str, target: Path) -> None:
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with await asyncio.to_thread(open, unfinished, "xb") as file:
                async with self._stream("open_download", self.id, path) as token:
                    while (piece := await self.host.call("next", token)) is not None:
                        await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(os.replace, unfinished, target)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; free some space or choose another place") from error
        finally:
            unfinished.unlink(missing_ok=True)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        return await self._call("list_files", path, depth=depth)

    async def stat(self, path: str) -> FileInfo:
        return await self._call("stat", path)

    async def make_dir(self, path: str) -> None:
        await self._call("make_dir", path)

    async def remove(self, path: str) -> None:
        await self._call("remove", path)

    async def rename(self, path: str, to: str) -> None:
        await self._call("rename", path, to)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        async with self._stream("open_watch", self.id, path, recursive) as token:
            while (events := await self.host.call("next", token)) is not None:
                for event in events:
                    yield event

    @asynccontextmanager
    async def _stream(self, method: str, *arguments: Any) -> AsyncIterator[str]:
        token = await self.host.call(method, *arguments)
        try:
            yield token
        finally:
            self.host.actor.drop.remote(token)

    # -- the machine --------------------------------------------------------------------------------------------------
    async def info(self) -> SandboxInfo:
        return await self._call("info")

    async def set_timeout(self, ttl_s: float | None) -> None:
        await self._call("set_timeout", ttl_s)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def snapshot(self, name: str | None = None) -> str:
        return await self._call("snapshot", name)

    async def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        """On the same host."""
        children = await self._call("fork", count)
        return [HostedSandbox(self.host, child) if isinstance(child, str) else rebuild(child) for child in children]

    async def destroy(self) -> None:
        try:
            await self._call("destroy")
        except SandboxNotFoundError:
            return


class HostedProcess(Process):
    """A command of a `HostedSandbox`. It keeps no output: every reader starts at the first byte."""

    def __init__(self, sandbox: HostedSandbox, command_id: str, pid: int) -> None:
        self._sandbox, self.command_id, self.pid = sandbox, command_id, pid

    async def output(self) -> AsyncIterator[Output]:
        transcript = Transcript()
        while not transcript.is_complete:
            for piece in transcript.add(await self._poll(transcript.offsets)):
                yield piece

    async def wait(self) -> ExecResult:
        transcript = Transcript()
        while not transcript.is_complete:
            transcript.add(await self._poll(transcript.offsets))
        return transcript.result()

    async def _poll(self, offsets: tuple[int, int]) -> Any:
        return await self._sandbox.host.call("poll", self._sandbox.id, self.command_id, offsets)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        command = (self.command_id, self.pid)
        await self._sandbox.host.call("call_process", self._sandbox.id, command, method, arguments, options)

    async def write_stdin(self, data: bytes, *, close: bool = False) -> None:
        await self._call("write_stdin", data, close=close)

    async def signal(self, number: int) -> None:
        await self._call("signal", number)

    async def resize(self, rows: int, columns: int) -> None:
        await self._call("resize", rows, columns)

    async def kill(self) -> None:
        await self._call("kill")
