"""How a machine comes to life: fifos, bubblewrap in a thread of its own, the pids that it reports.

live/to_guest, live/from_guest   stdin and stdout of the agent        live/machine.log   what bubblewrap and the agent say
live/machine.json                who the processes are
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from moonlet.errors import BackendUnavailableError, SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.api import GUEST_HOME, FailReason
from moonlet.sandbox.backend import MachineSpec
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.guest.stream import FifoPair
from moonlet.sandbox.hostview import host_dirs
from moonlet.sandbox.namespace import bwrap, host_etc, linux, seccomp
from moonlet.sandbox.namespace.bwrap import Bubblewrap, Overlay, View
from moonlet.sandbox.namespace.processes import ProcessId, command_line, wait_ended
from moonlet.sandbox.namespace.stage import Stage, machine_user
from moonlet.sandbox.namespace.syscalls import this_architecture

START_TIMEOUT_S = 30.0
LOG = "machine.log"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Identity:
    """A machine's processes: `init` is the agent, `monitor` bubblewrap's outer process. `boot` is the boot that they are of."""

    init: ProcessId
    monitor: ProcessId
    boot: str

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self))
        unfinished = folder / "machine.json.tmp"
        unfinished.write_text(text)
        os.rename(unfinished, folder / "machine.json")

    @staticmethod
    def load(folder: Path) -> Identity:
        """Raises SandboxDiedError if there is none, or one of an earlier boot."""
        try:
            record = json.loads((folder / "machine.json").read_text())
        except (FileNotFoundError, ValueError) as error:
            raise SandboxDiedError(f"no machine was started in {folder}", FailReason.LOST) from error
        if record["boot"] != boot_id():
            raise SandboxDiedError(f"the machine in {folder} ended when this host was restarted", FailReason.LOST)
        return Identity(ProcessId(**record["init"]), ProcessId(**record["monitor"]), record["boot"])


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def fifos(folder: Path) -> FifoPair:
    return FifoPair(folder / "to_guest", folder / "from_guest")


@dataclass(frozen=True)
class Plan:
    """All that a launch needs. `etc` is the shared `/etc` of the template `host`; `flags` are the agent's."""

    spec: MachineSpec
    folder: Path
    program: Bubblewrap
    etc: Path
    is_privileged: bool
    flags: tuple[str, ...]

    @property
    def mounts_itself(self) -> bool:
        """Whether bubblewrap makes the overlay of a template; otherwise it is made for it."""
        return self.program.has_overlay and not self.is_privileged

    @property
    def merged(self) -> Path:
        """Where an overlay lies that an old bubblewrap could not make."""
        return self.folder / "merged"


def in_own_thread(work: Callable[..., _Result], *args: Any) -> _Result:
    """Run `work` in a thread that ends with it, since what it does to itself (user, mounts) cannot be undone. Blocks."""
    outcome: list[_Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(*args))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="moonlet-launch")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


@dataclass
class Started:
    """`child` is there only in the process that started the machine, which must reap it."""

    identity: Identity
    child: subprocess.Popen[bytes]


