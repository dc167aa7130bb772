"""Machines are found in the list of all processes by an argument that names them: KIND=moonlet/LABEL/ID."""

from __future__ import annotations

import asyncio
import os
import re

from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.microvm.monitor import DIE_S
from moonlet.sandbox.processes import ProcessId, all_pids, command_line

BOOT_LABEL = "template"  # of machines that boot a template; they belong to a process, not to a state directory


def mark(kind: str, label: str, machine_id: str) -> str:
    return f"{kind}=moonlet/{label}/{machine_id}"


def find_marked(kind: str, label: str | None = None) -> list[tuple[ProcessId, str]]:
    """Live machines of a label, or of any, each with its id."""
    pattern = re.compile(rf"{kind}=moonlet/{re.escape(label) if label is not None else '[^/]+'}/([^/]+)")
    found = []
    for pid in all_pids():
        match = next((match for match in map(pattern.fullmatch, command_line(pid)) if match), None)
        process = ProcessId.of(pid) if match else None
        if match and process:
            found.append((process, match[1]))
    return found


async def sweep_marked(kind: str, label: str, keep: set[str]) -> list[str]:
    """End machines of `label` that are not in `keep`.

    Also those that nobody will ever ask for: which boot a template for a process that has died, or live in a folder that
    was removed under them, whatever their label.
    """

    def strays() -> list[tuple[ProcessId, str]]:
        own = [one for one in find_marked(kind, label) if one[1] not in keep]
        orphans = [one for one in find_marked(kind, BOOT_LABEL) if _is_orphan(one[1])]
        homeless = [one for one in find_marked(kind) if _is_homeless(one[0].pid)]
        return list({one[0]: one for one in own + orphans + homeless}.values())

    found = await in_thread(strays)
    for process, _ in found:
        process.kill()
    async with asyncio.timeout(DIE_S):
        await asyncio.gather(*(process.ended() for process, _ in found))
    return [f"virtual machine {machine_id}, process {process.pid}" for process, machine_id in found]


def _is_homeless(pid: int) -> bool:
    """A folder that was only renamed is another one's business."""
    try:
        return os.readlink(f"/proc/{pid}/cwd").endswith(" (deleted)")
    except OSError:
        return False


def boot_spec(name: str, limits: Limits) -> MachineSpec:
    """A machine that belongs to this process."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    return MachineSpec(f"{me.pid}.{me.start}.{name}", BOOT_LABEL, Template("boot"), limits, "sandbox")


def _is_orphan(machine_id: str) -> bool:
    pid, start = machine_id.split(".")[:2]
    return not ProcessId(int(pid), int(start)).is_alive()
