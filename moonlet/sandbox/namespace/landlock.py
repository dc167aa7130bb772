"""The backend `landlock`: weak, for kernels or containers that forbid user namespaces. Only by its own name.

The guest is an ordinary process of the host that has given up most files, all sockets and many system calls. It shares
the host's process list, host name and clock; its home is a folder of the host and has that folder's path. It cannot
be kept from changing modes and times of files that its user owns, which Landlock does not cover.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from moonlet.errors import BackendUnavailableError, SandboxDiedError, SandboxError
from moonlet.sandbox.api import Caps, FailReason, Limits
from moonlet.sandbox.backend import Backend, Machine, MachineSpec, Probe, Progress, Template
from moonlet.sandbox.generations import in_thread
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.hostview import HOST_DIRS
from moonlet.sandbox.namespace import files, freeze, linux, seccomp
from moonlet.sandbox.namespace.cgroup import hierarchies
from moonlet.sandbox.namespace.image import IMAGE_FORMAT, check_image
from moonlet.sandbox.namespace.landlock_rules import READ, WRITE, Rule, landlock_version, restrict_thread
from moonlet.sandbox.namespace.launch import LOG, SYSTEM_PATH, Identity, boot_id, fifos, in_own_thread
from moonlet.sandbox.namespace.machine import NamespaceMachine
from moonlet.sandbox.namespace.stage import can_be_another_user, machine_user
from moonlet.sandbox.namespace.syscalls import this_architecture
from moonlet.sandbox.processes import ProcessId, all_pids, tree, until_gone

# Sockets by path escape Landlock, and the host's may be strong (docker.sock): there are pairs of sockets only.
_NO_FAMILIES: tuple[int, ...] = ()
_SHARED_WITH_HOST = ("shmget", "semget", "msgget", "mq_open")
_READABLE = (
    *HOST_DIRS,
    "/proc",
    *(f"/etc/{name}" for name in ("alternatives", "fonts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")),
    *(
        f"/etc/{name}"
        for name in ("group", "hosts", "mime.types", "nsswitch.conf", "os-release", "passwd", "protocols")
    ),
    *(f"/etc/{name}" for name in ("perl", "python3", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo")),
)
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_MARK = "MOONLET_SANDBOX"

log = logging.getLogger("moonlet")


class LandlockBackend(Backend):
    """Files survive a pause and a fork; processes only stay stopped in RAM."""

    name: ClassVar[str] = "landlock"
    strength: ClassVar[int] = 0

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._is_privileged: bool | None = None

    async def probe(self) -> Probe:
        if self._probe is None:
            self._probe = await self._try()
        return self._probe

    async def _try(self) -> Probe:
        version = landlock_version()
        if version == 0:
            return Probe(self.name, None, "this kernel has no Landlock: it needs Linux 5.13 with lsm=landlock")
        with tempfile.TemporaryDirectory(prefix="moonlet-probe-") as folder:
            spec = MachineSpec("probe", f"probe-{os.getpid()}", Template("host"), Limits(), "probe")
            try:
                await (await self._start(spec, Path(folder), None)).destroy()
            except (SandboxError, OSError) as error:
                return Probe(self.name, None, str(error))
        return Probe(self.name, self._caps(version), f"Landlock {version} held a process", f"files-{IMAGE_FORMAT}")

    def _caps(self, version: int) -> Caps:
        notes = ["weak: the guest shares this host's processes, name and clock; modes of its user's files are not safe"]
        if version < 6:
            notes.append("the guest can signal other processes of its user (Linux 6.12 and newer forbid it)")
        if not (self._is_privileged or hierarchies().has("pids")):
            notes.append("the number of processes is not limited")
        if not hierarchies().has("memory"):
            notes.append("memory is limited per process (RLIMIT_AS)")
        return Caps(False, False, False, isolation="weak", network=False, notes=tuple(notes))

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        if template.rootfs is not None:
            raise BackendUnavailableError(
                "the backend landlock has the template 'host' only: it cannot change the root"
            )
        await asyncio.to_thread(guest_binary)

    async def launch(self, spec: MachineSpec, folder: Path) -> Machine:
        _warn(spec)
        return await self._start(spec, folder, None)

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> Machine:
        _warn(spec)
        check_image(image, spec)
        return await self._start(spec, folder, image)

    async def attach(self, spec: MachineSpec, folder: Path) -> Machine:
        identity = Identity.load(folder)
        if not identity.init.is_alive():
            raise SandboxDiedError(f"the machine of sandbox {spec.id} has ended while nobody watched", FailReason.LOST)
        machine = LandlockMachine(spec, folder, identity)
        machine.start_joining()
        return machine

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        return await asyncio.to_thread(_sweep, label, keep)

    async def _start(self, spec: MachineSpec, folder: Path, image: Path | None) -> Machine:
        if self._is_privileged is None:
            self._is_privileged = await in_thread(in_own_thread, can_be_another_user)
        user = machine_user(spec.label, spec.id) if self._is_privileged else None
        home = await self._make_home(spec, folder, image, user)
        started: list[subprocess.Popen[bytes]] = []
        try:
            await in_thread(lambda: started.append(in_own_thread(_spawn, spec, folder, home, user)))
        finally:
            if started:
                agent = ProcessId.of(started[0].pid) or ProcessId(started[0].pid, 0)
                identity = Identity(agent, agent, boot_id())
                identity.save(folder, spec)
        machine = LandlockMachine(spec, folder, identity, started[0])
        machine.start_joining()
        return machine

    async def _make_home(self, spec: MachineSpec, folder: Path, image: Path | None, user: int | None) -> Path:
        """As root outside of the state directory, in which the guest's own user could not go."""
        home = folder / "upper"
        if user is not None:
            outside = Path(tempfile.mkdtemp(prefix=f"{_home_prefix(spec.label)}{spec.id}-"))
            outside.chmod(0o711)
            home.symlink_to(outside / "upper")
            home = outside / "upper"
        home.mkdir(mode=0o700)
        if image is not None:
            await files.copy_tree(image / "upper", home, link=False)
        for name in ("home", "tmp"):
            (home / name).mkdir(exist_ok=True)
        if user is not None:
            await files.give_to(user, home)
        return home


