"""A guest agent as an ordinary process with a home of its own, for the tests of the agent and of what speaks with it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import FifoPair, GuestStream


class AgentProcess:
    """Speaks over two named pipes in `folder`, or over `stream`; `home` is its working directory.

    With `read_only` it has only its own ends of the pipes, so that it sees when the host closes its own. `wrap` is a command that starts it.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        binary: Path | None = None,
        read_only: bool = False,
        stream: socket.socket | None = None,
        wrap: Sequence[str] = (),
    ) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.endpoint = FifoPair(folder / "to_guest", folder / "from_guest")
        paths = (self.endpoint.to_guest, self.endpoint.from_guest)
        for path in paths:
            os.mkfifo(path)
        ends = [os.open(path, os.O_RDWR) for path in paths]
        if read_only:
            ends += [os.open(paths[0], os.O_RDONLY), os.open(paths[1], os.O_WRONLY)]
        try:
            self.process = subprocess.Popen(
                [*wrap, binary or guest_binary(), "--home", self.home, *options],
                stdin=stream or ends[-2],
                stdout=stream or ends[-1],
                start_new_session=True,
            )
        finally:
            for end in ends:
                os.close(end)

    async def open(self) -> Guest:
        return Guest(await GuestStream.open(self.endpoint, timeout_s=30))

    def end(self) -> int:
        """Its exit status, asked to stop if it still runs."""
        self.process.terminate()
        return self.process.wait(timeout=30)


@asynccontextmanager
async def running_guest(folder: Path, *options: str, binary: Path | None = None) -> AsyncIterator[Guest]:
    """An agent and the client of it; both are gone afterwards."""
    process = AgentProcess(folder, *options, binary=binary)
    try:
        guest = await process.open()
        try:
            yield guest
        finally:
            guest.stream.close()
    finally:
        assert process.end() == 0


def with_guest(folder: Path, work: Callable[[Guest], Awaitable[None]], *options: str) -> None:
    """Run `work` on a fresh agent."""

    async def run() -> None:
        async with running_guest(folder, *options) as guest:
            await work(guest)

    asyncio.run(run())


async def wait_until(is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.01)


def find_processes(mark: str) -> list[int]:
    """Live processes whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in command and state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
