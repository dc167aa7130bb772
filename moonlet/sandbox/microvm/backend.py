"""Virtual machines: a kernel of its own for each sandbox, accelerated by KVM where a guest really boots with it.

A template boots once. All machines start from its saved RAM, which they share copy on write, and from its disk.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from moonlet.errors import BackendUnavailableError, SandboxDiedError, SandboxError, SnapshotError
from moonlet.sandbox.api import Caps, Limits
from moonlet.sandbox.backend import Backend, MachineSpec, Probe, Progress, Template
from moonlet.sandbox.generations import in_thread, storage_errors
from moonlet.sandbox.microvm.booting import QemuBooter
from moonlet.sandbox.microvm.image import add_top_layer, share
from moonlet.sandbox.microvm.machine import QemuMachine
from moonlet.sandbox.microvm.marks import sweep_marked
from moonlet.sandbox.microvm.memory import RAM_FILE
from moonlet.sandbox.microvm.probing import Found, find_parts
from moonlet.sandbox.microvm.qemu import MARK, Start
from moonlet.sandbox.microvm.saved import Life, Saved
from moonlet.sandbox.microvm.templates import MIN_RAM_MIB, Templates

NOTES = (
    f"a machine has at least {MIN_RAM_MIB} MiB of RAM and whole processors; a saved one goes on with those that it had",
    "the template 'host' is a copy of the host's essential programs and Python, not of all that is installed",
)


class MicrovmBackend(Backend):
    """`cache` holds the kernel and the booted templates; best on the file system of the state directory."""

    name = "microvm"
    strength = 40

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache()
        self._lock = asyncio.Lock()
        self._probe: Probe | None = None
        self._found: Found | None = None
        self._templates: Templates | None = None

    async def probe(self) -> Probe:
        async with self._lock:
            if self._probe is None:
                try:
                    self._found = await find_parts(self._cache)
                    self._templates = Templates(self._cache, QemuBooter(self._cache, self._found.parts))
                    self._probe = _accepted(self._found)
                except (SandboxError, OSError) as error:
                    self._probe = Probe(self.name, None, str(error))
            return self._probe

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        """Boots the template unless it has been: some seconds with KVM, ten with emulation, more on a busy machine."""
        _, templates = await self._usable()
        await templates.prepare(template, limits, progress)

    async def launch(self, spec: MachineSpec, folder: Path) -> QemuMachine:
        _, templates = await self._usable()
        try:
            async with templates.held(spec.template, spec.limits) as image:
                return await self._start(spec, folder, image)
        except SnapshotError as error:
            await templates.discard(spec.template, spec.limits)
            raise SandboxError(f"a booted template was damaged and is removed: try again ({error})") from error

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> QemuMachine:
        """RAM and processors are those of the saved machine, whatever the limits say."""
        return await self._start(spec, folder, image)

    async def attach(self, spec: MachineSpec, folder: Path) -> QemuMachine:
        machine = QemuMachine(spec, folder, await in_thread(Life.read, folder))
        await machine.attach()
        return machine

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        """Also ends machines that booted a template for a process that has died."""
        return await sweep_marked(MARK, label, keep)

    async def _start(self, spec: MachineSpec, folder: Path, image: Path) -> QemuMachine:
        found, _ = await self._usable()
        saved = await in_thread(Saved.read, image)
        saved.check(found.parts.qemu.identity)
        with storage_errors(f"the disk of sandbox {spec.id} cannot be made in {folder}"):
            saved = await in_thread(_take_files, image, folder, saved)
        start = Start(spec.label, spec.id, saved.hardware, f"disk-{saved.layer}")
        machine = await QemuMachine.start(found.parts.qemu, spec, folder, start, saved)
        try:
            await machine.load(image)
            await machine.thaw()
            return machine
        except SandboxDiedError as error:
            await machine.destroy()
            raise SnapshotError(
                f"the machine saved in {image} does not go on: {error}; {machine.last_words()}"
            ) from error
        except BaseException:
            await machine.destroy()
            raise

    async def _usable(self) -> tuple[Found, Templates]:
        probe = await self.probe()
        if self._found is None or self._templates is None:
            raise BackendUnavailableError(f"virtual machines do not work here: {probe.reason}")
        return self._found, self._templates


def default_cache() -> Path:
    """$XDG_CACHE_HOME/moonlet/microvm or ~/.cache/moonlet/microvm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonlet" / "microvm"


def _accepted(found: Found) -> Probe:
    qemu = found.parts.qemu
    notes = NOTES if qemu.accel == "kvm" else (f"emulated (TCG), 10 to 100 times slower: {found.why_no_kvm}", *NOTES)
    caps = Caps(
        processes_survive_pause=True,
        frees_memory=True,
        fork_processes=True,
        isolation="vm",
        network=True,
        notes=notes,
    )
    kernel = found.parts.kernel
    how = f"a guest boots with {qemu.accel.upper()}: Linux {kernel.version} ({kernel.digest}), agent {found.parts.agent_digest}"
    # Kernel and agent go on inside of a saved machine: newer ones here are no reason to refuse it.
    return Probe("microvm", caps, how, qemu.identity)


def _take_files(image: Path, folder: Path, saved: Saved) -> Saved:
    try:
        share(image / RAM_FILE, folder / RAM_FILE)
        layer = add_top_layer(folder, image, saved.layer, saved.template_layers)
    except FileNotFoundError as error:
        raise SnapshotError(f"{image} lacks {Path(error.filename).name}: restore another snapshot") from error
    return saved.with_layer(layer)
