"""Virtual machines of Firecracker, behind the same seam as those of QEMU. Needs KVM and the program itself.

The project's tests hold it to the requests that it sends: where it is developed neither KVM nor Firecracker is to be had.
So `auto` prefers QEMU with KVM to it. Firecracker saves all of a machine's memory at every pause, and has no disk layers: a
disk is copied at a start, which is free only on file systems that share blocks.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from moonlet.errors import BackendUnavailableError, MoonletError, SandboxDiedError, SnapshotError
from moonlet.sandbox.api import Caps, Limits
from moonlet.sandbox.backend import Backend, MachineSpec, Probe, Progress, Template
from moonlet.sandbox.generations import in_thread, remove_tree, storage_errors
from moonlet.sandbox.microvm.backend import default_cache
from moonlet.sandbox.microvm.firecracker_api import DISK, load_request
from moonlet.sandbox.microvm.firecracker_machine import KIND, FirecrackerBooter, FirecrackerMachine
from moonlet.sandbox.microvm.image import copy_file, make_disk
from moonlet.sandbox.microvm.marks import sweep_marked
from moonlet.sandbox.microvm.memory import RAM_FILE
from moonlet.sandbox.microvm.probing import KVM_DEVICE
from moonlet.sandbox.microvm.qemu import processor_digest
from moonlet.sandbox.microvm.saved import STATE, Life, Saved
from moonlet.sandbox.microvm.templates import MIN_RAM_MIB, Templates

PROGRAM = "firecracker"
MIN_VERSION = (1, 8)  # earlier ones describe their devices in a way that Debian's kernel does not read
PROBE_S = 20.0
NOTES = (
    f"a machine has at least {MIN_RAM_MIB} MiB of RAM and whole processors; a saved one goes on with those that it had",
    "a pause writes all of a machine's memory",
)


class FirecrackerBackend(Backend):
    """`program` is the name or the path of Firecracker."""

    name = "firecracker"
    strength = 35

    def __init__(self, program: str = PROGRAM, cache: Path | None = None) -> None:
        self._program = program
        self._cache = (cache or default_cache()) / "firecracker"
        self._lock = asyncio.Lock()
        self._probe: Probe | None = None
        self._path, self._identity = "", ""
        self._templates: Templates | None = None

    async def probe(self) -> Probe:
        async with self._lock:
            if self._probe is None:
                try:
                    self._probe = await self._try()
                except (MoonletError, OSError, TimeoutError) as error:
                    self._templates = None
                    self._probe = Probe(self.name, None, " ".join(str(error).split()) or type(error).__name__)
            return self._probe

    async def _try(self) -> Probe:
        self._path, self._identity = await in_thread(_find, self._program)
        await in_thread(lambda: self._cache.mkdir(parents=True, exist_ok=True, mode=0o700))
        booter = await in_thread(FirecrackerBooter, self._cache, self._path, self._identity)
        folder = Path(await in_thread(lambda: tempfile.mkdtemp(prefix="probe-", dir=self._cache)))
        try:
            await in_thread(_make_empty_disk, folder)
            async with asyncio.timeout(PROBE_S):
                await booter.boot(Limits(memory_bytes=MIN_RAM_MIB << 20), folder, lambda what, share: None)
        finally:
            await in_thread(remove_tree, folder)
        self._templates = Templates(self._cache, booter)
        caps = Caps(
            processes_survive_pause=True,
            frees_memory=True,
            fork_processes=True,
            isolation="vm",
            network=True,
            notes=NOTES,
        )
        return Probe(self.name, caps, "a guest boots with KVM", self._identity)

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        await (await self._usable()).prepare(template, limits, progress)

    async def launch(self, spec: MachineSpec, folder: Path) -> FirecrackerMachine:
        async with (await self._usable()).held(spec.template, spec.limits) as image:
            return await self._start(spec, folder, image)

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> FirecrackerMachine:
        """RAM and processors are those of the saved machine, whatever the limits say."""
        await self._usable()
        return await self._start(spec, folder, image)

    async def attach(self, spec: MachineSpec, folder: Path) -> FirecrackerMachine:
        machine = FirecrackerMachine(spec, folder, await in_thread(Life.read, folder))
        await machine.connect()
        return machine

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        return await sweep_marked(KIND, label, keep)

    async def _start(self, spec: MachineSpec, folder: Path, image: Path) -> FirecrackerMachine:
        saved = await in_thread(Saved.read, image)
        saved.check(self._identity)
        with storage_errors(f"the disk of sandbox {spec.id} cannot be made in {folder}"):
            await in_thread(copy_file, image / DISK, folder / DISK)
        load = load_request(image / STATE, image / RAM_FILE)
        try:
            machine = await FirecrackerMachine.start(self._path, spec, folder, [load], saved)
        except SandboxDiedError as error:
            raise SnapshotError(f"the machine saved in {image} does not go on: {error}") from error
        try:
            await machine.thaw()
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def _usable(self) -> Templates:
        probe = await self.probe()
        if self._templates is None:
            raise BackendUnavailableError(f"Firecracker does not work here: {probe.reason}")
        return self._templates


def _find(program: str) -> tuple[str, str]:
    """Path, and what must be the same where a saved machine goes on. Raises BackendUnavailableError."""
    path = shutil.which(program)
    if path is None:
        raise BackendUnavailableError(f"no program '{program}': it is not in Debian; its project offers binaries")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    found = re.search(r"v(\d+)\.(\d+)\S*", done.stdout)
    if not found or (int(found[1]), int(found[2])) < MIN_VERSION:
        what = found[0] if found else done.stdout.strip()[:100] or "no version"
        raise BackendUnavailableError(f"{path} is {what}: version {MIN_VERSION[0]}.{MIN_VERSION[1]} or later is needed")
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        raise BackendUnavailableError(f"Firecracker needs KVM, and this user cannot open {KVM_DEVICE}")
    return path, f"Firecracker {found[0]} kvm {processor_digest()}"


def _make_empty_disk(folder: Path) -> None:
    (folder / "rootfs").mkdir()
    make_disk(folder / "rootfs", folder / "disk-0", 0)
