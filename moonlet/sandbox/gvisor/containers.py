"""Processes of the host that belong to one machine, found by the container's id in their command line.

Container ids are `LABEL.SANDBOX.N`: N counts the lives of one machine, since each restore is a new container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process of the host for good: its number and when it began, in clock ticks since boot."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """The live process of this number; None if there is none (a zombie is none)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    async def wait_exit(self) -> None:
        """Return at once when the process has ended, whoever its parent is."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.is_alive():
                return
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ContainerProcess:
    """A process whose command line names a container of ours."""

    process: ProcessId
    container: str
    sandbox: str
    argv: tuple[str, ...]


def container_id(label: str, sandbox: str, life: int) -> str:
    return f"{label}.{sandbox}.{life}"


def find_processes(label: str, sandbox: str | None = None) -> list[ContainerProcess]:
    """All processes that name a container of this label, or of one sandbox of it."""
    name = re.escape(sandbox) if sandbox is not None else r"[^/=]+"
    pattern = re.compile(rf"(?:^|[/=])({re.escape(label)}\.({name})\.\d+)(?:$|/)")
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            argv = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if not any("runsc" in argument for argument in argv):
            continue
        match = next((m for m in map(pattern.search, argv) if m), None)
        process = ProcessId.of(int(entry)) if match else None
        if match and process:
            found.append(ContainerProcess(process, match[1], match[2], tuple(argv)))
    return found


async def kill_all(find: Callable[[], list[ContainerProcess]], *, timeout_s: float = 10.0) -> list[ContainerProcess]:
    """Kill what `find` finds until it finds nothing; returns all that was killed. Raises TimeoutError."""
    killed: dict[ProcessId, ContainerProcess] = {}
    async with asyncio.timeout(timeout_s):
        while found := await asyncio.to_thread(find):
            for one in found:
                one.process.kill()
                killed[one.process] = one
            await asyncio.gather(*(one.process.wait_exit() for one in found))
    return list(killed.values())


def held_bytes(pids: list[int]) -> int:
    """Memory that only these processes hold: their own, and the file in memory in which a Sentry keeps its guest's."""
    own, files = 0, {}
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            own += sum(int(kib) << 10 for kib in re.findall(r"^Pss_Anon: +(\d+) kB", rollup, re.MULTILINE))
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if "runsc-memory" in os.readlink(entry.path):
                    facts = os.stat(entry.path)
                    files[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return own + sum(files.values())
