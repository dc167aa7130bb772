"""A machine that lives in a Firecracker process, and the first boot of its template."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
from dataclasses import asdict
from pathlib import Path

from moonlet.errors import SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.api import FailReason, Limits
from moonlet.sandbox.backend import Machine, MachineSpec, Progress, Usage
from moonlet.sandbox.generations import in_thread, storage_errors
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import UnixSocket
from moonlet.sandbox.microvm.booting import BOOT_S, agent_args, hardware, wait_for_agent, warm_up
from moonlet.sandbox.microvm.firecracker_api import (
    AGENT_PORT,
    AGENT_SOCKET,
    API_SOCKET,
    DISK,
    FirecrackerApi,
    Request,
    boot_requests,
    save_request,
    state_request,
)
from moonlet.sandbox.microvm.image import copy_file, share, used_bytes
from moonlet.sandbox.microvm.initramfs import write_initramfs
from moonlet.sandbox.microvm.kernel import FIRECRACKER_MODULES, find_kernel, load_order
from moonlet.sandbox.microvm.marks import boot_spec, mark
from moonlet.sandbox.microvm.memory import RAM_FILE
from moonlet.sandbox.microvm.monitor import Monitor
from moonlet.sandbox.microvm.qemu import Boot
from moonlet.sandbox.microvm.saved import FACTS, STATE, Life, Saved
from moonlet.sandbox.microvm.spawn import SocketFolder
from moonlet.sandbox.microvm.templates import Booter
from moonlet.sandbox.microvm.vmlinux import unpack_kernel
from moonlet.sandbox.processes import ProcessId

KIND, LOG = "firecracker", "firecracker.log"
START_S = 10.0


class FirecrackerMachine(Machine):
    def __init__(self, spec: MachineSpec, folder: Path, life: Life, monitor: Monitor | None = None) -> None:
        self.spec, self.folder = spec, folder
        self._life = life
        self._monitor = monitor or Monitor(life.process)
        self._sockets = SocketFolder(folder)
        self._api = FirecrackerApi(self._sockets.path(API_SOCKET))
        self._lock = asyncio.Lock()
        self._is_frozen = False
        self._is_destroyed = False

    @classmethod
    async def start(
        cls, program: str, spec: MachineSpec, folder: Path, requests: list[Request], saved: Saved
    ) -> FirecrackerMachine:
        """Start Firecracker in `folder` and send it `requests`. After an error nothing of it is left."""
        monitor = await Monitor.start(lambda: _spawn(program, spec, folder), lambda: _log_end(folder))
        machine = cls(spec, folder, Life(saved, monitor.process), monitor)
        try:
            await in_thread(machine._life.write, folder)
            await machine.connect()
            await machine._api.send(requests)
            await machine._look()
        except SandboxDiedError as error:
            await machine.destroy()
            raise SandboxDiedError(f"{error}; {machine.last_words()}") from error
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def connect(self) -> None:
        """Wait until it answers. Raises SandboxDiedError, SandboxTimeoutError."""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    with contextlib.suppress(SandboxDiedError):
                        await self._look()
                        return
                    if not self.process.is_alive():
                        raise SandboxDiedError("Firecracker has ended")
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            raise SandboxTimeoutError(f"Firecracker did not answer within {START_S:g} s") from error

    async def _look(self) -> None:
        """A machine that was just loaded stands still, one that a service left may."""
        self._is_frozen = (await self._api.send([Request("GET", "/")])).get("state") == "Paused"

    @property
    def process(self) -> ProcessId:
        return self._monitor.process

    def last_words(self) -> str:
        return _log_end(self.folder) or "Firecracker has printed nothing"

    def endpoint(self) -> UnixSocket:
        return UnixSocket(self._sockets.path(AGENT_SOCKET), AGENT_PORT)

    async def freeze(self) -> None:
        async with self._lock:
            await self._set_running(False)

    async def thaw(self) -> None:
        async with self._lock:
            await self._set_running(True)

    async def _set_running(self, is_running: bool) -> None:
        if self._is_destroyed:
            raise SandboxDiedError(f"the machine of sandbox {self.spec.id} is gone")
        if self._is_frozen == is_running:
            await self._api.send([state_request(is_running)])
            self._is_frozen = not is_running

    async def save(self, image: Path, *, is_final: bool) -> None:
        async with self._lock:
            was_frozen = self._is_frozen
            try:
                await self._set_running(False)
                with storage_errors(f"cannot write {image}"):
                    await self.save_memory(image)
                    await in_thread(share if is_final else copy_file, self.folder / DISK, image / DISK)
                    await in_thread(self._life.saved.write, image)
            except BaseException:
                if not was_frozen:
                    with contextlib.suppress(SandboxError):
                        await asyncio.shield(self._set_running(True))
                raise
            if not is_final and not was_frozen:
                await self._set_running(True)

    async def save_memory(self, image: Path) -> None:
        """Memory, processors and devices of a machine that stands still."""
        await self._api.send([save_request(image / STATE, image / RAM_FILE)])

    async def destroy(self) -> None:
        self._is_destroyed = True
        await self._monitor.kill()
        self._sockets.close()

    async def wait_dead(self) -> FailReason:
        await self._monitor.ended()
        if self._is_destroyed:
            await asyncio.Event().wait()  # it did not die on its own
        return FailReason.CRASH

    def usage(self) -> Usage:
        if not self.process.is_alive():
            return Usage()
        return Usage(memory_bytes=self._monitor.memory_bytes(), disk_bytes=used_bytes(self.folder / DISK))


def _spawn(program: str, spec: MachineSpec, folder: Path) -> subprocess.Popen[bytes]:
    """The guest's console goes nowhere: it could fill the host's disk. The mark stands where the program's name would."""
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [mark(KIND, spec.label, spec.id), "--api-sock", API_SOCKET],
            executable=program,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def _log_end(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / LOG).read_bytes()[-2000:].decode(errors="replace").strip()
    return ""


