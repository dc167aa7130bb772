"""What a command writes, from any byte on, through every pause of its sandbox."""

from __future__ import annotations

import base64
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moonlet.errors import SandboxError
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.transcript import Poll
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.server.connect import ConnectError


async def polls(sandbox: LocalSandbox, command_id: str, offsets: tuple[int, int]) -> AsyncGenerator[Poll]:
    """Looks at a command from `offsets` on until it has ended and all is read. A pause only makes the next one wait."""

    async def look(guest: Guest) -> Poll:
        return await guest.poll(command_id, offsets)

    while True:
        poll = await sandbox.long_call(look)
        offsets = (offsets[0] + len(poll.stdout), offsets[1] + len(poll.stderr))
        yield poll
        if not poll.is_running and all(at >= kept for at, kept in zip(offsets, poll.kept, strict=True)):
            return


async def events(looks: AsyncIterator[Poll], is_pty: bool) -> AsyncGenerator[dict[str, Any]]:
    """`data` events and then the `end`; a command that ran out of time ends with an error instead, as with E2B."""
    last: Poll | None = None
    async for last in looks:
        for name, data in (("pty" if is_pty else "stdout", last.stdout), ("stderr", last.stderr)):
            if data:
                yield {"data": {name: base64.b64encode(data).decode()}}
    if last is None or last.exit_code is None:
        raise ConnectError("internal", "the command ended without an exit code")
    totals = {"stdout_total": last.total[0], "stderr_total": last.total[1], "timed_out": last.timed_out}
    if last.timed_out:
        yield {"moonlet": totals}
        raise ConnectError("deadline_exceeded", "the command ran out of time and was killed with all its descendants")
    yield {"end": end_body(last.exit_code) | {"moonlet": totals}}


def end_body(code: int) -> dict[str, Any]:
    """The end of a command. Codes of 128 + a signal are also what a shell says of its child, so they stay numbers."""
    number = code - 128
    if number in signal.Signals.__members__.values():
        status = f"signal: {signal.strsignal(number)}".lower()
        return {"exitCode": code, "exited": False, "status": status, "error": status}
    status = f"exit status {code}"
    return {"exitCode": code, "exited": True, "status": status} | ({"error": status} if code else {})


class Followers:
    """Counts who reads each command, so that it is forgotten when the last one has seen its end."""

    def __init__(self) -> None:
        self._readers: Counter[tuple[str, str]] = Counter()
        self._seen: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def following(self, manager: Any, sandbox_id: str, command_id: str) -> AsyncIterator[None]:
        """A block in which the command is read; leaving it without an error means that its end was seen."""
        key = (sandbox_id, command_id)
        self._readers[key] += 1
        try:
            yield
            self._seen.add(key)
        except ConnectError as error:
            if error.code == "deadline_exceeded":
                self._seen.add(key)
            raise
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                if key in self._seen:
                    self._seen.discard(key)
                    await self._forget(manager, sandbox_id, command_id)

    async def _forget(self, manager: Any, sandbox_id: str, command_id: str) -> None:
        with contextlib.suppress(SandboxError):
            async with manager.guest(sandbox_id) as guest:
                await guest.reap(command_id)
