"""What a store of templates has on the disk, and what goes when room is needed.

    names/NAME         the content that a name stands for
    roots/HASH/        template.json and rootfs/; appears by one rename
    layers/DIGEST/     unpacked layers of images
    holds/HASH         locked (shared) by whoever uses the template
    tmp/               builds under way; what a killed one left is removed by the next
    build.lock         shared while building, exclusive while throwing away

Locks are the kernel's, so a killed process holds none. Several processes may use one store at once. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from moonlet.errors import TemplateError
from moonlet.sandbox.generations import flush_folder, remove_tree
from moonlet.sandbox.template.layers import LayerCache

_ID = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class Shelf:
    """`in_use` names templates that must stay though nobody holds them now."""

    def __init__(self, folder: Path, cache_bytes: int, in_use: Callable[[], Iterable[str]]) -> None:
        self.folder = folder
        self._cache_bytes = cache_bytes
        self._in_use = in_use
        self._held: dict[str, tuple[int, int]] = {}  # id -> how often, descriptor of the lock
        self._guard = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("names", "roots", "holds", "tmp"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self.layers = LayerCache(folder / "layers")

    # -- looking ------------------------------------------------------------------------------------------------------
    def names(self) -> dict[str, str]:
        """Name -> content hash of what is there."""
        found = {}
        for path in sorted((self.folder / "names").glob("[!.]*")):
            with contextlib.suppress(OSError):
                template_id = path.read_text().strip()
                if self.has(template_id):
                    found[unquote(path.name)] = template_id
        return found

    def has(self, template_id: str) -> bool:
        return bool(_ID.fullmatch(template_id)) and self.root(template_id).is_dir()

    def root(self, template_id: str) -> Path:
        return self.folder / "roots" / template_id

    def roots(self) -> Iterable[Path]:
        return [path for path in sorted((self.folder / "roots").iterdir()) if _ID.fullmatch(path.name)]

    def num_bytes(self) -> int:
        """What all templates and layers take on the disk."""
        own = sum(read_facts(root)["own_bytes"] for root in self.roots())
        return own + sum(layer.num_bytes for layer in self.layers)

    # -- putting ------------------------------------------------------------------------------------------------------
    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty folder to build in, gone afterwards. Who is alone removes what killed builders left."""
        with contextlib.suppress(BlockingIOError), locked(self.folder / "build.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in (self.folder / "tmp").iterdir():
                remove_tree(path)
        with self.busy():
            scratch = self.folder / "tmp" / uuid.uuid4().hex
            scratch.mkdir(mode=0o700)
            try:
                yield scratch
            finally:
                remove_tree(scratch)

    def busy(self) -> AbstractContextManager[None]:
        """While it lasts nothing is thrown away to make room."""
        return locked(self.folder / "build.lock", fcntl.LOCK_SH)

    def put(self, made: Path, template_id: str) -> Path:
        """Bring a finished root to the disk and to its place; the same may be there already."""
        _sync_file_system(made)
        target = self.root(template_id)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            os.utime(target)
        flush_folder(target.parent)
        return target

    def put_name(self, name: str, template_id: str) -> None:
        path = self.folder / "names" / quote(name, safe="")
        unfinished = path.with_name(f".{uuid.uuid4().hex}")
        unfinished.write_text(template_id)
        unfinished.rename(path)
        flush_folder(path.parent)

    def drop_name(self, name: str) -> None:
        (self.folder / "names" / quote(name, safe="")).unlink(missing_ok=True)

    # -- holding ------------------------------------------------------------------------------------------------------
    def take(self, template_id: str) -> None:
        """Raises TemplateError if it is gone."""
        with self._guard:
            count, descriptor = self._held.get(template_id, (0, -1))
            if not count:
                if not _ID.fullmatch(template_id):
                    raise TemplateError(f"{template_id!r} is no content hash of a template")
                descriptor = _lock(self.folder / "holds" / template_id, fcntl.LOCK_SH)
                if not self.has(template_id):
                    os.close(descriptor)
                    raise TemplateError(f"the template {template_id[:12]} is not there any more: build it again")
            self._held[template_id] = count + 1, descriptor

    def release(self, template_id: str) -> None:
        with self._guard:
            count, descriptor = self._held[template_id]
            if count > 1:
                self._held[template_id] = count - 1, descriptor
            else:
                del self._held[template_id]
                os.close(descriptor)

    # -- throwing away ------------------------------------------------------------------------------------------------
    def discard(self, template_id: str) -> bool:
        """Remove a root that nobody uses; False if somebody does."""
        if template_id in set(self._in_use()):
            return False
        try:
            with locked(self.folder / "holds" / template_id, fcntl.LOCK_EX | fcntl.LOCK_NB):
                doomed = self.folder / "tmp" / uuid.uuid4().hex
                self.root(template_id).rename(doomed)
                remove_tree(doomed)
        except BlockingIOError:
            return False
        except FileNotFoundError:  # another process was faster
            return True
        return True

    def make_room(self, keep: str) -> None:
        """Within the limit again: first layers that no template shares, then templates, the longest unused first.

        Nothing happens while somebody else builds, whose end it will happen at.
        """
        with contextlib.suppress(BlockingIOError), locked(self.folder / "build.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            oldest_first = sorted(self.roots(), key=lambda root: root.stat().st_mtime)
            self._drop_layers()
            for root in oldest_first:
                if self.num_bytes() <= self._cache_bytes:
                    return
                if root.name != keep and self.discard(root.name):
                    log.info("template %s was thrown away to make room", root.name[:12])
                    self._drop_layers()
            if self.num_bytes() > self._cache_bytes:
                log.warning("templates need more than their %d MiB: all are in use", self._cache_bytes >> 20)

    def _drop_layers(self) -> None:
        """Remove unshared layers, oldest first, as long as there is too much."""
        shared = {digest for root in self.roots() for digest in read_facts(root)["layers"]}
        unshared = [layer for layer in self.layers if layer.digest not in shared]
        for layer in sorted(unshared, key=lambda layer: layer.folder.stat().st_mtime):
            if self.num_bytes() <= self._cache_bytes:
                return
            remove_tree(layer.folder)


def read_facts(root: Path) -> dict[str, Any]:
    return json.loads((root / "template.json").read_text())


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Raises BlockingIOError where another one has the lock and `how` does not wait."""
    descriptor = _lock(path, how)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, how: int) -> int:
    """A descriptor that holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync_file_system(folder: Path) -> None:
    """A tree has too many files to flush each."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(handle)
