"""A real backend without isolation: the guest agent as a plain process, its home a folder, saved by copying it.

`caps` are what the test chooses. `faults` maps a step ("launch", "save", ...) to an exception that is raised there once, or
to a coroutine function that is awaited there. A saved machine keeps the files of its home, not its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from moonlet.errors import SandboxDiedError
from moonlet.sandbox.api import Caps, FailReason, Limits
from moonlet.sandbox.backend import Backend, Machine, MachineSpec, Probe, Progress, Template, Usage
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.guest.stream import FifoPair
from moonlet.sandbox.state_dir import Owner

Fault = BaseException | Callable[[], Awaitable[None]]


def scripted_caps(*, frees_memory: bool = True, fork_processes: bool = False) -> Caps:
    return Caps(
        processes_survive_pause=not frees_memory,
        frees_memory=frees_memory,
        fork_processes=fork_processes,
        isolation="weak",
        network=False,
    )


class ScriptedBackend(Backend):
    name = "scripted"
    strength = 1

    def __init__(self, *, frees_memory: bool = True, version: str = "1", agent: tuple[str, ...] = ()) -> None:
        """`agent` is a program to take in place of the real one."""
        self.agent = agent
        self.caps: Caps | None = scripted_caps(frees_memory=frees_memory)
        self.version = version
        self.faults: dict[str, Fault] = {}
        self.steps: list[str] = []
        self.usage = Usage(memory_bytes=1 << 20, disk_bytes=1 << 10)

    async def step(self, name: str) -> None:
        """Called at each step: notes it, and does what the test wants to happen there."""
        self.steps.append(name)
        fault = self.faults.pop(name, None)
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            await fault()

    async def probe(self) -> Probe:
        return Probe(self.name, self.caps, "" if self.caps else "the test says so", self.version)

    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        await self.step("prepare")

    async def launch(self, spec: MachineSpec, folder: Path) -> ScriptedMachine:
        await self.step("launch")
        (folder / "home").mkdir()
        return await self._start(spec, folder, "launched")

    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> ScriptedMachine:
        await self.step("restore")
        shutil.copytree(image / "home", folder / "home", symlinks=True)
        return await self._start(spec, folder, "restored")

    async def attach(self, spec: MachineSpec, folder: Path) -> ScriptedMachine:
        await self.step("attach")
        machine = ScriptedMachine(self, folder)
        if not machine.is_alive:
            raise SandboxDiedError(f"no process of {spec.id}")
        return machine

    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        await self.step("sweep")
        found: list[str] = []
        while left := [(pid, identity) for pid, identity in _labelled(label) if identity not in keep]:
            found += [f"process {pid} of {identity}" for pid, identity in left if not found]
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)
            _reap()
        return found

    async def _start(self, spec: MachineSpec, folder: Path, last_step: str) -> ScriptedMachine:
        for name in ("to_guest", "from_guest"):
            os.mkfifo(folder / name)
        ends = [os.open(folder / name, os.O_RDWR) for name in ("to_guest", "from_guest")]
        command = [*(self.agent or (str(guest_binary()),)), "--home", str(folder / "home"), "--processes", "4000"]
        with (folder / "console.log").open("wb") as console:
            process = subprocess.Popen(
                command,
                stdin=ends[0],
                stdout=ends[1],
                stderr=console,
                start_new_session=True,
                env={
                    "MOONLET_LABEL": spec.label,
                    "MOONLET_ID": spec.id,
                    "MOONLET_FOLDER": str(folder),
                    "PATH": os.environ["PATH"],
                },
            )
        for end in ends:
            os.close(end)
        owner = Owner.of(process.pid) or Owner(process.pid, 0)
        (folder / "process.json").write_text(json.dumps([owner.pid, owner.start]))
        machine = ScriptedMachine(self, folder)
        try:
            await self.step(last_step)
        except BaseException:
            await machine.destroy()
            raise
        return machine


class ScriptedMachine(Machine):
    def __init__(self, backend: ScriptedBackend, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.owner: Owner | None = None
        with contextlib.suppress(OSError, ValueError):
            self.owner = Owner(*json.loads((folder / "process.json").read_text()))

    @property
    def is_alive(self) -> bool:
        return self.owner is not None and self.owner.is_alive

    def endpoint(self) -> FifoPair:
        return FifoPair(self.folder / "to_guest", self.folder / "from_guest")

    def _signal_all(self, number: int) -> None:
        assert self.owner is not None
        for pid in _tree(self.owner.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def freeze(self) -> None:
        await self.backend.step("freeze")
        self._require_alive()
        self._signal_all(signal.SIGSTOP)

    async def thaw(self) -> None:
        await self.backend.step("thaw")
        self._require_alive()
        self._signal_all(signal.SIGCONT)

    def _require_alive(self) -> None:
        if not self.is_alive:
            raise SandboxDiedError("the process is gone")

    async def save(self, image: Path, *, is_final: bool) -> None:
        await self.backend.step("save")
        self._require_alive()
        self._signal_all(signal.SIGSTOP)
        try:
            shutil.copytree(self.folder / "home", image / "home", symlinks=True)
            await self.backend.step("saved")
        except BaseException:
            self._signal_all(signal.SIGCONT)
            raise
        if not is_final:
            self._signal_all(signal.SIGCONT)

    async def destroy(self) -> None:
        await self.backend.step("destroy")
        if self.is_alive:
            self._signal_all(signal.SIGKILL)
        identity = self.folder.parent.name
        while left := [pid for pid, name in _labelled(None) if name == identity]:  # what was forked meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap()
            await asyncio.sleep(0.002)
        _reap()

    async def wait_dead(self) -> FailReason:
        while self.is_alive:
            _reap()
            await asyncio.sleep(0.02)
        return FailReason.CRASH

    def usage(self) -> Usage:
        return self.backend.usage if self.is_alive else Usage()

    def kill(self) -> None:
        """As if it crashed."""
        self._signal_all(signal.SIGKILL)


def _reap() -> None:
    subprocess._cleanup()  # type: ignore[attr-defined]  # waits for ended children of this process, if they are its own


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, at = [pid], 0
    while at < len(found):
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{found[at]}/task"):
                found += map(int, Path(f"/proc/{found[at]}/task/{task}/children").read_text().split())
        at += 1
    return found


def _labelled(label: str | None) -> list[tuple[int, str]]:
    """Agents of this label (None: any) and their commands, which inherit it: (pid, sandbox)."""
    return [(pid, env["MOONLET_ID"]) for pid, env in _agents() if label in (None, env.get("MOONLET_LABEL"))]


def labelled_below(folder: Path) -> list[int]:
    """The processes of all machines below a folder."""
    return [pid for pid, env in _agents() if Path(env.get("MOONLET_FOLDER", "/")).is_relative_to(folder)]


def _agents() -> Iterator[tuple[int, dict[str, str]]]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{name}/environ").read_text(errors="replace")
            env = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
            if "MOONLET_ID" in env and Owner.of(int(name)):
                yield int(name), env


def living(label: str) -> list[str]:
    """Sandboxes of which a process is alive."""
    return sorted({identity for _, identity in _labelled(label)})
