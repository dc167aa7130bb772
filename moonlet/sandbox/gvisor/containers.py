"""Processes of the host that belong to one machine, found by the container's id in their command line.

Container ids are `LABEL.SANDBOX.N`: N counts the lives of one machine, since each restore is a new container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonlet.sandbox.processes import ProcessId, all_pids, command_line


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
    for pid in all_pids():
        argv = command_line(pid)
        if not any("runsc" in argument for argument in argv):
            continue
        match = next((m for m in map(pattern.search, argv) if m), None)
        process = ProcessId.of(pid) if match else None
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
            await asyncio.gather(*(one.process.ended() for one in found))
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
