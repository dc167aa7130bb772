"""A folder as a list of entries that can be written down, and the way back: modes, owners, links, holes, overlay marks.

What a guest may have made is kept: names that are not UTF-8, hard links, pipes and sockets, and the marks by which an
overlay file system remembers what was deleted (character devices 0:0 and extended attributes).
"""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonlet.errors import SnapshotError

PAGE_BYTES = 4096  # unit in which holes are kept
_KEPT_ATTRIBUTES = ("user.", "trusted.overlay.")
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "whiteout",
}


@dataclass(frozen=True)
class Extent:
    """`length` bytes of a file from `offset` on are those of the blob `chunk` from `at` on."""

    offset: int
    length: int
    chunk: str
    at: int


@dataclass
class Entry:
    """One name below the folder. `path` is relative to it, parents come before children; 'link' is a further hard link."""

    path: str
    kind: str
    mode: int = 0
    owner: int = 0
    group: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: str = ""  # of a symbolic link; of a hard link the path of the first name
    attributes: dict[str, str] = field(default_factory=dict)  # values in base64
    extents: list[Extent] = field(default_factory=list)  # what lies between them is a hole

    def as_json(self) -> dict[str, Any]:
        """Fields that say something."""
        record = {name: value for name, value in vars(self).items() if value not in ("", 0, {}, [])}
        if self.extents:
            record["extents"] = [[e.offset, e.length, e.chunk, e.at] for e in self.extents]
        return record

    @staticmethod
    def from_json(record: dict[str, Any]) -> Entry:
        return Entry(**{**record, "extents": [Extent(*extent) for extent in record.get("extents", ())]})


def scan_tree(folder: Path) -> list[Entry]:
    """All that is below `folder`, without contents. Raises SnapshotError for what cannot be kept (other devices)."""
    first_names: dict[tuple[int, int], str] = {}
    entries: list[Entry] = []
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(folder / parent) as listing:
                found = sorted(listing, key=lambda item: item.name)
        except OSError as error:
            raise SnapshotError(f"cannot read {folder / parent}: {error.strerror}") from error
        for item in found:
            entry = _scan(folder, f"{parent}/{item.name}".lstrip("/"), item.stat(follow_symlinks=False), first_names)
            entries.append(entry)
            if entry.kind == "dir":
                pending.append(entry.path)
    return entries


def _scan(folder: Path, path: str, status: os.stat_result, first_names: dict[tuple[int, int], str]) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None or (kind == "whiteout" and status.st_rdev != 0):
        raise SnapshotError(f"{folder / path} is a device, which a snapshot cannot hold: remove it in the sandbox")
    entry = Entry(path, kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)
    if kind == "symlink":
        entry.target = os.readlink(folder / path)
    elif kind == "file":
        first = first_names.setdefault((status.st_dev, status.st_ino), path) if status.st_nlink > 1 else path
        if first != path:
            return Entry(path, "link", target=first)
        entry.size = status.st_size
    if kind in ("file", "dir"):
        entry.attributes = _read_attributes(folder / path)
    return entry


def _read_attributes(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):  # a file system without extended attributes
        return {
            name: base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode()
            for name in os.listxattr(path, follow_symlinks=False)
            if name.startswith(_KEPT_ATTRIBUTES)
        }
    return {}


