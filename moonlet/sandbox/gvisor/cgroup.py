"""Control groups that runsc makes for a container: found by path, asked for kills by the memory limit, removed.

Works on the first and the second version of cgroups and on a mixture: a container has one directory per hierarchy.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_TOP = "moonlet-gvisor"  # not the folder in which other backends look for their own
_REMOVE_S = 5.0


def cgroups_path(label: str, container: str) -> str:
    """Path of a container below the root of every hierarchy, as `linux.cgroupsPath` takes it."""
    return f"/{_TOP}/{label}/{container}"


def find_cgroups(label: str, container: str | None = None) -> list[Path]:
    """Directories of one container or of all of a label."""
    pattern = container or "*"
    return [*_ROOT.glob(f"{_TOP}/{label}/{pattern}/"), *_ROOT.glob(f"*/{_TOP}/{label}/{pattern}/")]


def count_oom_kills(label: str, container: str) -> int:
    """How many processes of the container the kernel killed because of its memory limit."""
    kills = 0
    for folder in find_cgroups(label, container):
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                counts = re.findall(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE)
                kills += sum(map(int, counts))
    return kills


def memory_bytes(label: str, container: str) -> int | None:
    """Memory that only this container can give back: its Sentry's and its guest's; None if it has no group of its own."""
    for folder in find_cgroups(label, container):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            for names in (("total_rss", "total_shmem"), ("anon", "shmem")):
                if names[0] in counts:
                    return sum(int(counts.get(name, 0)) for name in names)
    return None


def remove_cgroups(label: str, container: str | None = None) -> list[str]:
    """End what is left in the groups of a container (of all of a label) and remove them; returns their paths.

    The last processes of a Sentry take some milliseconds to go; a group that is busy after 5 s stays.
    """
    removed = []
    deadline = time.monotonic() + _REMOVE_S
    for folder in find_cgroups(label, container):
        while folder.exists():
            try:
                folder.rmdir()
                removed.append(str(folder))
            except OSError:
                if time.monotonic() > deadline:
                    break
                _kill_members(folder)
                time.sleep(0.005)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # the label's, once its last container is gone
            folder.parent.parent.rmdir()
    return removed


def _kill_members(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
