"""Templates that have booted: a machine saved when its agent was ready, from which all others start.

Kept in the cache under a digest of all that it is made of; what was not used for the longest time goes first. Machines and
saved machines hold hard links of its files, so that it may go at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from moonlet.errors import SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Progress, Template
from moonlet.sandbox.generations import check_space, flush_folder, folder_bytes, in_thread, remake_folder, remove_tree
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.microvm.hostfiles import HostFiles
from moonlet.sandbox.microvm.image import make_disk, make_layer
from moonlet.sandbox.microvm.initramfs import write_initramfs
from moonlet.sandbox.microvm.kernel import QEMU_MODULES, Kernel, load_order
from moonlet.sandbox.microvm.machine import QemuMachine
from moonlet.sandbox.microvm.memory import RAM_FILE
from moonlet.sandbox.microvm.qemu import Boot, Hardware, Qemu, Start, boot_args
from moonlet.sandbox.microvm.saved import FACTS, FORMAT, STATE, Saved
from moonlet.sandbox.namespace.processes import ProcessId

BOOT_S = 180.0  # emulated, on a machine that is busy with other things
MIN_RAM_MIB = 160
CACHE_BYTES = 8 << 30
RESERVE_BYTES = 256 << 20
BOOT_LABEL = "template"
_KEPT = {FACTS, STATE, RAM_FILE, "disk-0", "disk-1", "disk-2"}
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


def hardware(limits: Limits) -> Hardware:
    """A machine of these limits: whole processors, and enough memory for a kernel."""
    return Hardware(ram_mib=max(MIN_RAM_MIB, -(-limits.memory_bytes >> 20)), cpus=max(1, -int(-limits.cpus // 1)))


class Templates:
    """The booted templates of one cache folder."""

    def __init__(self, cache: Path, parts: Parts) -> None:
        self._cache, self._parts = cache, parts
        self._folder = cache / "templates"
        self._known: dict[tuple[str, Limits], Path] = {}
        self._host: HostFiles | None = None

    async def prepare(self, template: Template, limits: Limits, progress: Progress | None = None) -> None:
        """Boot the template if no saved machine of it is there."""
        async with self.held(template, limits, progress):
            pass

    @asynccontextmanager
    async def held(self, template: Template, limits: Limits, progress: Progress | None = None) -> AsyncIterator[Path]:
        """The folder of a saved machine, booted first if there is none, that nobody removes inside the block.

        Safe if several processes do it.
        """
        known = self._known.get((template.id, limits))
        if known is None:
            known = self._folder / await in_thread(self._key, template, limits)
            self._known[template.id, limits] = known
        lock = self._lock(known)
        while True:
            async with _locked(lock, fcntl.LOCK_SH):
                if (known / FACTS).exists():
                    os.utime(known)
                    yield known
                    return
            async with _locked(lock, fcntl.LOCK_EX):
                if not (known / FACTS).exists():
                    await self._make(template, limits, known, progress or (lambda what, share: None))
            await in_thread(self._evict, known)

    async def discard(self, template: Template, limits: Limits) -> None:
        """Remove a saved machine, so that the next start boots the template again."""
        folder = self._known.get((template.id, limits))
        if folder is not None:
            async with _locked(self._lock(folder), fcntl.LOCK_EX):
                await in_thread(remove_tree, folder)

    def _lock(self, folder: Path) -> Path:
        return self._cache / f"{folder.name}.lock"

    def _key(self, template: Template, limits: Limits) -> str:
        files = template.id
        if template.rootfs is None:
            self._host = self._host or HostFiles()
            files = self._host.digest
        parts = self._parts
        made_of = [FORMAT, files, parts.qemu.identity, parts.kernel.digest, parts.agent_digest, _WARM_UPS]
        boot = Boot(Path("kernel"), Path("initramfs"), agent_args(limits), limits.processes)
        made_of += [*boot_args(boot), asdict(hardware(limits)), limits.disk_bytes]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:20]

    async def _make(self, template: Template, limits: Limits, target: Path, progress: Progress) -> None:
        unfinished = target.with_name(f"{target.name}.tmp")
        try:
            await in_thread(remake_folder, unfinished)
            progress("disk", 0.0)
            await in_thread(self._make_disk, template, limits, unfinished)
            progress("boot", 0.2)
            await self._boot(limits, unfinished, progress)
            progress("save", 0.9)
            await in_thread(_finish, unfinished, target)
            progress("ready", 1.0)
        except BaseException:
            await in_thread(remove_tree, unfinished)
            raise

    def _make_disk(self, template: Template, limits: Limits, folder: Path) -> None:
        rootfs = template.rootfs or folder / "rootfs"
        expected = folder_bytes(rootfs) if template.rootfs else 2 * (self._host or HostFiles()).num_bytes
        check_space(folder, (hardware(limits).ram_mib << 20) + expected, RESERVE_BYTES)
        if template.rootfs is None:
            rootfs.mkdir()
            (self._host or HostFiles()).copy(rootfs)
        make_disk(rootfs, folder / "disk-0", limits.disk_bytes)
        if template.rootfs is None:
            remove_tree(rootfs)
        make_layer(folder, 1)

    async def _boot(self, limits: Limits, folder: Path, progress: Progress) -> None:
        parts, shape = self._parts, hardware(limits)
        initramfs = await in_thread(parts.initramfs, self._cache)
        make_ram(folder, shape)
        boot = Boot(parts.kernel.image, initramfs, agent_args(limits), limits.processes)
        spec = boot_spec(folder.name, limits)
        start = Start(spec.label, spec.id, shape, "disk-1", boot=boot, is_ram_shared=True)
        saved = Saved(parts.qemu.identity, parts.kernel.digest, parts.agent_digest, shape, _LAYER, _TEMPLATE_LAYERS)
        machine = await QemuMachine.start(parts.qemu, spec, folder, start, saved)
        try:
            stream = await wait_for_agent(machine, BOOT_S)
            progress("warm up", 0.7)
            for command in _WARM_UPS:
                await Guest(stream).exec(command)
            await Guest(stream).sync()
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

    def _evict(self, keep: Path) -> None:
        """Remove what was used longest ago until the cache has its size again."""
        folders = [path for path in self._folder.iterdir() if (path / FACTS).exists() and path.suffix != ".tmp"]
        sizes = {path: folder_bytes(path) for path in folders}
        for path in sorted(folders, key=lambda path: path.stat().st_mtime):
            if sum(sizes.values()) <= CACHE_BYTES:
                return
            descriptor = os.open(self._lock(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor), contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path != keep:
                    del sizes[path]
                    remove_tree(path)


def agent_args(limits: Limits) -> tuple[str, ...]:
    """Arguments of /init. A command may take all of the machine's memory: the guest's kernel ends the greediest."""
    return ("--init", "--processes", str(limits.processes), "--open-files", str(limits.open_files))


def boot_spec(name: str, limits: Limits) -> MachineSpec:
    """A machine that belongs to this process and to no state directory: see `is_orphan`."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    return MachineSpec(f"{me.pid}.{me.start}.{name}", BOOT_LABEL, Template("boot"), limits, "sandbox")


def is_orphan(machine_id: str) -> bool:
    """Whether the process that boots this template has died."""
    pid, start = machine_id.split(".")[:2]
    return not ProcessId(int(pid), int(start)).is_alive()


def make_ram(folder: Path, shape: Hardware) -> None:
    with (folder / RAM_FILE).open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.truncate(file.fileno(), shape.ram_mib << 20)


async def wait_for_agent(machine: QemuMachine, timeout_s: float) -> GuestStream:
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


@asynccontextmanager
async def _locked(path: Path, how: int) -> AsyncIterator[None]:
    """`how` is LOCK_EX for one at a time among all processes of this host, LOCK_SH for many but no such one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)  # a blocking wait would hold a thread of the pool for as long as a boot takes
        yield
    finally:
        os.close(descriptor)


def _finish(unfinished: Path, target: Path) -> None:
    """Bring all to the disk once, so that machines that are saved later need not; then give it its name."""
    for path in unfinished.iterdir():
        if path.name not in _KEPT:
            path.unlink()
            continue
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    flush_folder(unfinished)
    os.rename(unfinished, target)