def data_ranges(path: Path, size: int, step: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the pieces of a file, cut at multiples of `step`, that are not wholly in a hole."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        offset = 0
        while offset < size:
            try:
                offset = os.lseek(handle, offset, os.SEEK_DATA) // step * step
            except OSError:  # ENXIO: only a hole is left
                return
            yield offset, min(step, size - offset)
            offset += step
    finally:
        os.close(handle)


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Exactly `length` bytes of a regular file. Raises SnapshotError if it has become shorter."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts, missing = [], length
        while missing and (part := os.pread(handle, missing, offset + length - missing)):
            parts.append(part)
            missing -= len(part)
    finally:
        os.close(handle)
    if missing:
        raise SnapshotError(f"{path} became shorter while it was read: a snapshot must not change while it is stored")
    return b"".join(parts)


def check_tree(entries: Iterable[Entry]) -> None:
    """Refuse entries that could reach outside of the folder that they are put into. Raises SnapshotError."""
    folders, files = {""}, set()
    for entry in entries:
        parent, slash, name = entry.path.rpartition("/")
        if (
            bool(parent) != bool(slash)
            or parent not in folders
            or name in ("", ".", "..")
            or "\0" in entry.path
            or entry.kind not in _MAKERS
        ):
            raise SnapshotError(f"the snapshot has an entry that must not be: {entry.kind} {entry.path!r}")
        if entry.path in folders or entry.path in files:
            raise SnapshotError(f"the snapshot has two entries {entry.path!r}")
        if entry.kind == "link" and entry.target not in files:
            raise SnapshotError(f"the snapshot's link {entry.path!r} leads to {entry.target!r}, which is no file of it")
        if any(not name.startswith(_KEPT_ATTRIBUTES) for name in entry.attributes):
            raise SnapshotError(
                f"the snapshot's {entry.path!r} has attributes that must not be: {list(entry.attributes)}"
            )
        _check_extents(entry)
        if entry.kind == "dir":
            folders.add(entry.path)
        elif entry.kind == "file":
            files.add(entry.path)


def _check_extents(entry: Entry) -> None:
    end = 0
    for extent in entry.extents:
        if extent.offset < end or extent.length <= 0 or extent.at < 0 or extent.offset + extent.length > entry.size:
            raise SnapshotError(f"the snapshot's pieces of {entry.path!r} do not fit together")
        end = extent.offset + extent.length


def make_tree(folder: Path, entries: Iterable[Entry]) -> None:
    """Make all that `check_tree` has let pass below the empty `folder`: files have their size and no contents yet."""
    for entry in entries:
        _MAKERS[entry.kind](folder, entry)


def _make_file(folder: Path, entry: Entry) -> None:
    handle = os.open(folder / entry.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(handle, entry.size)
    finally:
        os.close(handle)


_MAKERS = {
    "file": _make_file,
    "dir": lambda folder, entry: os.mkdir(folder / entry.path, 0o700),
    "symlink": lambda folder, entry: os.symlink(entry.target, folder / entry.path),
    "link": lambda folder, entry: os.link(folder / entry.target, folder / entry.path, follow_symlinks=False),
    "fifo": lambda folder, entry: os.mkfifo(folder / entry.path, 0o600),
    "socket": lambda folder, entry: os.mknod(folder / entry.path, stat.S_IFSOCK | 0o600),
    "whiteout": lambda folder, entry: os.mknod(folder / entry.path, stat.S_IFCHR | 0o600, 0),
}


def write_range(path: Path, offset: int, data: bytes) -> None:
    """Write into a file of `make_tree`; pages of zeros stay holes."""
    zeros = bytes(PAGE_BYTES)
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        start = 0
        for at in range(0, len(data), PAGE_BYTES):
            page = data[at : at + PAGE_BYTES]
            if page == zeros[: len(page)]:
                _write_all(handle, data[start:at], offset + start)
                start = at + PAGE_BYTES
        _write_all(handle, data[start:], offset + start)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def finish_tree(folder: Path, entries: list[Entry]) -> None:
    """Owners (as root), attributes, modes and times, children before parents so that folders stay writable till then."""
    is_root = os.geteuid() == 0
    for entry in reversed(entries):
        if entry.kind == "link":
            continue
        path = folder / entry.path
        if is_root:
            os.chown(path, entry.owner, entry.group, follow_symlinks=False)
        for name, value in entry.attributes.items():
            _set_attribute(path, name, base64.b64decode(value))
        if entry.kind != "symlink":
            os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)


def _set_attribute(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as error:
        raise SnapshotError(
            f"cannot set the attribute {name} of {path}: {error.strerror}; without it deleted files would come back. "
            "Use a file system with extended attributes, and for snapshots of a service of root one that runs as root"
        ) from error
