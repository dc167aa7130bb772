"""Blobs as files of a directory: they survive a restart, and several processes may share them.

    <root>/ab/abcdef...      a blob; the name is its key as hex, the folder the first two letters
    <root>/unfinished/...    blobs that are being written; each is renamed to its place when it is whole

Nothing is flushed to the device: after a power cut a blob may be shorter than it was, and its checksum tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moonlet.errors import StorageError
from moonlet.serve.state_store.tier import Tier

_UNFINISHED = "unfinished"
_STALE_S = 60.0  # a writer locks its file at once; one that is older than this and not locked has lost its writer
_SLACK = 8  # each process looks at what the others wrote after writing 1/8 of the limit itself
_KEPT = 15 / 16  # of the limit, after making room: so that room is made rarely


class DiskTier(Tier):
    """At most `max_bytes` of blobs; the least recently used, by the files' times, make room for others.

    With n processes in one directory it may exceed the limit by n/8 for a moment. Files are for the owner only.

    Raises:
        StorageError: the directory cannot be made or written.
    """

    def __init__(self, root: Path, max_bytes: int, *, name: str = "disk") -> None:
        self.name = name
        self.max_blob_bytes = max_bytes
        self.root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self._make_folder(_UNFINISHED)
            self._num_bytes = sum(size for _, size, _ in self._scan())
            self._written_bytes = 0
            self._sweep()
        except OSError as error:
            raise StorageError(
                f"cannot keep model states in '{root}': {error}; name a directory to write in"
            ) from error

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        found = {}
        for key in keys:
            if time.monotonic() >= until:
                break
            with contextlib.suppress(FileNotFoundError):
                found[key] = self._path(key).read_bytes()
                os.utime(self._path(key))
        return found

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        for key, blob in blobs.items():
            path = self._path(key)
            is_overdue = self._written_bytes > self._max_bytes // _SLACK
            if is_overdue or self._num_bytes + len(blob) > self._max_bytes:
                self._make_room(path, len(blob))
            grown = self._write_one(path, blob)
            with self._lock:
                self._num_bytes += grown
                self._written_bytes += len(blob)

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        return {key for key in keys if self._path(key).is_file()}

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        for key in keys:
            self._unlink(self._path(key))

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        found = {}
        for key in keys:
            with contextlib.suppress(FileNotFoundError), open(self._path(key), "rb") as file:
                found[key] = file.read(num_bytes)
                os.utime(file.fileno())
        return found

    def held_bytes(self) -> int:
        return self._num_bytes

    def _path(self, key: bytes) -> Path:
        text = key.hex()
        return self.root / text[:2] / text

    def _make_folder(self, name: str) -> None:
        """A folder of the root, for the owner only, as the root is; one that is there stays as it is."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / name).mkdir(mode=0o700, exist_ok=True)

    def _write_one(self, path: Path, blob: bytes) -> int:
        """Write a blob; by how many bytes the directory grew."""
        unfinished = self.root / _UNFINISHED / secrets.token_hex(16)
        for folder in (path.parent, unfinished.parent):
            self._make_folder(folder.name)
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "wb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                view = memoryview(blob)
                while view:
                    view = view[file.write(view) :]
                old_size = _size(path)
                os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return len(blob) - old_size

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Count what is there by now, whoever wrote it, and remove the oldest until a blob of this size fits at `path`."""
        others = sorted(file for file in self._scan() if file[2] != path)
        total = sum(size for _, size, _ in others)
        if total + num_bytes > self._max_bytes:
            for _, size, other in others:
                self._evict(other)
                total -= size
                if total + num_bytes <= self._max_bytes * _KEPT:
                    break
        with self._lock:
            self._num_bytes, self._written_bytes = total + _size(path), 0
        self._sweep()

    def _evict(self, path: Path) -> None:
        if self.on_evict is not None:
            with contextlib.suppress(FileNotFoundError):
                self.on_evict(bytes.fromhex(path.name), path.read_bytes())
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            self.evictions += 1

    def _unlink(self, path: Path) -> None:
        size = _size(path)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            with self._lock:
                self._num_bytes -= size

    def _scan(self) -> Iterator[tuple[int, int, Path]]:
        """Time, size and path of every blob."""
        for folder in os.scandir(self.root):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):  # another process removes it in this moment
                    stat = entry.stat(follow_symlinks=False)
                    yield stat.st_mtime_ns, stat.st_size, Path(entry.path)

    def _sweep(self) -> None:
        """Remove what writers that died in the middle left."""
        for entry in os.scandir(self.root / _UNFINISHED):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if time.time() - entry.stat().st_mtime > _STALE_S:
                    with open(entry.path, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
