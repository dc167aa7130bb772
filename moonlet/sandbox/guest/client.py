"""What a guest agent can do, as Python: commands and the machine here, files in `files.py`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from moonlet.errors import GuestFileError, SandboxError, SandboxNotFoundError
from moonlet.sandbox.api import DEFAULT_OUTPUT_BYTES, ExecResult, FileEvent, Output, Process, ProcessInfo
from moonlet.sandbox.backend import Usage
from moonlet.sandbox.guest.files import GuestFiles, guest_path
from moonlet.sandbox.guest.stream import MAX_BODY_BYTES, GuestStream, Reply
from moonlet.sandbox.guest.transcript import Launch, Poll, Transcript, exit_code

POLL_WAIT_S = 20.0
_ANSWER_S = 30.0  # beyond what a call is asked to wait
_EVENT_KINDS = {"create", "write", "remove", "rename", "chmod"}


class Guest(GuestFiles):
    """A machine's agent. Long calls are polls that may be cut and repeated; nothing is lost in between."""

    def __init__(self, stream: GuestStream) -> None:
        self.stream = stream

    # -- commands -----------------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run to the end, as `Sandbox.exec`. If the caller is cancelled, the command is killed.

        Raises GuestFileError if the program or the directory cannot be found.
        """
        launch = Launch.of(
            command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin is not None or None, output_bytes=output_bytes
        )
        transcript, feeder = Transcript(output_bytes), None
        started = self.stream.request("start", **launch.request())
        first = self.stream.request("poll", command=launch.command_id, wait_s=POLL_WAIT_S)
        try:
            await started.wait(_ANSWER_S)
            if stdin is not None:
                feeder = asyncio.ensure_future(self._feed(launch.command_id, stdin))
            transcript.add(Poll.of(await first.wait(POLL_WAIT_S + _ANSWER_S)))
            while not transcript.is_complete:
                transcript.add(await self.poll(launch.command_id, transcript.offsets))
            return transcript.result()
        finally:
            first.cancel()
            if feeder is not None:
                feeder.cancel()
            self.stream.post("reap", command=launch.command_id, kill=not transcript.is_complete)

    async def _feed(self, command_id: str, data: bytes) -> None:
        process = GuestProcess(self, command_id, 0)
        try:
            await process.write_stdin(data, close=True)
        except SandboxError:
            return  # it ended or closed its input before it had read all: as in a pipeline

    async def start(self, command: str | Sequence[str] | Launch, **options: object) -> GuestProcess:
        """Start in the background; `options` are fields of `Launch`. Raises GuestFileError as `exec` does."""
        launch = command if isinstance(command, Launch) else Launch.of(command, **options)
        try:
            reply = await self.stream.request("start", **launch.request()).wait(_ANSWER_S)
        except GuestFileError as error:
            if error.code != "EEXIST":
                raise
            return await self.process(launch.command_id)  # an earlier try got through, only its answer was lost
        return GuestProcess(self, launch.command_id, reply.number("pid"))

    async def poll(self, command_id: str, offsets: tuple[int, int] = (0, 0), wait_s: float = POLL_WAIT_S) -> Poll:
        """Output from `offsets` (stdout, stderr) on; waits until there is some, the command has ended or `wait_s`."""
        reply = await self.stream.call(
            "poll",
            command=command_id,
            stdout=offsets[0],
            stderr=offsets[1],
            wait_s=wait_s,
            timeout_s=wait_s + _ANSWER_S,
        )
        return Poll.of(reply)

    async def reap(self, command_id: str, *, kill: bool = False) -> None:
        """Forget a command that has ended, or with `kill` one that runs: it and its descendants are killed."""
        await self.stream.call("reap", command=command_id, kill=kill)

    async def processes(self) -> list[ProcessInfo]:
        """The commands that the agent remembers, oldest first."""
        found: list[ProcessInfo] = []
        after = 0
        while True:
            reply = await self.stream.call("commands", after=after)
            for item in reply.objects("commands"):
                found.append(_process_info(item))
                after = max(after, Reply(item).number("serial"))
            if not reply.flag("more") or not reply.objects("commands"):
                return found

    async def process(self, name: str | int) -> GuestProcess:
        """The process with this command id, guest pid or tag (the newest). Raises SandboxNotFoundError."""
        for info in reversed(await self.processes()):
            if name in (info.command_id, info.pid) or (info.tag and name == info.tag):
                return GuestProcess(self, info.command_id, info.pid)
        raise SandboxNotFoundError(f"no command of this sandbox has the id, pid or tag {name!r}")

    # -- the machine --------------------------------------------------------------------------------------------------
    async def refresh(self, *, hostname: str, machine_id: str) -> None:
        """Make a machine that was started, resumed or cloned one of its own: clock, random numbers, names.

        Each is done as far as the backend lets the guest do it. An error means that it must not be used.
        """
        requests = (
            self.stream.request("settime", time=time.time()),
            self.stream.request("reseed", body=secrets.token_bytes(256)),
            self.stream.request("identity", hostname=hostname, machine_id=machine_id),
        )
        try:
            for request in requests:
                await request.wait(_ANSWER_S)
        finally:
            for request in requests:
                request.cancel()

    async def sync(self) -> None:
        """Have the guest write its files to disk."""
        await self.stream.call("sync", timeout_s=120.0)

    async def usage(self) -> Usage:
        """Processes and private memory as the guest sees them."""
        reply = await self.stream.call("usage")
        return Usage(memory_bytes=reply.number("memory_bytes"), processes=reply.number("processes"))

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """Changes from now on, until the iterator is closed. Raises SandboxError if so much happened that some were lost."""
        watch, last = secrets.token_hex(8), 0
        try:
            await self.stream.call("watch", watch=watch, path=guest_path(path), recursive=recursive)
            while True:
                reply = await self.stream.call(
                    "changes", watch=watch, after=last, wait_s=POLL_WAIT_S, timeout_s=POLL_WAIT_S + _ANSWER_S
                )
                for item in reply.objects("events"):
                    kind = item.get("kind")
                    if isinstance(kind, str) and kind in _EVENT_KINDS:
                        yield FileEvent(str(item.get("path")), kind)  # type: ignore[arg-type]
                last = reply.number("last")
                if reply.flag("overflow"):
                    raise SandboxError(f"more changed below {path} than could be kept; list it and watch again")
        finally:
            self.stream.post("unwatch", watch=watch)


def _process_info(item: dict[str, Any]) -> ProcessInfo:
    argv = item.get("argv")
    return ProcessInfo(
        command_id=str(item.get("command")),
        pid=Reply(item).number("pid"),
        argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
        is_running=item.get("running") is True,
        exit_code=exit_code(item),
        tag=str(item.get("tag") or ""),
    )


class GuestProcess(Process):
    """A command of a guest. It keeps no output: every reader starts at the first byte."""

    def __init__(self, guest: Guest, command_id: str, pid: int) -> None:
        self._guest = guest
        self.command_id = command_id
        self.pid = pid

    async def output(self) -> AsyncIterator[Output]:
        transcript = Transcript()
        while not transcript.is_complete:
            for piece in transcript.add(await self._guest.poll(self.command_id, transcript.offsets)):
                yield piece

    async def wait(self) -> ExecResult:
        transcript = Transcript()
        while not transcript.is_complete:
            transcript.add(await self._guest.poll(self.command_id, transcript.offsets))
        return transcript.result()

    async def write_stdin(self, data: bytes, *, close: bool = False) -> None:
        """Returns when the command has read nearly all of it. Raises GuestFileError (EPIPE) if it reads no more."""
        pieces = [data[at : at + MAX_BODY_BYTES] for at in range(0, len(data), MAX_BODY_BYTES)] or [b""]
        for at, piece in enumerate(pieces):
            is_last = at == len(pieces) - 1
            await self._guest.stream.call(
                "stdin", body=piece, command=self.command_id, close=close and is_last, timeout_s=None
            )

    async def signal(self, number: int) -> None:
        await self._guest.stream.call("signal", command=self.command_id, signal=int(number))

    async def resize(self, rows: int, columns: int) -> None:
        await self._guest.stream.call("resize", command=self.command_id, rows=rows, columns=columns)

    async def kill(self) -> None:
        """Returns when it and all its descendants are dead; also fine if it has ended."""
        await self._guest.stream.call("signal", command=self.command_id, tree=True)
