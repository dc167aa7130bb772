"""Processes of the host, known by pid and start time so that a reused pid is never touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_STATE, _PARENT, _START = 0, 1, 19  # fields of /proc/PID/stat after the name


@dataclass(frozen=True)
class ProcessId:
    """A process that is told from a later one with the same pid by `start`, in clock ticks since boot."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """None if there is no such process (a zombie is none)."""
        fields = _stat(pid)
        return None if fields is None or fields[_STATE] in ("Z", "X") else ProcessId(pid, int(fields[_START]))

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """A pidfd of exactly this process, or None if it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except (ProcessLookupError, PermissionError):
            return None
        if self.is_alive():  # checked after opening: from now on the pid cannot change its meaning
            return handle
        os.close(handle)
        return None

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Signal it; False if it had ended."""
        handle = self.open()
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    async def ended(self) -> None:
        """Return as soon as it has ended."""
        handle = self.open()
        if handle is None:
            return
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.add_reader(handle, lambda: done.done() or done.set_result(None))
        try:
            await done
        finally:
            loop.remove_reader(handle)
            os.close(handle)


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> list[str]:
    """Arguments of a process; empty if it is gone or has none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    return []


def tree(root: int) -> dict[int, str]:
    """pid -> state letter of `root` and all its descendants, parents first."""
    children: dict[int, list[int]] = defaultdict(list)
    states: dict[int, str] = {}
    for pid in all_pids():
        fields = _stat(pid)
        if fields is not None:
            children[int(fields[_PARENT])].append(pid)
            states[pid] = fields[_STATE]
    found: dict[int, str] = {}
    pending = [root]
    while pending:
        pid = pending.pop()
        if pid in states and pid not in found:
            found[pid] = states[pid]
            pending += children[pid]
    return found


def children(pid: int) -> list[int] | None:
    """Children of a process now, None where the kernel does not list them (CONFIG_PROC_CHILDREN). A glance: of a process
    whose children come and go meanwhile some may be missed."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        return None if os.path.exists(f"/proc/{pid}") else []
    except ProcessLookupError:
        return []
    return found


def glance(root: int) -> list[int]:
    """`root` and its descendants, without looking at every process of the host; see `children`."""
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        below = children(pid)
        if below is None:
            return list(tree(root))
        pending += below
    return found


def proportional_bytes(pids: Iterable[int]) -> int:
    """Sum of the proportional set sizes; what may not be looked at counts as nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) << 10
                    break
    return total


def wait_ended(process: ProcessId, timeout_s: float) -> bool:
    """Block until it has ended; False if it has not by then. For threads."""
    import select

    handle = process.open()
    if handle is None:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Those of `pids` that still live after at most `timeout_s`. For threads."""
    deadline = time.monotonic() + timeout_s
    left = [process for pid in pids if (process := ProcessId.of(pid))]
    return [process.pid for process in left if not wait_ended(process, max(0.0, deadline - time.monotonic()))]
