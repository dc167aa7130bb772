"""Stopping a machine without a control group: SIGSTOP to every process of it until there is no new one.

A process that forks while it is being looked for is stopped in the next round. Those that the guest itself had stopped
are not told apart afterwards: `continue_tree` wakes them too.
"""

from __future__ import annotations

import signal
import time

from moonlet.sandbox.namespace.processes import ProcessId, tree

_STOPPED = "TtZX"
_TIMEOUT_S = 10.0


def stop_tree(root: ProcessId) -> None:
    """Stop `root` and all its descendants. Raises TimeoutError if a process does not reach a stop."""
    deadline, stopped = time.monotonic() + _TIMEOUT_S, set()
    while root.is_alive():
        states = tree(root.pid)
        if set(states) <= stopped and all(state in _STOPPED for state in states.values()):
            return
        _signal(set(states) - stopped, signal.SIGSTOP)
        stopped |= set(states)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {root.pid} and its children do not stop: one hangs in the kernel")


def continue_tree(root: ProcessId) -> None:
    """Let it go on; children first, so that no parent sees one of them stopped."""
    if root.is_alive():
        _signal(reversed(list(tree(root.pid))), signal.SIGCONT)


def _signal(pids, number: int) -> None:
    for pid in pids:
        process = ProcessId.of(pid)
        if process is not None:
            process.kill(number)
