"""QEMU's control socket: one JSON object per line, replies told apart by ids, events skipped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

from moonlet.errors import SandboxDiedError, SandboxError, SandboxTimeoutError

MAX_LINE_BYTES = 1 << 20
CONNECT_S, COMMAND_S = 10.0, 30.0


class QmpError(SandboxError):
    """QEMU refused a command."""


class Qmp:
    """A connection. QEMU serves one at a time: whoever connects second waits until the first has gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float = CONNECT_S) -> Qmp:
        """Connect and agree on capabilities. Raises SandboxDiedError, SandboxTimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                self = cls(*await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES))
                await self.greet()
                return self
        except TimeoutError as error:
            raise SandboxTimeoutError(f"QEMU did not answer on {path} within {timeout_s:g} s") from error
        except OSError as error:
            raise SandboxDiedError(f"QEMU does not listen on {path}: {error.strerror or error}") from error

    async def greet(self) -> None:
        """Agree on capabilities; before it no command is taken."""
        try:
            if "QMP" not in _parsed(await self._reader.readline()):
                raise SandboxDiedError("QEMU ended before it could be controlled")
            self._pump = asyncio.create_task(self._read_replies(), name="qmp")
            await self.command("qmp_capabilities")
        except BaseException:
            await self.close()
            raise

    async def command(
        self, name: str, *, timeout_s: float = COMMAND_S, descriptor: int | None = None, **arguments: Any
    ) -> Any:
        """What QEMU returns; `descriptor` is handed over along with the command.

        Raises QmpError, SandboxDiedError if QEMU is gone, SandboxTimeoutError.
        """
        if self._pump is None or self._pump.done():
            raise SandboxDiedError(f"QEMU is gone: '{name}' cannot be asked of it")
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(json.dumps({"execute": name, "arguments": arguments, "id": number}).encode() + b"\n", descriptor)
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError as error:
            raise SandboxTimeoutError(f"QEMU did not answer '{name}' within {timeout_s:g} s") from error
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise QmpError(f"QEMU refused '{name}': {answer['error'].get('desc', answer['error'])}")
        return answer.get("return")

    def _send(self, data: bytes, descriptor: int | None) -> None:
        """A descriptor travels beside the first byte of its command, so nothing may wait before it: commands are short."""
        if descriptor is not None:
            number = self._writer.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as same:
                data = data[socket.send_fds(same, [data], [descriptor]) :]
        self._writer.write(data)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read_replies(self) -> None:
        """Events are read too: unread ones would pile up in QEMU."""
        try:
            while line := await self._reader.readline():
                message = _parsed(line)
                waiting = self._waiting.get(message.get("id", 0))
                if waiting and not waiting.done():
                    waiting.set_result(message)
        except (OSError, ValueError):  # closed in the middle, or a line without end
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(SandboxDiedError("QEMU ended before it answered"))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
