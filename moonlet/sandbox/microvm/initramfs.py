"""The first file system of a guest: the agent as /init, and the modules that it loads before it mounts the disk.

Written here in the kernel's "newc" cpio format: no tool and no root needed, and the same input gives the same bytes.
It is not compressed: under emulation unpacking would take longer than reading.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

FOLDERS = ("dev", "proc", "sys", "root", "modules")
MODULE_LIST = "modules.list"  # file names below /modules, one a line, in the order of loading
CONSOLE = os.makedev(5, 1)
_TRAILER = "TRAILER!!!"


def write_initramfs(path: Path, agent: bytes, modules: Sequence[tuple[str, bytes]]) -> None:
    """Write the archive to `path`, put in place by one rename."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(initramfs_bytes(agent, modules))
    os.replace(unfinished, path)


def initramfs_bytes(agent: bytes, modules: Sequence[tuple[str, bytes]]) -> bytes:
    """The archive: `modules` are (name, contents) in the order of loading."""
    archive = Archive()
    for name in FOLDERS:
        archive.add(name, stat.S_IFDIR | 0o755)
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=CONSOLE)
    archive.add("init", stat.S_IFREG | 0o755, agent)
    for name, data in modules:
        archive.add(f"modules/{name}.ko", stat.S_IFREG | 0o644, data)
    listing = "".join(f"{name}.ko\n" for name, _ in modules)
    archive.add(MODULE_LIST, stat.S_IFREG | 0o644, listing.encode())
    return archive.close()


class Archive:
    """A cpio archive in memory. All belongs to root and nothing has a date."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def add(self, name: str, mode: int, data: bytes = b"", device: int = 0) -> None:
        self._count += 1
        encoded = os.fsencode(name) + b"\0"
        num_links = 2 if stat.S_ISDIR(mode) else 1
        # inode, mode, owner, group, links, date, size, device of the file system, device, length of the name, checksum
        numbers = (self._count, mode, 0, 0, num_links, 0, len(data), 0, 0, os.major(device), os.minor(device))
        header = b"070701" + b"".join(b"%08X" % number for number in (*numbers, len(encoded), 0))
        self._parts.append(_padded(header + encoded) + _padded(data))

    def close(self) -> bytes:
        self.add(_TRAILER, 0)
        return b"".join(self._parts)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
