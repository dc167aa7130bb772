"""The process in which a machine lives."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable

from moonlet.errors import SandboxDiedError, SandboxTimeoutError
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.processes import ProcessId

DIE_S = 20.0


class Monitor:
    """A virtual machine monitor. `child` is there if this process started it, and not one before it."""

    def __init__(self, process: ProcessId, child: subprocess.Popen[bytes] | None = None) -> None:
        self.process = process
        self._child = child

    @classmethod
    async def start(cls, spawn: Callable[[], subprocess.Popen[bytes]], complaint: Callable[[], str]) -> Monitor:
        """Start it in a thread; a caller that is cancelled meanwhile leaves nothing. Raises SandboxDiedError, OSError."""
        children: list[subprocess.Popen[bytes]] = []
        try:
            await in_thread(lambda: children.append(spawn()))
            process = ProcessId.of(children[0].pid)
            if process is None:
                raise SandboxDiedError(f"the virtual machine ended at once: {complaint()}")
            return cls(process, children[0])
        except BaseException:
            for child in children:
                child.kill()
                child.wait()
            raise

    async def kill(self) -> None:
        """Killed and not asked to quit: a disk that an image shares must not be written to any more. Idempotent."""
        self.process.kill(signal.SIGKILL)
        try:
            async with asyncio.timeout(DIE_S):
                await self.process.ended()
        except TimeoutError as error:
            raise SandboxTimeoutError(f"process {self.process.pid} does not die: is a disk of it stuck?") from error
        self._reap()

    async def ended(self) -> None:
        await self.process.ended()
        self._reap()

    def _reap(self) -> None:
        """A process that has ended stays in the list of processes until its parent has asked how."""
        if self._child is not None:
            self._child.poll()

    def memory_bytes(self) -> int:
        """Proportional: what several machines share counts once among them."""
        with contextlib.suppress(OSError), open(f"/proc/{self.process.pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
        return 0
