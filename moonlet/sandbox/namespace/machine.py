"""A machine made of namespaces that lives now."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from pathlib import Path

from moonlet.errors import SandboxError
from moonlet.sandbox.api import FailReason
from moonlet.sandbox.backend import Machine, MachineSpec, Usage
from moonlet.sandbox.guest.stream import FifoPair
from moonlet.sandbox.namespace import files, freeze
from moonlet.sandbox.namespace.cgroup import Cgroup
from moonlet.sandbox.namespace.image import IMAGE_NOTE, describe
from moonlet.sandbox.namespace.launch import Identity, fifos
from moonlet.sandbox.processes import ProcessId, children, glance, proportional_bytes, tree, wait_ended

_KILL_TIMEOUT_S = 10.0
_DISK_REFRESH_S = 4.0
_DISK_PAUSES = 10  # times as long as a measurement took


class NamespaceMachine(Machine):
    """`child` is bubblewrap where this process started it, and `cgroup` is false where there are none."""

    def __init__(
        self, spec: MachineSpec, folder: Path, identity: Identity, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._spec, self._folder, self._identity, self._child = spec, folder, identity, child
        self._cgroup = Cgroup(spec.label, spec.id)
        self._joined: asyncio.Future[None] | None = None
        self._disk = _DiskUse((folder / "upper").resolve())

    @property
    def init(self) -> ProcessId:
        """The agent, as the host sees it."""
        return self._identity.init

    def endpoint(self) -> FifoPair:
        return fifos(self._folder)

    def start_joining(self) -> None:
        """Begin to move the machine into its control groups."""
        if self._cgroup:
            self._joined = asyncio.ensure_future(asyncio.to_thread(self._join))
            self._joined.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _join(self) -> None:
        self._cgroup.create(self._spec.limits)
        missing = {self.init.pid}
        while missing and self.init.is_alive():
            for pid in missing:
                with contextlib.suppress(ProcessLookupError):
                    self._cgroup.join(pid)
            # What its members start from now on is inside; what they had started before is still to be moved.
            missing = self._outside() if children(self.init.pid) != [] else set()

    def _outside(self) -> set[int]:
        """Processes that are not in the groups yet. The dead that nobody has reaped are in no group."""
        living = {pid for pid, state in tree(self.init.pid).items() if state not in "ZX"}
        return living - self._cgroup.processes()

    async def joined(self) -> None:
        """Wait until the limits of the control groups hold."""
        if self._joined is not None:
            await asyncio.shield(self._joined)

    async def freeze(self) -> None:
        await self.joined()
        if self._cgroup.can_freeze:
            await asyncio.to_thread(self._cgroup.freeze)
        else:
            await asyncio.to_thread(freeze.stop_tree, self.init)

    async def thaw(self) -> None:
        await self.joined()
        if self._cgroup.can_freeze:
            await asyncio.to_thread(self._cgroup.thaw)
        else:
            await asyncio.to_thread(freeze.continue_tree, self.init)

    async def save(self, image: Path, *, is_final: bool) -> None:
        await self.freeze()
        try:
            target = image / "upper"
            target.mkdir()
            await files.copy_tree(self._folder / "upper", target, link=is_final)
            (image / IMAGE_NOTE).write_text(json.dumps(describe(self._spec)))
        except BaseException:
            await self.thaw()
            raise
        if not is_final:
            await self.thaw()

    async def destroy(self) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.joined()
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        # With the first process of a pid namespace all others die, and it is gone only when they are.
        self.init.kill()
        if self._cgroup.can_freeze:
            self._cgroup.thaw()  # what a v1 group has frozen dies only when it is thawed
        if not wait_ended(self.init, _KILL_TIMEOUT_S):
            raise SandboxError(f"process {self.init.pid} of sandbox {self._spec.id} does not die: try again")
        if not wait_ended(self._identity.monitor, 1.0):
            self._identity.monitor.kill()
        if self._child is not None:
            self._child.wait(_KILL_TIMEOUT_S)
        if self._cgroup:
            self._cgroup.remove()

    async def wait_dead(self) -> FailReason:
        await self.init.ended()
        code = await asyncio.to_thread(self._child.wait) if self._child is not None else None
        was_killed = code in (None, 128 + 9)
        return FailReason.OOM if was_killed and self._cgroup.num_oom_kills() else FailReason.CRASH

    def usage(self) -> Usage:
        pids = glance(self.init.pid) if self.init.is_alive() else []
        memory = proportional_bytes([*pids, self._identity.monitor.pid]) if pids else 0
        return Usage(memory, self._disk.bytes(), len(pids))


class _DiskUse:
    """What a folder takes on the disk, measured in the background when it is asked for; the longer it takes, the rarer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = 0
        self._due_at: float | None = None
        self._lock = threading.Lock()

    def bytes(self) -> int:
        """The last figure; the first call waits for one."""
        if self._due_at is None:
            self._measure()
        elif time.monotonic() > self._due_at:
            threading.Thread(target=self._measure, name="moonlet-du", daemon=True).start()
        return self._bytes

    def _measure(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                begin = time.monotonic()
                self._bytes = files.disk_bytes(self._folder)
                took_s = time.monotonic() - begin
                self._due_at = time.monotonic() + max(_DISK_REFRESH_S, _DISK_PAUSES * took_s)
            finally:
                self._lock.release()
