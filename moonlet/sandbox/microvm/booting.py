"""The first boot of a template under QEMU, from kernel and agent to a saved machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from moonlet.errors import SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import Progress
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import Endpoint, GuestStream
from moonlet.sandbox.microvm.image import make_layer
from moonlet.sandbox.microvm.initramfs import write_initramfs
from moonlet.sandbox.microvm.kernel import QEMU_MODULES, Kernel, load_order
from moonlet.sandbox.microvm.machine import QemuMachine
from moonlet.sandbox.microvm.marks import boot_spec
from moonlet.sandbox.microvm.memory import RAM_FILE
from moonlet.sandbox.microvm.qemu import Boot, Hardware, Qemu, Start, boot_args
from moonlet.sandbox.microvm.saved import FACTS, STATE, Saved
from moonlet.sandbox.microvm.templates import Booter, ram_mib
from moonlet.sandbox.processes import ProcessId

BOOT_S = 180.0  # emulated, on a machine that is busy with other things
_LAYER, _TEMPLATE_LAYERS = 2, 2
# What the first commands of a machine would otherwise read from its disk.
_WARM_UPS = ("true", "ls -l / | grep -c . ; cat /proc/version", "command -v python3 && python3 -c 'import json, os'")


@dataclass(frozen=True)
class Parts:
    """What all machines of a backend are made of."""

    qemu: Qemu
    kernel: Kernel
    agent: Path
    agent_digest: str

    def initramfs(self, cache: Path) -> Path:
        """Made if it is not there."""
        path = cache / f"initramfs-{self.kernel.digest}-{self.agent_digest}"
        if not path.exists():
            write_initramfs(path, self.agent.read_bytes(), load_order(self.kernel, QEMU_MODULES))
        return path


class QemuBooter(Booter):
    kept = frozenset({FACTS, STATE, RAM_FILE, "disk-0", "disk-1", "disk-2"})

    def __init__(self, cache: Path, parts: Parts) -> None:
        self._cache, self._parts = cache, parts

    def made_of(self, limits: Limits) -> list[object]:
        parts = self._parts
        boot = Boot(Path("kernel"), Path("initramfs"), agent_args(limits), limits.processes)
        made_of = [parts.qemu.identity, parts.kernel.digest, parts.agent_digest, asdict(hardware(limits))]
        return [*made_of, *boot_args(boot), *_WARM_UPS]

    async def boot(self, limits: Limits, folder: Path, progress: Progress) -> None:
        parts, shape = self._parts, hardware(limits)
        initramfs = await in_thread(parts.initramfs, self._cache)
        await in_thread(make_layer, folder, 1)
        make_ram(folder, shape)
        boot = Boot(parts.kernel.image, initramfs, agent_args(limits), limits.processes)
        spec = boot_spec(folder.name, limits)
        start = Start(spec.label, spec.id, shape, "disk-1", boot=boot, is_ram_shared=True)
        saved = Saved(parts.qemu.identity, parts.kernel.digest, parts.agent_digest, shape, _LAYER, _TEMPLATE_LAYERS)
        machine = await QemuMachine.start(parts.qemu, spec, folder, start, saved)
        try:
            stream = await wait_for_agent(machine, BOOT_S)
            progress("warm up", 0.7)
            await warm_up(Guest(stream))
            await machine.freeze()
            await machine.save_state(folder)
            await machine.destroy()
            stream.close()  # not before: the agent, saved with a host at the other end, answers the next one at once
        except SandboxDiedError as error:
            raise SandboxDiedError(f"the template's first machine died: {error}; {machine.last_words()}") from error
        finally:
            await machine.destroy()
        await in_thread(make_layer, folder, _LAYER)
        await in_thread(saved.write, folder)


def hardware(limits: Limits) -> Hardware:
    """A machine of these limits: whole processors, rounded up."""
    return Hardware(ram_mib(limits), cpus=max(1, -int(-limits.cpus // 1)))


def agent_args(limits: Limits) -> tuple[str, ...]:
    """Arguments of /init. A command may take all of the machine's memory: the guest's kernel ends the greediest."""
    return ("--init", "--processes", str(limits.processes), "--open-files", str(limits.open_files))


async def warm_up(guest: Guest) -> None:
    """A template may lack any of the programs."""
    for command in _WARM_UPS:
        await guest.exec(command)
    await guest.sync()


def make_ram(folder: Path, shape: Hardware) -> None:
    with (folder / RAM_FILE).open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.truncate(file.fileno(), shape.ram_mib << 20)


class Bootable(Protocol):
    """A machine that has just been started."""

    @property
    def process(self) -> ProcessId: ...

    def endpoint(self) -> Endpoint: ...

    def last_words(self) -> str: ...


async def wait_for_agent(machine: Bootable, timeout_s: float) -> GuestStream:
    """The stream of an agent that has answered. Raises SandboxDiedError if the machine ends, SandboxTimeoutError."""
    hello = asyncio.ensure_future(GuestStream.open(machine.endpoint(), timeout_s=timeout_s))
    dead = asyncio.ensure_future(machine.process.ended())
    try:
        await asyncio.wait({hello, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not hello.done() or (hello.exception() and dead.done()):
            raise SandboxDiedError(f"the guest did not boot; {machine.last_words()}")
        return hello.result()
    except SandboxTimeoutError as error:
        raise SandboxTimeoutError(f"the guest did not boot in {timeout_s:g} s; {machine.last_words()}") from error
    finally:
        dead.cancel()
        if not hello.done():
            hello.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxError):
            await hello
