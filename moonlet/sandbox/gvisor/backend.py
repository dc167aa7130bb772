"""gVisor as a backend: running processes survive a pause without hardware virtualisation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path

from moonlet.errors import BackendUnavailableError, SandboxStateError
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import Backend, MachineSpec, Probe, Progress, Template
from moonlet.sandbox.gvisor import cgroup
from moonlet.sandbox.gvisor.bundle import Bundle, write_bundle
from moonlet.sandbox.gvisor.containers import find_processes, kill_all
from moonlet.sandbox.gvisor.machine import CHECKPOINT, GUEST, META, GvisorMachine, Life
from moonlet.sandbox.gvisor.preload import build_preload
from moonlet.sandbox.gvisor.probing import Found, probe_gvisor

log = logging.getLogger(__name__)


class GvisorBackend(Backend):
    """`program` is the name or the path of runsc."""

    name = "gvisor"
    strength = 30

    def __init__(self, program: str = "runsc") -> None:
        self._program = program
        self._found: Found | None = None
        self._lock = asyncio.Lock()

    async def probe(self) -> Probe:
        return (await self._find()).probe

    async def _find(self) -> Found:
        async with self._lock:
            if self._found is None:
                self._found = await probe_gvisor(self._program)
            return self._found

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        """Nothing is made of a template: its root is the lower layer of every machine as it is."""

    async def launch(self, spec: MachineSpec, folder: Path) -> GvisorMachine:
        from moonlet.sandbox.guest.build import guest_binary

        found = await self._usable()
        files = {"agent": await asyncio.to_thread(guest_binary)}
        if found.needs_preload:
            files |= await asyncio.to_thread(build_preload)
        machine = GvisorMachine(found.runsc, spec, folder, Life(preload=found.needs_preload))
        await asyncio.to_thread(write_bundle, Bundle(folder), spec, files)
        await machine.begin(None)
        return machine

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> GvisorMachine:
        found = await self._usable()
        facts = _read_facts(image)
        mine = (found.runsc.version, found.runsc.platform)
        if (facts["version"], facts["platform"]) != mine:
            raise SandboxStateError(
                f"the image was saved by gVisor {facts['version']} ({facts['platform']}), this machine has {mine[0]} "
                f"({mine[1]}), which cannot read it: install that version again, or make a new sandbox"
            )
        files = {
            file.name: file for file in (image / GUEST).iterdir()
        }  # the agent that runs in the image, not a newer one
        machine = GvisorMachine(found.runsc, spec, folder, Life(preload=facts["preload"]))
        await asyncio.to_thread(write_bundle, Bundle(folder), spec, files, facts["root"])
        await machine.begin(image / CHECKPOINT)
        return machine

    async def attach(self, spec: MachineSpec, folder: Path) -> GvisorMachine:
        machine = GvisorMachine((await self._usable()).runsc, spec, folder, Life.read(folder))
        await machine.find_again()
        return machine

    async def _usable(self) -> Found:
        found = await self._find()
        if found.probe.caps is None:
            raise BackendUnavailableError(f"gVisor does not work here: {found.probe.reason}")
        return found

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        strays = lambda: [one for one in find_processes(label) if one.sandbox not in keep]  # noqa: E731
        counts = Counter(one.container for one in await kill_all(strays))
        told = [f"container {container} of gVisor with {count} processes" for container, count in counts.items()]
        return told + await asyncio.to_thread(_sweep_cgroups, label, keep)


def _sweep_cgroups(label: str, keep: set[str]) -> list[str]:
    strays = {folder.name for folder in cgroup.find_cgroups(label)}
    removed = []
    for container in strays:
        if container.removeprefix(f"{label}.").rsplit(".", 1)[0] not in keep:
            removed += cgroup.remove_cgroups(label, container)
    return [f"control group {path}" for path in removed]


def _read_facts(image: Path) -> dict:
    try:
        return json.loads((image / META).read_text())
    except (OSError, ValueError) as error:
        raise SandboxStateError(f"{image} is no image of gVisor: {error}") from error