def start(plan: Plan) -> Started:
    """Start bubblewrap and wait until it has become the agent. Blocks; leaves no process on an error."""
    pair = fifos(plan.folder)
    for path in (pair.to_guest, pair.from_guest):
        os.mkfifo(path, 0o600)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    child: subprocess.Popen[bytes] | None = None
    try:
        child = in_own_thread(_spawn, plan, pair, write_end)
        os.close(write_end)
        write_end = -1
        init = _reported_child(read_end, child, plan.folder)
        identity = Identity(init, ProcessId.of(child.pid) or ProcessId(child.pid, 0), boot_id())
        identity.save(plan.folder)
        _await_agent(init, child, plan)
        return Started(identity, child)
    except BaseException:
        if child is not None:
            _abandon(child, plan)
        raise
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def _spawn(plan: Plan, pair: FifoPair, info: int) -> subprocess.Popen[bytes]:
    architecture = this_architecture()
    if architecture is None:
        raise BackendUnavailableError("there is no table of system calls for this processor: use the backend gvisor")
    handles: list[int] = []

    def opened(handle: int) -> int:
        handles.append(handle)
        return handle

    try:
        program_filter = opened(bwrap.in_memory(seccomp.build_filter(architecture)))
        own = host_etc.own_files(plan.spec.hostname) if plan.spec.template.rootfs is None else {}
        texts = {name: opened(bwrap.in_memory(text.encode())) for name, text in own.items()}
        stdin, stdout = (opened(os.open(path, os.O_RDWR | os.O_CLOEXEC)) for path in (pair.to_guest, pair.from_guest))
        log = opened(os.open(plan.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        program, view = _build_view(plan, texts)
        spec = plan.spec
        words = bwrap.command_line(
            program, view, spec.hostname, _environment(spec), spec.limits, (program_filter, info)
        )
        if plan.is_privileged:
            linux.become(machine_user(spec.label, spec.id))
        return subprocess.Popen(
            [*_overlay_first(plan), *words, *plan.flags],
            stdin=stdin,
            stdout=stdout,
            stderr=log,
            pass_fds=(program_filter, info, *texts.values()),
            start_new_session=True,
            cwd="/",
            env={"PATH": SYSTEM_PATH},
        )
    finally:
        for handle in handles:
            os.close(handle)


def _overlay_first(plan: Plan) -> list[str]:
    """What makes the overlay before an old bubblewrap starts, for an ordinary user: in a user namespace around both."""
    rootfs = plan.spec.template.rootfs
    if rootfs is None or plan.is_privileged or plan.program.has_overlay:
        return []
    plan.merged.mkdir()
    options = f"lowerdir={rootfs},upperdir={plan.folder}/upper,workdir={plan.folder}/work"
    if len(options.split(",")) != 3 or options.count(":") or "\\" in options:
        raise SandboxError(
            f"an overlay cannot lie at {plan.folder}: choose a path without commas, colons and backslashes"
        )
    script = 'mount -t overlay -o "$1,userxattr" overlay "$2" && shift 2 && exec "$@"'
    outer = ["unshare", "--user", "--map-root-user", "--mount", "--", "/bin/sh", "-c", script, "sh"]
    return [*outer, options, str(plan.merged)]


def _environment(spec: MachineSpec) -> dict[str, str]:
    # Root without capabilities cannot give files away, which tar would try.
    own = {"PATH": SYSTEM_PATH, "HOME": GUEST_HOME, "LANG": "C.UTF-8", "TAR_OPTIONS": "--no-same-owner"}
    return {**own, **spec.template.env}


def _build_view(plan: Plan, texts: dict[str, int]) -> tuple[Path, View]:
    """The program to start and what the guest will see; as root after a private mount namespace was made for it."""
    spec, upper, agent = plan.spec, plan.folder / "upper", guest_binary()
    program, rootfs = plan.program.path, spec.template.rootfs
    etc, root = plan.etc, upper if rootfs is None else Overlay(rootfs, upper, plan.folder / "work")
    if isinstance(root, Overlay) and not plan.mounts_itself:
        root = plan.merged
    if plan.is_privileged:
        stage = Stage()
        program, agent = stage.program(program), stage.file(agent, "agent")
        if rootfs is None:
            root, etc = stage.folder(upper, "root"), stage.folder(etc, "etc")
        else:
            root = stage.overlay(rootfs, plan.folder, machine_user(spec.label, spec.id))
    binds = _host_binds(etc) if rootfs is None else ()
    return program, View(root, binds, agent, bwrap.mark(spec.label, spec.id), texts)


def _host_binds(etc: Path) -> tuple[tuple[Path, str], ...]:
    return (*((Path(top.path), top.path) for top in host_dirs() if not top.link_target), (etc, "/etc"))


def _reported_child(read_end: int, child: subprocess.Popen[bytes], folder: Path) -> ProcessId:
    """The host's pid of the guest's first process, as bubblewrap says it."""
    text, deadline = b"", time.monotonic() + START_TIMEOUT_S
    while b"}" not in text:
        if not select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise SandboxTimeoutError(f"bubblewrap did not start within {START_TIMEOUT_S:g} s: {last_words(folder)}")
        part = os.read(read_end, 4096)
        if not part:
            child.wait()
            raise SandboxError(f"bubblewrap could not start a machine: {last_words(folder)}")
        text += part
    process = ProcessId.of(json.loads(text)["child-pid"])
    if process is None:
        raise SandboxError(f"bubblewrap ended at once: {last_words(folder)}")
    return process


def _await_agent(init: ProcessId, child: subprocess.Popen[bytes], plan: Plan) -> None:
    """Wait until the first process runs the agent: all mounts are made, the filter is loaded."""
    name, deadline = bwrap.mark(plan.spec.label, plan.spec.id), time.monotonic() + START_TIMEOUT_S
    while (words := command_line(init.pid))[:1] != [name]:
        if not words and not init.is_alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            raise SandboxError(f"bubblewrap could not set up a machine: {last_words(plan.folder)}")
        if time.monotonic() > deadline:
            raise SandboxTimeoutError(
                f"the machine was not set up within {START_TIMEOUT_S:g} s: {last_words(plan.folder)}"
            )
        time.sleep(0.0003)


def _abandon(child: subprocess.Popen[bytes], plan: Plan) -> None:
    """Kill what a failed start has left."""
    with contextlib.suppress(SandboxDiedError):
        init = Identity.load(plan.folder).init
        if init.kill():
            wait_ended(init, 5.0)
    child.kill()
    child.wait()


def last_words(folder: Path) -> str:
    """The end of what bubblewrap or the agent wrote to its log."""
    with contextlib.suppress(OSError):
        text = (folder / LOG).read_bytes()[-2000:].decode(errors="replace").strip()
        if text:
            return text
    return "it said nothing"
