"""Whether gVisor works here: a machine is started, used, written to disk and started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from moonlet.errors import SandboxError
from moonlet.sandbox.api import Caps, Limits
from moonlet.sandbox.backend import MachineSpec, Probe, Template
from moonlet.sandbox.gvisor import cgroup
from moonlet.sandbox.gvisor.bundle import Bundle, write_bundle
from moonlet.sandbox.gvisor.containers import find_processes, kill_all
from moonlet.sandbox.gvisor.machine import GvisorMachine, Life
from moonlet.sandbox.gvisor.preload import build_preload
from moonlet.sandbox.gvisor.runsc import INSTALL_HINT, Runsc, find_runsc

_LABEL = "moonlet-probe"
_LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
_NOTES = (
    "files of the guest live in its memory: disk_bytes counts only as far as memory_bytes allows",
    "a guest that uses more than memory_bytes ends as a whole",
)
_LINK_NOTE = "in this version of gVisor a symbolic link to exactly / leads astray (one to /. does not)"
_SLOW_NOTE = "this version compresses what it saves: a pause takes some seconds for 100 MiB of the guest's memory"
_NO_CGROUP_NOTE = "no control groups here: memory is checked twice a second, cpus is not enforced"


@dataclass(frozen=True)
class Found:
    """What the probe found out. Without caps in `probe` the rest means nothing."""

    probe: Probe
    runsc: Runsc
    needs_preload: bool = False


async def probe_gvisor(program: str) -> Found:
    nothing = Runsc(program, "", "")
    try:
        runsc = await asyncio.to_thread(find_runsc, program)
        await _sweep_old_probes()
        return await _try(runsc)
    except (SandboxError, OSError, TimeoutError) as error:
        return Found(Probe("gvisor", None, str(error)), nothing)


async def _try(runsc: Runsc) -> Found:
    """First with control groups where they may be there, then without."""
    try:
        return await _try_machine(runsc)
    except SandboxError as error:
        if not runsc.has_cgroups:
            is_old = runsc.is_user and runsc.platform == "ptrace"
            hint = f"; version {runsc.version} works for root only: {INSTALL_HINT}" if is_old else ""
            raise SandboxError(f"{error}{hint}") from error
    return await _try_machine(replace(runsc, has_cgroups=False))


async def _try_machine(runsc: Runsc) -> Found:
    folder = Path(tempfile.mkdtemp(prefix="moonlet-"))
    spec = MachineSpec(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", _LABEL, Template("host"), _LIMITS, "probe")
    machine = GvisorMachine(runsc, spec, folder / "live", Life())
    try:
        needs_preload, notes = await _use(machine, folder)
    finally:
        await machine.destroy()
        await asyncio.to_thread(shutil.rmtree, folder, True)
    caps = Caps(
        processes_survive_pause=True,
        frees_memory=True,
        fork_processes=True,
        isolation="user-kernel",
        network=True,
        notes=(*_NOTES, *notes, *_version_notes(runsc)),
    )
    return Found(Probe("gvisor", caps, "", f"{runsc.version} {runsc.platform}"), runsc, needs_preload)


def _version_notes(runsc: Runsc) -> list[str]:
    notes = [] if runsc.can_skip_compression else [_SLOW_NOTE]
    return notes if runsc.has_cgroups else [*notes, _NO_CGROUP_NOTE]


async def _use(machine: GvisorMachine, folder: Path) -> tuple[bool, tuple[str, ...]]:
    """Whether the guest needs its `statx` repaired, and what is to be said of that."""
    from moonlet.sandbox.guest.build import guest_binary
    from moonlet.sandbox.guest.client import Guest
    from moonlet.sandbox.guest.stream import GuestStream

    bundle = Bundle(folder / "live")
    bundle.folder.mkdir()
    agent = await asyncio.to_thread(guest_binary)
    await asyncio.to_thread(write_bundle, bundle, machine.spec, {"agent": agent})
    await machine.begin(None)
    stream = await GuestStream.open(machine.endpoint(), timeout_s=30)
    guest = Guest(stream)
    listed = await guest.exec(["ls", "-d", "/"], timeout_s=30)
    followed = await guest.exec("touch /tmp/seen; ln -s / root; rm root/tmp/seen", timeout_s=30)
    stream.close()
    image = folder / "image"
    image.mkdir()
    await machine.save(image, is_final=True)
    await machine.thaw()
    (await GuestStream.open(machine.endpoint(), timeout_s=30)).close()
    notes = () if followed.exit_code == 0 else (_LINK_NOTE,)
    if listed.exit_code == 0:
        return False, notes
    try:
        await asyncio.to_thread(build_preload)
    except SandboxError as error:
        return False, (*notes, f"ls and stat of coreutils fail in this version: {error}")
    return True, notes


async def _sweep_old_probes() -> None:
    """Machines of probes whose process was killed."""

    def orphans():
        return [one for one in find_processes(_LABEL) if not Path(f"/proc/{one.sandbox.split('-')[0]}").exists()]

    for one in await kill_all(orphans):
        await asyncio.to_thread(cgroup.remove_cgroups, _LABEL, one.container)