class FirecrackerBooter(Booter):
    """`program` is a path."""

    kept = frozenset({FACTS, STATE, RAM_FILE, DISK})

    def __init__(self, cache: Path, program: str, identity: str) -> None:
        self._cache, self._program, self._identity = cache, program, identity
        self._kernel = find_kernel(cache.parent, FIRECRACKER_MODULES)
        self._agent = guest_binary()
        self._agent_digest = hashlib.sha256(self._agent.read_bytes()).hexdigest()[:16]

    def made_of(self, limits: Limits) -> list[object]:
        boot = Boot(Path("kernel"), Path("initramfs"), agent_args(limits), limits.processes)
        requests = [asdict(request) for request in boot_requests(hardware(limits), boot)]
        return [self._identity, self._kernel.digest, self._agent_digest, requests]

    async def boot(self, limits: Limits, folder: Path, progress: Progress) -> None:
        kernel, initramfs = await in_thread(self._make_boot_files)
        (folder / "disk-0").rename(folder / DISK)
        boot, shape = Boot(kernel, initramfs, agent_args(limits), limits.processes), hardware(limits)
        saved = Saved(self._identity, self._kernel.digest, self._agent_digest, shape, 0, 0)
        spec = boot_spec(folder.name, limits)
        machine = await FirecrackerMachine.start(self._program, spec, folder, boot_requests(shape, boot), saved)
        try:
            stream = await wait_for_agent(machine, BOOT_S)
            progress("warm up", 0.7)
            await warm_up(Guest(stream))
            await machine.freeze()
            await machine.save_memory(folder)
            stream.close()
        finally:
            await machine.destroy()
        await in_thread(saved.write, folder)

    def _make_boot_files(self) -> tuple[Path, Path]:
        kernel = self._cache / f"vmlinux-{self._kernel.digest}"
        initramfs = self._cache / f"initramfs-{self._kernel.digest}-{self._agent_digest}"
        if not kernel.exists():
            unpack_kernel(self._kernel.image, kernel)
        if not initramfs.exists():
            write_initramfs(initramfs, self._agent.read_bytes(), load_order(self._kernel, FIRECRACKER_MODULES))
        return kernel, initramfs
