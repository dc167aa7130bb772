"""Templates that have booted: a machine saved when its agent was ready, from which all others start.

Kept in the cache under a digest of all that it is made of; what was not used for the longest time goes first. Machines and
saved machines hold hard links of its files, so that it may go at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import Progress, Template
from moonlet.sandbox.generations import check_space, flush_folder, folder_bytes, in_thread, remake_folder, remove_tree
from moonlet.sandbox.microvm.hostfiles import HostFiles
from moonlet.sandbox.microvm.image import make_disk
from moonlet.sandbox.microvm.saved import FACTS, FORMAT

MIN_RAM_MIB = 160
CACHE_BYTES = 4 << 30
RESERVE_BYTES = 256 << 20


class Booter(ABC):
    """How the machines of one backend come to life. `kept` are the names of files in a template's folder that stay."""

    kept: ClassVar[frozenset[str]]

    @abstractmethod
    def made_of(self, limits: Limits) -> list[object]:
        """All that a template is made of besides its files; as JSON it goes into the template's key."""

    @abstractmethod
    async def boot(self, limits: Limits, folder: Path, progress: Progress) -> None:
        """Boot from `disk-0` in `folder`, warm up, and leave a saved machine there."""


class Templates:
    """The booted templates of one cache folder."""

    def __init__(self, cache: Path, booter: Booter) -> None:
        self._cache, self._booter = cache, booter
        self._folder = cache / "templates"
        self._known: dict[tuple[str, Limits], Path] = {}
        self._host: HostFiles | None = None

    async def prepare(self, template: Template, limits: Limits, progress: Progress | None = None) -> None:
        """Boot the template if no saved machine of it is there."""
        async with self.held(template, limits, progress):
            pass

    @asynccontextmanager
    async def held(self, template: Template, limits: Limits, progress: Progress | None = None) -> AsyncIterator[Path]:
        """The folder of a saved machine, booted first if there is none, that nobody removes inside the block.

        Safe if several processes do it.
        """
        known = self._known.get((template.id, limits))
        if known is None:
            known = self._folder / await in_thread(self._key, template, limits)
            self._known[template.id, limits] = known
        lock = self._lock(known)
        while True:
            async with _locked(lock, fcntl.LOCK_SH):
                if (known / FACTS).exists():
                    os.utime(known)
                    yield known
                    return
            async with _locked(lock, fcntl.LOCK_EX):
                if not (known / FACTS).exists():
                    await self._make(template, limits, known, progress or (lambda what, share: None))
            await in_thread(self._evict, known)

    async def discard(self, template: Template, limits: Limits) -> None:
        """Remove a saved machine, so that the next start boots the template again."""
        folder = self._known.get((template.id, limits))
        if folder is not None:
            async with _locked(self._lock(folder), fcntl.LOCK_EX):
                await in_thread(remove_tree, folder)

    def _lock(self, folder: Path) -> Path:
        return self._cache / f"{folder.name}.lock"

    def _key(self, template: Template, limits: Limits) -> str:
        files = template.id
        if template.rootfs is None:
            self._host = self._host or HostFiles()
            files = self._host.digest
        made_of = [FORMAT, files, ram_mib(limits), limits.disk_bytes, *self._booter.made_of(limits)]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:20]

    async def _make(self, template: Template, limits: Limits, target: Path, progress: Progress) -> None:
        unfinished = target.with_name(f"{target.name}.tmp")
        try:
            await in_thread(remake_folder, unfinished)
            progress("disk", 0.0)
            await in_thread(self._make_disk, template, limits, unfinished)
            progress("boot", 0.2)
            await self._booter.boot(limits, unfinished, progress)
            progress("save", 0.9)
            await in_thread(_finish, unfinished, target, self._booter.kept)
            progress("ready", 1.0)
        except BaseException:
            await in_thread(remove_tree, unfinished)
            raise

    def _make_disk(self, template: Template, limits: Limits, folder: Path) -> None:
        rootfs = template.rootfs or folder / "rootfs"
        expected = folder_bytes(rootfs) if template.rootfs else 2 * (self._host or HostFiles()).num_bytes
        check_space(folder, (ram_mib(limits) << 20) + expected, RESERVE_BYTES)
        if template.rootfs is None:
            rootfs.mkdir()
            (self._host or HostFiles()).copy(rootfs)
        make_disk(rootfs, folder / "disk-0", limits.disk_bytes)
        if template.rootfs is None:
            remove_tree(rootfs)

    def _evict(self, keep: Path) -> None:
        """Remove what was used longest ago until the cache has its size again."""
        folders = [path for path in self._folder.iterdir() if (path / FACTS).exists() and path.suffix != ".tmp"]
        sizes = {path: folder_bytes(path) for path in folders}
        for path in sorted(folders, key=lambda path: path.stat().st_mtime):
            if sum(sizes.values()) <= CACHE_BYTES:
                return
            descriptor = os.open(self._lock(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor), contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path != keep:
                    del sizes[path]
                    remove_tree(path)


def ram_mib(limits: Limits) -> int:
    """RAM of a machine of these limits: whole mebibytes, and enough for a kernel."""
    return max(MIN_RAM_MIB, -(-limits.memory_bytes >> 20))


@asynccontextmanager
async def _locked(path: Path, how: int) -> AsyncIterator[None]:
    """`how` is LOCK_EX for one at a time among all processes of this host, LOCK_SH for many but no such one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)  # a blocking wait would hold a thread of the pool for as long as a boot takes
        yield
    finally:
        os.close(descriptor)


def _finish(unfinished: Path, target: Path, kept: frozenset[str]) -> None:
    """Bring all to the disk once, so that machines that are saved later need not; then give it its name."""
    for path in unfinished.iterdir():
        if path.name not in kept:
            path.unlink()
            continue
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    flush_folder(unfinished)
    os.rename(unfinished, target)
