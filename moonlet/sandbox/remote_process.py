"""A command in a sandbox of a service: its stream of events is read in the background, so that nothing is lost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

from moonlet.errors import SandboxError, SandboxNotFoundError, SandboxStateError, SandboxTimeoutError
from moonlet.sandbox.api import DEFAULT_OUTPUT_BYTES, TIMEOUT_EXIT_CODE, ExecResult, Output, Process
from moonlet.sandbox.remote_service import Access, CallError, RemoteService

STDIN_PIECE_BYTES = 256 << 10
_RECONNECTS = 40  # with the waits below about a minute and a half, enough for a service that restarts
_SIGNALS = {9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}


class _Collected:
    """What a stream of the command has written: the first `limit` bytes, and how many there were."""

    def __init__(self, limit: int) -> None:
        self.kept, self.total, self._limit = bytearray(), 0, limit

    def add(self, data: bytes) -> None:
        self.kept += data[: max(0, self._limit - len(self.kept))]
        self.total += len(data)


class RemoteProcess(Process):
    """Follows a command. `is_ours` says that the service is one of ours, which can continue a stream at an offset."""

    def __init__(
        self, service: RemoteService, access: Access, is_ours: bool, limit: int = DEFAULT_OUTPUT_BYTES
    ) -> None:
        self.command_id, self.pid, self._input = "", 0, "stdin"
        self._service, self._access, self._is_ours = service, access, is_ours
        self._parts = {"stdout": _Collected(limit), "stderr": _Collected(limit)}
        self._order: list[tuple[Literal["stdout", "stderr"], int, int]] = []  # which bytes came when
        self._end: dict[str, Any] | None = None
        self._timed_out = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self, method: str, message: dict[str, Any], timeout_s: float | None) -> RemoteProcess:
        """Start or connect; returns once the command runs. Raises what the service says against it."""
        self._input = "pty" if "pty" in message else "stdin"
        self._task = asyncio.ensure_future(self._pump(method, message, timeout_s))
        try:
            await self._started
        except BaseException:
            self.abandon()
            raise
        return self

    def abandon(self) -> None:
        """Stop reading; the command goes on."""
        if self._task is not None:
            self._task.cancel()

    # -- reading ------------------------------------------------------------------------------------------------------
    async def _pump(self, method: str, message: dict[str, Any], timeout_s: float | None) -> None:
        try:
            await self._follow(method, message, timeout_s)
        except CallError as error:
            self._error = error.as_file_error() if not self._started.done() else error.as_error()
        except Exception as error:
            self._error = error
        finally:
            if not self._started.done():
                self._started.set_exception(self._error or SandboxTimeoutError("the command was not started"))
            self._announce()

    async def _follow(self, method: str, message: dict[str, Any], timeout_s: float | None) -> None:
        """Read to the end; a stream that breaks off is taken up where it broke, after a resume if need be."""
        num_cuts = 0
        while True:
            try:
                await self._read(method, message, timeout_s)
                return
            except (SandboxTimeoutError, SandboxStateError, CallError) as error:
                is_paused = isinstance(error, SandboxStateError)
                num_cuts += not is_paused
                if not self._can_reconnect(error) or num_cuts > _RECONNECTS:
                    raise
            await asyncio.sleep(1.0 if is_paused else min(0.1 * 2**num_cuts, 3.0))
            totals = {name: part.total for name, part in self._parts.items()}
            method, message, timeout_s = "Connect", self._selector | {"moonlet": totals}, None

    def _can_reconnect(self, error: Exception) -> bool:
        is_cut = not isinstance(error, CallError) or error.code == "unavailable"
        return is_cut and self._is_ours and self._started.done() and self._end is None

    async def _read(self, method: str, message: dict[str, Any], timeout_s: float | None) -> None:
        async with self._service.stream(self._access, f"process.Process/{method}", message, timeout_s) as messages:
            try:
                async for each in messages:
                    self._take(each.get("event") or {})
                    if self._end is not None:
                        return
            except CallError as error:
                if error.code != "deadline_exceeded" or not self._started.done():
                    raise
                self._timed_out = True
                return
        raise SandboxTimeoutError("the stream ended without the end of the command")

    def _take(self, event: dict[str, Any]) -> None:
        if start := event.get("start"):
            self.pid = int(start.get("pid", 0))
            self.command_id = str((start.get("moonlet") or {}).get("command_id") or self.pid)
            if not self._started.done():
                self._started.set_result(None)
        elif data := event.get("data"):
            for name, field in (("stdout", "stdout"), ("stderr", "stderr"), ("stdout", "pty")):
                if field in data:
                    self._add(name, base64.b64decode(data[field]))  # type: ignore[arg-type]
        elif "end" in event:
            self._end = event["end"] or {}
        else:
            return
        self._announce()

    def _add(self, name: Literal["stdout", "stderr"], data: bytes) -> None:
        part = self._parts[name]
        start = len(part.kept)
        part.add(data)
        if len(part.kept) > start:
            self._order.append((name, start, len(part.kept)))

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def _is_over(self) -> bool:
        return self._end is not None or self._timed_out or self._error is not None

    # -- the seam -----------------------------------------------------------------------------------------------------
    async def output(self) -> AsyncIterator[Output]:
        index = 0
        while True:
            while index < len(self._order):
                name, start, end = self._order[index]
                index += 1
                yield Output(name, bytes(self._parts[name].kept[start:end]))
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return
            await self._changed.wait()

    async def wait(self) -> ExecResult:
        while not self._is_over:
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        end = self._end or {}
        totals = end.get("moonlet") or {}
        stdout, stderr = self._parts["stdout"], self._parts["stderr"]
        is_timed_out = self._timed_out or bool(totals.get("timed_out"))
        return ExecResult(
            exit_code=TIMEOUT_EXIT_CODE if is_timed_out else exit_code_of(end),
            stdout=bytes(stdout.kept),
            stderr=bytes(stderr.kept),
            timed_out=is_timed_out,
            num_stdout_bytes=max(stdout.total, int(totals.get("stdout_total", 0))),
            num_stderr_bytes=max(stderr.total, int(totals.get("stderr_total", 0))),
        )

    async def write_stdin(self, data: bytes, *, close: bool = False) -> None:
        pieces = [data[at : at + STDIN_PIECE_BYTES] for at in range(0, len(data), STDIN_PIECE_BYTES)] or [b""]
        for piece in pieces[:-1]:
            await self._write_piece(piece, close=False)
        await self._write_piece(pieces[-1], close=close and self._is_ours)
        if close and not self._is_ours:
            with contextlib.suppress(SandboxNotFoundError):  # it has ended, and its input with it
                await self._call("CloseStdin", {})

    async def _write_piece(self, piece: bytes, *, close: bool) -> None:
        """Wait where the command does not read as fast as we write."""
        message = self._selector | {"input": {self._input: base64.b64encode(piece).decode()}}
        message |= {"moonlet": "close"} if close else {}
        wait_s = 0.01
        while True:
            try:
                await self._service.call(self._access, "process.Process/SendInput", message)
                return
            except CallError as error:
                if error.code != "resource_exhausted" or self._is_over:
                    raise error.as_file_error() from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)

    async def signal(self, number: int) -> None:
        name = _SIGNALS.get(number)
        if name is None and not self._is_ours:
            raise SandboxStateError(
                f"this service sends only signals 9 and 15, not {number}; use `kill -{number} {self.pid}`"
            )
        await self._call("SendSignal", {"signal": name if number == 15 else number} | {"moonlet": {"tree": False}})

    async def resize(self, rows: int, columns: int) -> None:
        await self._call("Update", {"pty": {"size": {"rows": rows, "cols": columns}}})

    async def kill(self) -> None:
        try:
            await self._call("SendSignal", {"signal": "SIGNAL_SIGKILL"})
        except SandboxNotFoundError:
            return  # it has ended

    @property
    def _selector(self) -> dict[str, Any]:
        return {"process": {"pid": self.pid} | ({"moonlet": self.command_id} if self._is_ours else {})}

    async def _call(self, name: str, fields: dict[str, Any]) -> None:
        try:
            await self._service.call(self._access, f"process.Process/{name}", self._selector | fields)
        except CallError as error:
            raise error.as_error() from error


def exit_code_of(end: dict[str, Any]) -> int:
    """The exit code as ours: E2B says -1 and "signal: killed" for a command that a signal ended."""
    code = int(end.get("exitCode", end.get("exit_code", 0)))
    if code >= 0:
        return code
    words = {"killed": 9, "terminated": 15, "interrupt": 2, "segmentation fault": 11, "aborted": 6, "hangup": 1}
    status = str(end.get("status", "")).removeprefix("signal: ").removesuffix(" (core dumped)")
    return 128 + words[status] if status in words else 255


__all__ = ["RemoteProcess", "SandboxError", "exit_code_of"]
