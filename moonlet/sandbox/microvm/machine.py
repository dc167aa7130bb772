"""A machine that lives in a QEMU process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from moonlet.errors import SandboxDiedError, SandboxError, StorageError
from moonlet.sandbox.api import FailReason
from moonlet.sandbox.backend import Machine, MachineSpec, Usage
from moonlet.sandbox.generations import in_thread, storage_errors
from moonlet.sandbox.guest.stream import UnixSocket
from moonlet.sandbox.microvm.console import Console
from moonlet.sandbox.microvm.image import COPY_LIMIT_BYTES, MAX_LAYERS, copy_file, make_layer, share, used_bytes
from moonlet.sandbox.microvm.memory import RAM_FILE, load_changed, save_changed
from moonlet.sandbox.microvm.monitor import Monitor
from moonlet.sandbox.microvm.qemu import DISK, Qemu, Start
from moonlet.sandbox.microvm.qmp import Qmp, QmpError
from moonlet.sandbox.microvm.saved import PAGES, STATE, Life, Saved
from moonlet.sandbox.microvm.spawn import AGENT_SOCKET, CONSOLE_SOCKET, QMP_SOCKET, SocketFolder, log_end, spawn
from moonlet.sandbox.processes import ProcessId

LOAD_S = 120.0
LAST_WORDS = 2000  # characters
_POLL_S = 0.002


class QemuMachine(Machine):
    def __init__(self, spec: MachineSpec, folder: Path, life: Life, monitor: Monitor | None = None) -> None:
        self.spec, self.folder = spec, folder
        self._life = life
        self._monitor = monitor or Monitor(life.process)
        self._sockets = SocketFolder(folder)
        self._console = Console()
        self._qmp: Qmp | None = None
        self._lock = asyncio.Lock()
        self._is_frozen = False
        self._is_destroyed = False

    @classmethod
    async def start(cls, qemu: Qemu, spec: MachineSpec, folder: Path, start: Start, saved: Saved) -> QemuMachine:
        """Start QEMU in `folder`, which holds RAM file and disks. After an error nothing of it is left.

        Raises SandboxDiedError with what QEMU said, SandboxTimeoutError.
        """
        monitor = await Monitor.start(lambda: spawn(qemu, start, folder), lambda: log_end(folder))
        machine = cls(spec, folder, Life(saved, monitor.process), monitor)
        try:
            await in_thread(machine._life.write, folder)
            await machine.connect()
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def connect(self) -> None:
        """Raises SandboxDiedError with QEMU's complaint if it has ended, SandboxTimeoutError if another one controls it."""
        try:
            self._qmp = await Qmp.open(self._sockets.path(QMP_SOCKET))
            self._console.open(self._sockets.path(CONSOLE_SOCKET))
            self._is_frozen = (await self._ask("query-status"))["status"] != "running"
        except SandboxDiedError as error:
            raise SandboxDiedError(f"{error}; {self.last_words()}") from error

    @property
    def saved(self) -> Saved:
        return self._life.saved

    @property
    def process(self) -> ProcessId:
        return self._life.process

    def endpoint(self) -> UnixSocket:
        return UnixSocket(self._sockets.path(AGENT_SOCKET))

    def last_words(self) -> str:
        """What QEMU and the guest's kernel have printed last."""
        parts = {"QEMU": log_end(self.folder), "kernel": self._console.text()[-LAST_WORDS:]}
        return "; ".join(f"{who}: {text}" for who, text in parts.items() if text) or "neither QEMU nor kernel said why"

    async def _ask(self, command: str, **arguments: Any) -> Any:
        if self._qmp is None or self._is_destroyed:
            raise SandboxDiedError(f"the machine of sandbox {self.spec.id} is gone")
        return await self._qmp.command(command, **arguments)

    # -- pause in RAM -------------------------------------------------------------------------------------------------
    async def freeze(self) -> None:
        async with self._lock:
            await self._freeze()

    async def thaw(self) -> None:
        async with self._lock:
            await self._thaw()

    async def _freeze(self) -> None:
        if not self._is_frozen:
            await self._ask("stop")
            self._is_frozen = True

    async def _thaw(self) -> None:
        await self._ask("cont")
        self._is_frozen = False

    # -- saved machines -----------------------------------------------------------------------------------------------
    async def load(self, image: Path) -> None:
        """Take on RAM and devices of a saved machine; it stands still afterwards. RAM first: devices look into it."""
        if (image / PAGES).exists():
            await in_thread(load_changed, self.process.pid, image / PAGES)
        with (image / STATE).open("rb") as state:
            await self._ask("getfd", fdname="state", descriptor=state.fileno())
        await self._ask("migrate-incoming", uri="fd:state")
        async with asyncio.timeout(LOAD_S):
            while (await self._ask("query-status"))["status"] == "inmigrate":
                await asyncio.sleep(_POLL_S)

    async def save(self, image: Path, *, is_final: bool) -> None:
        """RAM file and lower layers are links; what is written are the changed pages, the devices and the top layer."""
        async with self._lock:
            was_frozen = self._is_frozen
            top = self.folder / f"disk-{self.saved.layer}"
            grown = not is_final and self.saved.layer < MAX_LAYERS and used_bytes(top) > COPY_LIMIT_BYTES
            try:
                await self._freeze()
                if grown:
                    await self._add_layer()
                with storage_errors(f"cannot write {image}"):
                    await self._write_image(image, is_final=is_final)
            except BaseException:
                if not was_frozen:
                    with contextlib.suppress(SandboxError):
                        await asyncio.shield(self._thaw())
                raise
            if not is_final and not was_frozen:
                await self._thaw()

    async def _write_image(self, image: Path, *, is_final: bool) -> None:
        await self.save_state(image)
        await in_thread(save_changed, self.process.pid, image / PAGES)
        await in_thread(self._fill_image, image, is_final)

    async def save_state(self, image: Path) -> None:
        """Have QEMU write processors and devices; the disks are whole on the host afterwards. The machine must be frozen."""
        try:
            await self._ask("xen-save-devices-state", filename=str(image / STATE))
        except QmpError as error:
            raise StorageError(f"cannot write {image / STATE}: {error}; free some space") from error
        (image / STATE).chmod(0o600)

    async def _add_layer(self) -> None:
        """The layer that was written to becomes one that stays as it is, so that an image can share it."""
        layer = self.saved.layer + 1
        await in_thread(make_layer, self.folder, layer)
        options = {"device": DISK, "snapshot-file": f"disk-{layer}", "format": "qcow2", "mode": "existing"}
        await self._ask("blockdev-snapshot-sync", **options)
        self._life = self._life.with_layer(layer)

    def _fill_image(self, image: Path, is_final: bool) -> None:
        layer = self.saved.layer
        share(self.folder / RAM_FILE, image / RAM_FILE)
        for below in range(layer):
            share(self.folder / f"disk-{below}", image / f"disk-{below}")
        (share if is_final else copy_file)(self.folder / f"disk-{layer}", image / f"disk-{layer}")
        self.saved.write(image)

    async def attach(self) -> None:
        """Take over what lives in the folder. Raises SandboxDiedError if nothing does.

        Which layer is written to only QEMU knows: a service that died in a save may have added one.
        """
        if not self.process.is_alive():
            raise SandboxDiedError(f"the machine of sandbox {self.spec.id} is gone", FailReason.CRASH)
        await self.connect()
        for block in await self._ask("query-block"):
            if block.get("device") == DISK:
                name = Path(block["inserted"]["file"]).name
                self._life = self._life.with_layer(int(name.removeprefix("disk-")))

    # -- its end ------------------------------------------------------------------------------------------------------
    async def destroy(self) -> None:
        self._is_destroyed = True
        if self._qmp is not None:
            await self._qmp.close()
        await self._monitor.kill()
        await self._console.close()
        self._sockets.close()

    async def wait_dead(self) -> FailReason:
        await self._monitor.ended()
        if self._is_destroyed:
            await asyncio.Event().wait()  # it did not die on its own
        await self._console.finish(self.folder)
        return FailReason.CRASH

    def usage(self) -> Usage:
        """How many processes the guest has only its agent knows."""
        if not self.process.is_alive():
            return Usage()
        own = range(self.saved.template_layers, self.saved.layer + 1)
        disk = sum(used_bytes(self.folder / f"disk-{number}") for number in own)
        return Usage(memory_bytes=self._monitor.memory_bytes(), disk_bytes=disk)
