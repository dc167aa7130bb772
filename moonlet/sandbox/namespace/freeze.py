"""Stopping a machine without a control group: SIGSTOP to every process of it until there is no new one.

A process that forks while it is being looked for is stopped in the next round. One that waits in the kernel until its
child of vfork() runs a program cannot stop while that child is stopped; it does nothing either, and it stops before it
would. Those that the guest itself had stopped are not told apart afterwards: `continue_tree` wakes them too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from moonlet.sandbox.processes import ProcessId, tree

_STOPPED, _WAITING = "TtZX", "D"
_PATIENCE_S = 0.1  # so long must a process have waited in the kernel to count as stopped
_TIMEOUT_S = 10.0


def stop_tree(root: ProcessId) -> None:
    """Stop `root` and all its descendants. Raises TimeoutError if a process goes on all the same."""
    deadline = time.monotonic() + _TIMEOUT_S
    stopped: set[int] = set()
    waiting_since: dict[int, float] = {}
    while root.is_alive():
        states, now = tree(root.pid), time.monotonic()
        waiting_since = {pid: waiting_since.get(pid, now) for pid, state in states.items() if state in _WAITING}
        still = [pid for pid, since in waiting_since.items() if now - since >= _PATIENCE_S]
        going = [pid for pid, state in states.items() if state not in _STOPPED and pid not in still]
        if not going and set(states) <= stopped:
            return
        # Those of earlier rounds too: one that was not stopped yet may have woken them.
        _signal({*going, *(set(states) - stopped)}, signal.SIGSTOP)
        stopped |= set(states)
        if now > deadline:
            raise TimeoutError(f"process {root.pid} and its children do not stop: one hangs in the kernel")


def continue_tree(root: ProcessId) -> None:
    """Let it go on; children first, so that no parent sees one of them stopped."""
    if root.is_alive():
        _signal(reversed(list(tree(root.pid))), signal.SIGCONT)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        process = ProcessId.of(pid)
        if process is not None:
            process.kill(number)