def _warn(spec: MachineSpec) -> None:
    log.warning("sandbox %s is isolated weakly, by Landlock alone: run nothing in it that you do not trust", spec.id)


def _spawn(spec: MachineSpec, folder: Path, home: Path, user: int | None) -> subprocess.Popen[bytes]:
    """Start the agent from a thread that has given up what the guest must not have."""
    architecture = this_architecture()
    if architecture is None:
        raise BackendUnavailableError("there is no table of system calls for this processor: use the backend gvisor")
    agent, pair = guest_binary(), fifos(folder)
    for path in (pair.to_guest, pair.from_guest):
        os.mkfifo(path, 0o600)
    with contextlib.ExitStack() as stack:
        streams = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in (pair.to_guest, pair.from_guest)]
        streams.append(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        for handle in streams:
            stack.callback(os.close, handle)
        if user is not None:
            agent = Path(shutil.copy(agent, home.parent / "agent"))
            agent.chmod(0o755)
        # All that needs files of the host is done before this thread gives them up.
        words = [str(agent), "--home", str(home / "home"), *_flags(spec, is_own_user=user is not None)]
        environment = _guest_environment(spec, home)
        program = seccomp.build_filter(architecture, _NO_FAMILIES, _SHARED_WITH_HOST)
        _give_up(home, agent, user, program)
        return subprocess.Popen(
            words,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
            cwd=home,
            env=environment,
        )


def _give_up(home: Path, agent: Path, user: int | None, program: bytes) -> None:
    """Take from this thread what the guest must not have."""
    if user is not None:
        linux.become(user)
    linux.no_new_privileges()
    readable = [Rule(Path(path), READ) for path in _READABLE]
    devices = [Rule(Path(path), READ | WRITE) for path in _DEVICES]
    restrict_thread([*readable, *devices, Rule(home, WRITE), Rule(agent, READ)])
    linux.load_filter(program)


def _guest_environment(spec: MachineSpec, home: Path) -> dict[str, str]:
    return {
        "PATH": SYSTEM_PATH,
        "HOME": str(home / "home"),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",  # git takes a file that it may not read for an error
        _MARK: f"{spec.label}/{spec.id}",
        **spec.template.env,
    }


def _flags(spec: MachineSpec, is_own_user: bool) -> list[str]:
    limits = spec.limits
    flags = ["--file-bytes", limits.disk_bytes, "--open-files", limits.open_files]
    if is_own_user:  # the kernel counts all processes of a user
        flags += ["--processes", limits.processes]
    if not hierarchies().has("memory"):
        flags += ["--memory-bytes", limits.memory_bytes]
    return [str(flag) for flag in flags]


class LandlockMachine(NamespaceMachine):
    """`init` is the agent. No namespace binds its processes together: they are its descendants, or bear its mark."""

    def _destroy(self) -> None:
        deadline = time.monotonic() + 10.0
        while pids := self._pids():
            with contextlib.suppress(TimeoutError):
                freeze.stop_tree(self.init)  # nothing new is started while all are killed
            for pid in self._pids() | pids:
                if process := ProcessId.of(pid):
                    process.kill()
            if self._cgroup.can_freeze:
                self._cgroup.thaw()
            if until_gone(pids, 1.0) and time.monotonic() > deadline:
                raise SandboxError(f"processes {sorted(pids)} of sandbox {self._spec.id} do not die: try again")
        if self._child is not None:
            self._child.wait(10.0)
        if self._cgroup:
            self._cgroup.remove()
        home = self._folder / "upper"
        if home.is_symlink():
            subprocess.run(["rm", "-rf", "--", str(home.resolve().parent)], check=False)

    def _pids(self) -> set[int]:
        mine = set(tree(self.init.pid)) if self.init.is_alive() else set()
        grouped = self._cgroup.processes() if self._cgroup else set()
        return {pid for pid in mine | grouped | _marked(f"{self._spec.label}/{self._spec.id}") if ProcessId.of(pid)}


def _marked(name: str) -> set[int]:
    """Processes that have the mark of this machine in their environment."""
    wanted = f"{_MARK}={name}".encode()
    return {pid for pid in all_pids() if wanted in _environment(pid)}


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _sweep(label: str, keep: set[str]) -> list[str]:
    found: dict[str, set[int]] = {}
    prefix = f"{_MARK}={label}/".encode()
    for pid in all_pids():
        for word in _environment(pid):
            machine_id = word.removeprefix(prefix).decode(errors="replace")
            if word.startswith(prefix) and machine_id not in keep:
                found.setdefault(machine_id, set()).add(pid)
    for pids in found.values():
        for pid in pids:
            if process := ProcessId.of(pid):
                process.kill()
        until_gone(pids, 5.0)
    said = [f"processes {sorted(pids)} of sandbox {machine_id}" for machine_id, pids in found.items()]
    for home in Path(tempfile.gettempdir()).glob(f"{_home_prefix(label)}*"):
        if home.name.removeprefix(_home_prefix(label)).rpartition("-")[0] not in keep:
            subprocess.run(["rm", "-rf", "--", str(home)], check=False)
            said.append(str(home))
    return said


def _home_prefix(label: str) -> str:
    return f"moonlet-{label}-"
