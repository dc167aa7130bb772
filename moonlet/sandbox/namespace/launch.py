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
from moonlet.sandbox.namespace import bwrap, files, host_etc, linux, seccomp
from moonlet.sandbox.namespace.bwrap import Bubblewrap, Overlay, View
from moonlet.sandbox.namespace.image import LIVE_NOTE, describe
from moonlet.sandbox.namespace.stage import Stage, machine_user
from moonlet.sandbox.namespace.syscalls import this_architecture
from moonlet.sandbox.processes import ProcessId, command_line, wait_ended

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

    def save(self, folder: Path, spec: MachineSpec) -> None:
        """With what makes the folder an image: files of a machine that has ended can be taken up from it."""
        with open(f"{folder}/{LIVE_NOTE}", "w") as file:
            json.dump({**describe(spec), **asdict(self)}, file)

    @staticmethod
    def load(folder: Path) -> Identity:
        """Raises SandboxDiedError if there is none, or one of an earlier boot."""
        try:
            record = json.loads((folder / LIVE_NOTE).read_text())
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
        identity.save(plan.folder, plan.spec)
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
    handed, kept = [], []
    try:
        handed.append(bwrap.in_memory(seccomp.build_filter(architecture)))
        for path in (pair.to_guest, pair.from_guest):
            kept.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        kept.append(os.open(plan.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        program, view = _build_view(plan, lambda handle: (handed.append(handle), handle)[1])
        spec = plan.spec
        words = bwrap.command_line(program, view, spec.hostname, _environment(spec), spec.limits, (handed[0], info))
        if plan.is_privileged:
            linux.become(machine_user(spec.label, spec.id))
        return subprocess.Popen(
            [*_overlay_first(plan), *words, *plan.flags],
            stdin=kept[0],
            stdout=kept[1],
            stderr=kept[2],
            pass_fds=(info, *handed),
            start_new_session=True,
            cwd="/",
            env={"PATH": SYSTEM_PATH},
        )
    finally:
        for handle in (*handed, *kept):
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


def _build_view(plan: Plan, opened: Callable[[int], int]) -> tuple[Path, View]:
    """The program to start and what the guest will see. `opened` notes a descriptor that is for bubblewrap.

    Root's files lie where the machine's user cannot go: then this thread gets a mount namespace in which it can.
    """
    spec, program, rootfs = plan.spec, plan.program, plan.spec.template.rootfs
    mark = bwrap.mark(spec.label, spec.id)
    if rootfs is not None:
        return _template_view(plan, rootfs, mark)
    agent, upper, etc, at = guest_binary(), plan.folder / "upper", plan.etc, program.path
    if plan.is_privileged:
        stage = Stage()
        agent, upper, etc, at = stage.bind(agent), stage.bind(upper), stage.bind(etc), stage.program(at)
    tops = host_dirs()
    return at, View(
        root=None,
        agent=agent,
        mark=mark,
        writable={target: upper / name for name, target in files.WRITABLE.items()},
        read_only={**{top.path: Path(top.path) for top in tops if not top.link_target}, "/etc": etc},
        links={"/var/tmp": "../tmp", **{top.path: top.link_target for top in tops if top.link_target}},
        texts={
            name: opened(bwrap.in_memory(text.encode())) for name, text in host_etc.own_files(spec.hostname).items()
        },
    )


def _template_view(plan: Plan, rootfs: Path, mark: str) -> tuple[Path, View]:
    if plan.is_privileged:
        stage = Stage()
        program, agent = stage.program(plan.program.path), stage.bind(guest_binary())
        return program, View(
            stage.overlay(rootfs, plan.folder, machine_user(plan.spec.label, plan.spec.id)), agent, mark
        )
    overlay = Overlay(rootfs, plan.folder / "upper", plan.folder / "work")
    return plan.program.path, View(overlay if plan.program.has_overlay else plan.merged, guest_binary(), mark)


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
