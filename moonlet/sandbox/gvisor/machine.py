"""A machine that lives in a Sentry. Each life (start, restore) is a container of its own.

A checkpoint ends the Sentry that it was taken of, in the versions at hand also when it fails. So a save writes into the
machine's own folder first, after a look at the free space, links the result into the image, and starts the machine anew
from it: whatever fails later, the machine can go on. The rename that says "this checkpoint is whole" is done by the
process that takes it, which goes on when the service is killed; `attach` finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import struct
import termios
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moonlet.errors import SandboxDiedError, SandboxError, SandboxStateError, StorageError
from moonlet.sandbox.api import FailReason
from moonlet.sandbox.backend import Machine, MachineSpec, Usage
from moonlet.sandbox.generations import settled
from moonlet.sandbox.guest.stream import FifoPair
from moonlet.sandbox.gvisor import cgroup
from moonlet.sandbox.gvisor.bundle import SENTRY_BYTES, Bundle, link_or_copy, write_config
from moonlet.sandbox.gvisor.containers import container_id, find_processes, held_bytes, kill_all
from moonlet.sandbox.gvisor.runsc import Runsc, call, read_log
from moonlet.sandbox.processes import ProcessId

META = "machine.json"
CHECKPOINT = "checkpoint"
GUEST = "guest"
_RESERVE_BYTES = 64 << 20
_START_S, _CONTROL_S, _SAVE_S = 60.0, 20.0, 600.0
_WATCH_S = 0.5


@dataclass(frozen=True)
class Life:
    """What the folder remembers of the container that lives in it."""

    number: int = 0
    process: ProcessId | None = None
    preload: bool = False

    def write(self, folder: Path) -> None:
        unfinished = folder / (META + ".tmp")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(folder / META)

    @staticmethod
    def read(folder: Path) -> Life:
        """Raises SandboxDiedError if the folder never held a machine."""
        try:
            fields = json.loads((folder / META).read_text())
            process = fields["process"] and ProcessId(**fields["process"])
            return Life(fields["number"], process, fields["preload"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxDiedError(f"no machine of gVisor was in {folder}", FailReason.LOST) from error


class GvisorMachine(Machine):
    def __init__(self, runsc: Runsc, spec: MachineSpec, folder: Path, life: Life) -> None:
        self._runsc = runsc
        self.spec = spec
        self._bundle = Bundle(folder)
        self._life = life
        self._is_frozen = False
        self._is_destroyed = False
        self._is_between_lives = False  # no Sentry, on purpose
        self._began = asyncio.Event()  # set when a life begins
        self._lock = asyncio.Lock()

    def endpoint(self) -> FifoPair:
        return FifoPair(to_guest=self._bundle.to_guest, from_guest=self._bundle.from_guest)

    @property
    def container(self) -> str:
        return container_id(self.spec.label, self.spec.id, self._life.number)

    # -- lives --------------------------------------------------------------------------------------------------------
    async def begin(self, checkpoint: Path | None) -> None:
        """Start a container, from the template or from a checkpoint. After an error nothing of it is left."""
        self._require_wanted()
        self._life = replace(self._life, number=self._life.number + 1, process=None)
        bundle = self._bundle
        pid_file = bundle.folder / "pid"
        pid_file.unlink(missing_ok=True)
        bundle.state(self.container).mkdir(parents=True, exist_ok=True)
        write_config(bundle, self.spec, self.container, preload=self._life.preload)
        verb = ["run"] if checkpoint is None else ["restore", f"--image-path={checkpoint}"]
        limit_s = _START_S if checkpoint is None else _SAVE_S  # gigabytes of memory may have to be read
        args = [*verb, "--detach", f"--bundle={bundle.folder}", f"--pid-file={pid_file}", self.container]
        try:
            with _open_fifos(bundle) as (stdin, stdout):
                command = self._runsc.command(bundle.state(self.container), *args, log=bundle.log)
                done = await call(command, timeout_s=limit_s, stdin=stdin, stdout=stdout)
            self._require_wanted()
            process = ProcessId.of(int(pid_file.read_text())) if done.code == 0 else None
            if process is None:
                raise SandboxError(f"gVisor could not start the machine: {read_log(bundle.log) or done.message}")
            self._life = replace(self._life, process=process)
            self._life.write(bundle.folder)
        except BaseException:
            await settled(asyncio.ensure_future(self._end_life()))
            raise
        self._is_frozen = self._is_between_lives = False
        self._tell_begin()

    def _tell_begin(self) -> None:
        """Wake who waits for the end of the time between two lives."""
        self._began.set()
        self._began.clear()

    def _require_wanted(self) -> None:
        if self._is_destroyed:
            raise SandboxDiedError(f"sandbox {self.spec.id} has been destroyed", FailReason.LOST)

    async def _begin_saved(self) -> None:
        await self.begin(self._bundle.saved)
        await asyncio.to_thread(shutil.rmtree, self._bundle.saved, True)

    async def _end_life(self) -> None:
        """Kill the container and forget it; its folder stays."""
        spec = self.spec
        await kill_all(lambda: find_processes(spec.label, spec.id))
        await asyncio.to_thread(_forget, self._bundle, spec)

    async def destroy(self) -> None:
        self._is_destroyed = True
        await self._end_life()

    # -- pause in RAM -------------------------------------------------------------------------------------------------
    async def freeze(self) -> None:
        async with self._lock:
            await self._freeze()

    async def _freeze(self) -> None:
        if self._is_frozen or self._is_between_lives:
            return
        self._require_alive()
        self._is_frozen = True  # also for a caller that is cancelled meanwhile
        message = await settled(asyncio.ensure_future(self._control("pause")))
        if message and "in state paused" not in message:
            self._is_frozen = False
            self._require_alive()
            raise SandboxError(f"gVisor could not pause the machine: {message}")

    async def thaw(self) -> None:
        async with self._lock:
            if self._is_between_lives:
                await self._begin_saved()
                return
            self._require_alive()
            message = await self._thaw()
            if message and "in state running" not in message:
                self._require_alive()
                raise SandboxError(f"gVisor could not resume the machine: {message}")

    async def _thaw(self) -> str:
        """Empty, or the complaint: there may be nothing to thaw, or nothing that lives."""
        message = await self._control("resume")
        self._is_frozen = False
        return message

    async def _control(self, verb: str) -> str:
        """Empty, or the complaint."""
        done = await call(
            self._runsc.command(self._bundle.state(self.container), verb, self.container), timeout_s=_CONTROL_S
        )
        return "" if done.code == 0 else done.message or f"exit status {done.code}"

    def _require_alive(self) -> None:
        process = self._life.process
        if process is None or not process.is_alive():
            raise SandboxDiedError(f"the machine of sandbox {self.spec.id} is gone", self._death_reason())

    # -- save ---------------------------------------------------------------------------------------------------------
    async def save(self, image: Path, *, is_final: bool) -> None:
        """The image holds the checkpoint and the agent that runs in it; never the files of the template."""
        async with self._lock:
            if self._is_between_lives:
                raise SandboxStateError(f"sandbox {self.spec.id} has been saved for good already")
            was_frozen = self._is_frozen
            await self._check_space()
            try:
                await self._freeze()
                await _drain(self._bundle.from_guest)
                await self._checkpoint()
                await asyncio.to_thread(self._fill_image, image)
            except OSError as error:
                await settled(asyncio.ensure_future(self._live_on(was_frozen)))
                raise StorageError(f"cannot write {image}: {error.strerror or error}; free some space") from error
            except BaseException:
                await settled(asyncio.ensure_future(self._live_on(was_frozen)))
                raise
            if not is_final:
                await settled(asyncio.ensure_future(self._live_on(was_frozen)))

    async def _live_on(self, was_frozen: bool) -> None:
        """As before the save: from the checkpoint if there is a whole one, else in the Sentry if that is still there."""
        if self._is_destroyed:
            return
        if self._bundle.saved.exists():
            await self._end_life()
            await self._begin_saved()
            if was_frozen:
                await self._freeze()
            return
        await asyncio.to_thread(shutil.rmtree, self._bundle.saved.with_suffix(".tmp"), True)
        if self._is_frozen and not was_frozen:
            await self._thaw()
        self._is_between_lives = False
        self._tell_begin()

    async def _check_space(self) -> None:
        """A checkpoint that meets a full disk would be the end of the machine: look before."""
        needed = (await asyncio.to_thread(self._used_bytes)) + _RESERVE_BYTES
        free = shutil.disk_usage(self._bundle.folder).free
        if free < needed:
            raise StorageError(
                f"saving sandbox {self.spec.id} may need {needed >> 20} MiB and the disk of {self._bundle.folder} has "
                f"{free >> 20} MiB free: free some space; the sandbox goes on"
            )

    async def _checkpoint(self) -> None:
        """Leaves a whole checkpoint in `saved` and no Sentry; after an error what `_live_on` needs."""
        saved, unfinished = self._bundle.saved, self._bundle.saved.with_suffix(".tmp")
        await asyncio.to_thread(shutil.rmtree, unfinished, True)
        unfinished.mkdir()
        args = [CHECKPOINT, f"--image-path={unfinished}", self.container]
        if self._runsc.can_skip_compression:
            args.insert(1, "--compression=none")
        command = self._runsc.command(self._bundle.state(self.container), *args)
        self._is_between_lives = True
        work = call(["sh", "-c", '"$@" && mv "$0.tmp" "$0"', str(saved), *command], timeout_s=_SAVE_S)
        # To its end also for a caller that is cancelled: a Sentry that saves itself cannot be stopped.
        done = await settled(asyncio.ensure_future(work))
        if done.code != 0:
            self._raise_unsaved(done.message)
        await self._end_life()

    def _raise_unsaved(self, message: str) -> None:
        is_full = "no space left" in message
        if self._life.process is None or not self._life.process.is_alive():
            reason = FailReason.DISK_FULL if is_full else self._death_reason()
            raise SandboxDiedError(f"the machine of sandbox {self.spec.id} ended while being saved: {message}", reason)
        raise (StorageError if is_full else SandboxError)(f"sandbox {self.spec.id} could not be saved: {message}")

    def _fill_image(self, image: Path) -> None:
        for source, name in ((self._bundle.saved, CHECKPOINT), (self._bundle.guest_folder, GUEST)):
            (image / name).mkdir(parents=True)
            for file in sorted(source.iterdir()):
                link_or_copy(file, image / name / file.name)
        for file in (image / CHECKPOINT).iterdir():
            file.chmod(0o600)  # the guest's memory
        facts = {
            "version": self._runsc.version,
            "platform": self._runsc.platform,
            "preload": self._life.preload,
            "root": self._bundle.rootfs.resolve().name,
        }
        (image / META).write_text(json.dumps(facts))

    # -- watching -----------------------------------------------------------------------------------------------------
    async def wait_dead(self) -> FailReason:
        while True:
            process = self._life.process
            if self._is_destroyed:
                await asyncio.Event().wait()  # it did not die on its own
            if self._is_between_lives or process is None:
                await self._began.wait()
                continue
            if await self._is_over(process) and process == self._life.process and not self._is_between_lives:
                return self._death_reason()

    async def _is_over(self, process: ProcessId) -> bool:
        """Wait for the end of the Sentry; without control groups also see to it that it keeps to its memory."""
        if self._runsc.has_cgroups:
            await process.ended()
            return not self._is_destroyed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_S):
                await process.ended()
        if not process.is_alive():
            return not self._is_destroyed
        if await asyncio.to_thread(self._used_bytes) > self.spec.limits.memory_bytes + SENTRY_BYTES:
            (self._bundle.folder / "oom").touch()
            process.kill()
        return False

    def _death_reason(self) -> FailReason:
        is_oom = (self._bundle.folder / "oom").exists() or cgroup.count_oom_kills(self.spec.label, self.container)
        return FailReason.OOM if is_oom else FailReason.CRASH

    def usage(self) -> Usage:
        """Files of the guest are in its memory; how many processes it has only the agent knows."""
        if self._life.process is None or not self._life.process.is_alive():
            return Usage()
        return Usage(memory_bytes=self._used_bytes())

    def _used_bytes(self) -> int:
        counted = cgroup.memory_bytes(self.spec.label, self.container) if self._runsc.has_cgroups else None
        if counted is not None:
            return counted
        return held_bytes([one.process.pid for one in find_processes(self.spec.label, self.spec.id)])

    # -- after a restart of the service -------------------------------------------------------------------------------
    async def find_again(self) -> None:
        """Take over what lives in the folder. Raises SandboxDiedError if nothing does and nothing was saved there."""
        async with self._lock:
            await self._wait_checkpoint()
            if self._bundle.saved.exists():
                await self._end_life()
                await self._begin_saved()
                return
            self._require_alive()

    async def _wait_checkpoint(self) -> None:
        """A checkpoint that outlived the service that asked for it goes to its end."""
        label, sandbox = self.spec.label, self.spec.id
        async with asyncio.timeout(_SAVE_S):
            while pending := [p for p in find_processes(label, sandbox) if CHECKPOINT in p.argv]:
                await asyncio.gather(*(one.process.ended() for one in pending))


@contextlib.contextmanager
def _open_fifos(bundle: Bundle):
    """Both ends of each, so that neither the guest nor the host ever reads an end of file."""
    stdin = os.open(bundle.to_guest, os.O_RDWR)
    try:
        stdout = os.open(bundle.from_guest, os.O_RDWR)
        try:
            yield stdin, stdout
        finally:
            os.close(stdout)
    finally:
        os.close(stdin)


async def _drain(fifo: Path) -> None:
    """Let the host read what the frozen guest has written: a checkpoint would take it out of the pipe, for nobody.

    Ends when the pipe is empty or nobody seems to read.
    """
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        before = None
        while (waiting := _waiting_bytes(descriptor)) and waiting != before:
            before = waiting
            await asyncio.sleep(0.02)
    finally:
        os.close(descriptor)


def _waiting_bytes(descriptor: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]


def _forget(bundle: Bundle, spec: MachineSpec) -> None:
    shutil.rmtree(bundle.states, ignore_errors=True)
    for folder in cgroup.find_cgroups(spec.label):
        if folder.name.rsplit(".", 1)[0] == f"{spec.label}.{spec.id}":
            cgroup.remove_cgroups(spec.label, folder.name)
