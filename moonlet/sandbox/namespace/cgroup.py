"""Control groups of one machine, where this user may make them: freezer, number of processes, memory, processor time.

    v1: <controller>/<own group>/moonlet/LABEL/ID      v2: <highest group that can be written>/moonlet/LABEL/ID

A group is joined after the machine has started: the kernel takes some milliseconds to move the first process, which
nobody needs to wait for. Whatever starts after that is in it; what started before is moved.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moonlet.sandbox.api import Limits

_FOLDER = "moonlet"
_CONTROLLERS = ("freezer", "pids", "memory", "cpu")
_PERIOD_US = 100_000


@dataclass(frozen=True)
class Hierarchies:
    """Folders in which groups can be made: by v1 controller, and of v2."""

    v1: dict[str, Path]
    v2: Path | None

    @property
    def can_freeze(self) -> bool:
        return "freezer" in self.v1 or self.v2 is not None

    def has(self, controller: str) -> bool:
        return controller in self.v1 or (self.v2 is not None and controller in _v2_controllers(self.v2))

    def parents(self) -> list[Path]:
        return [*dict.fromkeys(self.v1.values()), *([self.v2] if self.v2 else [])]


@cache
def hierarchies() -> Hierarchies:
    """What this process can write; empty where it is an ordinary user without delegation."""
    mounts = _mounts()
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, own = line.split(":", 2)
        if not names and "" in mounts:
            v2 = _delegated(mounts[""], own)
        for name in names.split(","):
            if name in _CONTROLLERS and name in mounts:
                at = mounts[name] / own.lstrip("/")
                if _can_make_groups(at):
                    v1[name] = at
    return Hierarchies(v1, v2)


def _mounts() -> dict[str, Path]:
    """Mount point by v1 controller; that of v2 under the empty name."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        point = Path(before.split(" ")[4].encode().decode("unicode_escape"))
        if kind == "cgroup2":
            found.setdefault("", point)
        elif kind == "cgroup":
            for name in _CONTROLLERS:
                if name in options.split(" ")[-1].split(","):
                    found.setdefault(name, point)
    return found


def _can_make_groups(at: Path) -> bool:
    return os.access(at, os.W_OK) and os.access(at / "cgroup.procs", os.W_OK)


def _delegated(root: Path, own: str) -> Path | None:
    """The highest group on the way to our own from which one can be written all the way down."""
    found, at = None, root / own.lstrip("/")
    while _can_make_groups(at):
        found = at
        if at == root:
            break
        at = at.parent
    return found


