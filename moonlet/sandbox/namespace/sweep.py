"""Finding what machines have left that nobody knows any more, by the mark in their command lines and by control group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict

from moonlet.sandbox.namespace import cgroup
from moonlet.sandbox.namespace.bwrap import marked_machine
from moonlet.sandbox.processes import ProcessId, all_pids, command_line, until_gone


def sweep(label: str, keep: set[str]) -> list[str]:
    """Kill and remove all of `label` but the machines in `keep`. Says what was found."""
    found = []
    for machine_id, processes in _marked(label).items():
        if machine_id not in keep:
            for process in processes:
                process.kill(signal.SIGKILL)
            found.append(f"processes {sorted(process.pid for process in processes)} of sandbox {machine_id}")
    for machine_id, folders in cgroup.machine_groups(label).items():
        if machine_id not in keep:
            left = _empty(label, machine_id)
            for folder in folders:
                with contextlib.suppress(OSError):
                    cgroup.remove_group(folder)
            found.append(f"control groups of sandbox {machine_id}" + (f" with processes {left}" if left else ""))
    return found


def _marked(label: str) -> dict[str, list[ProcessId]]:
    """Agents and bubblewraps of this label, by machine."""
    found: dict[str, list[ProcessId]] = defaultdict(list)
    for pid in all_pids():
        words = command_line(pid)
        # Only what runs as a bubblewrap or as an agent: a command that merely names a machine is somebody else's.
        if not words or (os.path.basename(words[0]) != "bwrap" and marked_machine(words[0], label) is None):
            continue
        process = ProcessId.of(pid)
        for word in words:
            machine_id = marked_machine(word, label)
            if machine_id is not None and process is not None:
                found[machine_id].append(process)
                break
    return found


def _empty(label: str, machine_id: str) -> list[int]:
    """Kill all in the machine's control groups, thawed so that they can die."""
    folders = cgroup.machine_groups(label).get(machine_id, [])
    pids = sorted({pid for folder in folders for pid in cgroup.group_pids(folder)})
    for pid in pids:
        process = ProcessId.of(pid)
        if process is not None:
            process.kill(signal.SIGKILL)
    cgroup.Cgroup(label, machine_id).thaw()
    until_gone(pids, 5.0)
    return pids