def _v2_controllers(at: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set((at / "cgroup.controllers").read_text().split())
    return set()


class Cgroup:
    """The groups of one machine. All methods are quick but `join` (some ms), `freeze` and `remove` (until it is done)."""

    def __init__(self, label: str, machine_id: str, found: Hierarchies | None = None) -> None:
        """`found` says where groups are made, if not where this process can."""
        found = found or hierarchies()
        self._v1 = {name: at / _FOLDER / label / machine_id for name, at in found.v1.items()}
        # v2 has a freezer in every group; its other controllers are used where v1 does not hold them.
        self._v2 = found.v2 / _FOLDER / label / machine_id if found.v2 and len(self._v1) < len(_CONTROLLERS) else None

    def __bool__(self) -> bool:
        return bool(self._v1) or self._v2 is not None

    @property
    def limits_memory(self) -> bool:
        return "memory" in self._v1 or (self._v2 is not None and "memory" in _v2_controllers(self._v2))

    def _folders(self) -> list[Path]:
        return [*dict.fromkeys(self._v1.values()), *([self._v2] if self._v2 else [])]

    def create(self, limits: Limits) -> None:
        """Make the groups and set their limits. Raises OSError."""
        for folder in self._folders():
            _make(folder)
        if self._v2:
            _enable(self._v2)
            _write(self._v2, "pids.max", limits.processes)
            _write(self._v2, "memory.max", limits.memory_bytes)
            _write(self._v2, "memory.swap.max", 0)
            _write(self._v2, "cpu.max", f"{int(limits.cpus * _PERIOD_US)} {_PERIOD_US}")
        if "pids" in self._v1:
            _write(self._v1["pids"], "pids.max", limits.processes)
        if "memory" in self._v1:
            _write(self._v1["memory"], "memory.limit_in_bytes", limits.memory_bytes)
            _write(self._v1["memory"], "memory.memsw.limit_in_bytes", limits.memory_bytes)
        if "cpu" in self._v1:
            _write(self._v1["cpu"], "cpu.cfs_period_us", _PERIOD_US)
            _write(self._v1["cpu"], "cpu.cfs_quota_us", int(limits.cpus * _PERIOD_US))

    def join(self, pid: int) -> None:
        """Move one process with all its threads."""
        for folder in self._folders():
            (folder / "cgroup.procs").write_text(str(pid))

    def processes(self) -> set[int]:
        """Those inside of all the groups."""
        sets = [_read_pids(folder / "cgroup.procs") for folder in self._folders()]
        return set.intersection(*sets) if sets else set()

    @property
    def can_freeze(self) -> bool:
        return "freezer" in self._v1 or self._v2 is not None

    def freeze(self, timeout_s: float = 10.0) -> None:
        """Stop all of it. Raises TimeoutError if a process does not reach a stop."""
        if "freezer" in self._v1:
            state = self._v1["freezer"] / "freezer.state"
            _poll(lambda: (state.write_text("FROZEN"), state.read_text().strip() == "FROZEN")[1], timeout_s)
        elif self._v2:
            (self._v2 / "cgroup.freeze").write_text("1")
            _poll(lambda: "frozen 1" in (self._v2 / "cgroup.events").read_text() if self._v2 else True, timeout_s)

    def thaw(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if "freezer" in self._v1:
                (self._v1["freezer"] / "freezer.state").write_text("THAWED")
            elif self._v2:
                (self._v2 / "cgroup.freeze").write_text("0")

    def num_oom_kills(self) -> int:
        if "memory" in self._v1:
            return _read_count(self._v1["memory"] / "memory.oom_control", "oom_kill")
        return _read_count(self._v2 / "memory.events", "oom_kill") if self._v2 else 0

    def remove(self, timeout_s: float = 5.0) -> None:
        """Remove the groups once their last process is gone, and those of the label if none is left. Raises OSError."""
        for folder in self._folders():
            remove_group(folder, timeout_s)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
                folder.parent.parent.rmdir()


def machine_groups(label: str) -> dict[str, list[Path]]:
    """Groups that exist under a label, by the machine's id."""
    found: dict[str, list[Path]] = {}
    for parent in hierarchies().parents():
        with contextlib.suppress(FileNotFoundError):
            for folder in (parent / _FOLDER / label).iterdir():
                if folder.is_dir():
                    found.setdefault(folder.name, []).append(folder)
    return found


def group_pids(folder: Path) -> set[int]:
    return _read_pids(folder / "cgroup.procs")


def remove_group(folder: Path, timeout_s: float = 5.0) -> None:
    """Remove one group; a process that was just killed may need a moment to leave it."""

    def is_removed() -> bool:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    try:
        _poll(is_removed, timeout_s)
    except TimeoutError:
        folder.rmdir()


def _make(folder: Path) -> None:
    for _ in range(100):  # the last machine of a label may just be removing what is above
        with contextlib.suppress(FileNotFoundError):
            return folder.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _enable(group: Path) -> None:
    """Hand the controllers down to a v2 group. Where the kernel refuses, the group only freezes."""
    for parent in (group.parent.parent.parent, group.parent.parent, group.parent):
        for controller in ("pids", "memory", "cpu"):
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def _write(folder: Path, name: str, value: object) -> None:
    path = folder / name
    if path.exists():
        path.write_text(str(value))


def _read_pids(path: Path) -> set[int]:
    try:
        return {int(line) for line in path.read_text().split()}
    except (FileNotFoundError, OSError):
        return set()


def _read_count(path: Path, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _poll(is_done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError("the control group did not change in time: a process hangs in the kernel")
        time.sleep(0.001)
