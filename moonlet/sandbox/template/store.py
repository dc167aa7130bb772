"""The templates of a state directory: built once, found by name or content, thrown away when room is needed.

    names/NAME         the content that a name stands for
    roots/HASH/        template.json and rootfs/; appears by one rename
    layers/DIGEST/     unpacked layers of images
    holds/HASH         locked (shared) by whoever uses the template
    tmp/               builds under way; what a killed one left is removed by the next
    build.lock         shared while building, exclusive while throwing away

Locks are the kernel's, so a killed process holds none. Several processes may use one store at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from moonlet.errors import TemplateError, nearest_name
from moonlet.sandbox.backend import Progress, Template
from moonlet.sandbox.generations import flush_folder, remove_tree, storage_errors
from moonlet.sandbox.template.layers import LayerCache
from moonlet.sandbox.template.rootfs import finish_rootfs, measure_rootfs
from moonlet.sandbox.template.source import Made, Source, Workshop

HOST = "host"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")
_ID = re.compile(r"[0-9a-f]{64}")
_SHORT_ID = re.compile(r"[0-9a-f]{12,64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TemplateInfo:
    """A built template as lists show it. Times are Unix seconds; `num_bytes` includes layers that others share."""

    id: str
    names: tuple[str, ...]
    source: str
    num_bytes: int
    created_at: float
    used_at: float
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""


def open_store(state_dir: Path, cache_bytes: int) -> TemplateStore:
    """The store of a state directory. What its sandboxes and snapshots were made from stays, also while no service runs."""
    records = state_dir / "sandboxes.sqlite3"
    return TemplateStore(state_dir / "templates", cache_bytes, in_use=lambda: _recorded(records))


def _recorded(path: Path) -> set[str]:
    from moonlet.sandbox.records import Records

    if not path.exists():
        return set()
    records = Records(path)
    try:
        return {row.template_id for row in [*records.sandboxes(), *records.snapshots()]}
    finally:
        records.close()


class TemplateStore:
    """`in_use` names templates that must stay though nobody holds them now: those of sandboxes that are paused."""

    def __init__(
        self, folder: Path, cache_bytes: int = 20 << 30, *, in_use: Callable[[], Iterable[str]] = lambda: ()
    ) -> None:
        self.folder = folder
        self._cache_bytes = cache_bytes
        self._in_use = in_use
        self._held: dict[str, tuple[int, int]] = {}  # id -> how often, descriptor of the lock
        self._guard = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("names", "roots", "holds", "tmp"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self._layers = LayerCache(folder / "layers")

    # -- finding ------------------------------------------------------------------------------------------------------
    async def resolve(self, name: str) -> Template:
        """By name, or by content hash of which 12 digits are enough. Raises TemplateError with the nearest name."""
        return await asyncio.to_thread(self._resolve, name)

    def _resolve(self, name: str) -> Template:
        if name == HOST:
            return Template(HOST)
        template_id = self._names().get(name) or self._complete(name)
        root = self._root(template_id) if template_id else None
        if root is None or not root.is_dir():
            known = [HOST, *self._names()]
            raise TemplateError(
                f"there is no template '{name}'{nearest_name(name, known)}; there are: {', '.join(known)}. "
                "Build one with: moonlet sandbox template build"
            )
        os.utime(root)
        return _load(root)

    def _complete(self, name: str) -> str | None:
        if not _SHORT_ID.fullmatch(name):
            return None
        found = [path.name for path in self._roots() if path.name.startswith(name)]
        return found[0] if len(found) == 1 else None

    def _names(self) -> dict[str, str]:
        found = {}
        for path in sorted((self.folder / "names").glob("[!.]*")):
            with contextlib.suppress(OSError):
                template_id = path.read_text().strip()
                if _ID.fullmatch(template_id) and self._root(template_id).is_dir():
                    found[unquote(path.name)] = template_id
        return found

    def _root(self, template_id: str) -> Path:
        return self.folder / "roots" / template_id

    def _roots(self) -> list[Path]:
        return [path for path in sorted((self.folder / "roots").iterdir()) if _ID.fullmatch(path.name)]

    async def list(self) -> list[TemplateInfo]:
        """What was built, the last used first."""
        return await asyncio.to_thread(self._list)

    def _list(self) -> list[TemplateInfo]:
        names = self._names()
        found = []
        for root in self._roots():
            with contextlib.suppress(FileNotFoundError):  # thrown away just now
                facts = _facts(root)
                mine = tuple(name for name, template_id in names.items() if template_id == root.name)
                found.append(
                    TemplateInfo(
                        id=root.name,
                        names=mine,
                        source=facts["source"],
                        num_bytes=facts["own_bytes"] + facts["layer_bytes"],
                        created_at=facts["created_at"],
                        used_at=root.stat().st_mtime,
                        env=facts["env"],
                        workdir=facts["workdir"],
                    )
                )
        return sorted(found, key=lambda info: -info.used_at)

    # -- using --------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def hold(self, template_id: str) -> Iterator[None]:
        """Keep a template from being thrown away, by any process, until the block ends. Raises TemplateError if it is gone."""
        if template_id == HOST:
            yield
            return
        self._take(template_id)
        try:
            yield
        finally:
            self._release(template_id)

    def _take(self, template_id: str) -> None:
        with self._guard:
            count, descriptor = self._held.get(template_id, (0, -1))
            if not count:
                descriptor = _lock(self.folder / "holds" / _checked_id(template_id), fcntl.LOCK_SH)
                if not self._root(template_id).is_dir():
                    os.close(descriptor)
                    raise TemplateError(f"the template {template_id[:12]} is not there any more: build it again")
            self._held[template_id] = count + 1, descriptor

    def _release(self, template_id: str) -> None:
        with self._guard:
            count, descriptor = self._held[template_id]
            if count > 1:
                self._held[template_id] = count - 1, descriptor
            else:
                del self._held[template_id]
                os.close(descriptor)

    # -- building -----------------------------------------------------------------------------------------------------
    async def build(self, name: str, source: Source, progress: Progress = lambda what, share: None) -> Template:
        """Make a template of a source and give it a name, which may have stood for another one before.

        `progress` is called in the loop's thread. Raises TemplateError, StorageError for a full disk; after any error, a
        cancellation or a kill nothing that counts is left.
        """
        if not _NAME.fullmatch(name) or name == HOST or _SHORT_ID.fullmatch(name):
            raise TemplateError(f"{name!r} cannot name a template: up to 128 of letters, digits and ._:/+- and no hash")
        loop = asyncio.get_running_loop()
        stop = threading.Event()

        def tell(what: str, share: float | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(progress, what, share)

        worker = ThreadPoolExecutor(1, "moonlet-template")  # minutes of work: not in the threads that all share
        future = loop.run_in_executor(worker, self._build, name, source, tell, stop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([future])
            future.exception()  # seen
            raise
        finally:
            worker.shutdown(wait=False)

    def _build(self, name: str, source: Source, progress: Progress, stop: threading.Event) -> Template:
        lock = self._begin_build()
        try:
            scratch = self.folder / "tmp" / uuid.uuid4().hex
            scratch.mkdir(mode=0o700)
            try:
                with storage_errors(f"the template '{name}' cannot be built"):
                    root = self._fill(source, scratch, progress, stop)
                    _write_name(self.folder / "names" / quote(name, safe=""), root.name)
            except OSError as error:
                raise TemplateError(f"the template '{name}' cannot be built: {error}") from error
            finally:
                remove_tree(scratch)
        finally:
            os.close(lock)
        self._make_room(keep=root.name)
        return _load(root)

    def _begin_build(self) -> int:
        """The shared lock. Who is alone removes what killed builders left."""
        with contextlib.suppress(BlockingIOError):
            alone = _lock(self.folder / "build.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                for path in (self.folder / "tmp").iterdir():
                    remove_tree(path)
            finally:
                os.close(alone)
        return _lock(self.folder / "build.lock", fcntl.LOCK_SH)

    def _fill(self, source: Source, scratch: Path, progress: Progress, stop: threading.Event) -> Path:
        made_root = scratch / "root"
        rootfs = made_root / "rootfs"
        rootfs.mkdir(parents=True)
        workshop = Workshop(rootfs, scratch, self._layers, progress, stop)
        made = source.fill(workshop)
        workshop.tell("looking it through", None)
        finish_rootfs(rootfs)
        measured = measure_rootfs(rootfs, made.env, workshop.tick)
        facts = self._describe(source, made, measured.own_bytes)
        (made_root / "template.json").write_text(json.dumps(facts))
        _sync_file_system(made_root)
        workshop.tell(f"{measured.num_files} files, {(facts['own_bytes'] + facts['layer_bytes']) >> 20} MiB", 1.0)
        target = self._root(measured.digest)
        try:
            made_root.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            os.utime(target)  # the same was built before
        flush_folder(target.parent)
        return target

    def _describe(self, source: Source, made: Made, own_bytes: int) -> dict[str, Any]:
        layers = [layer for layer in map(self._layers.find, made.layers) if layer]
        return {
            "source": str(source),
            "env": dict(made.env),
            "workdir": made.workdir,
            "layers": [layer.digest for layer in layers],
            "layer_bytes": sum(layer.num_bytes for layer in layers),
            "own_bytes": own_bytes,
            "created_at": time.time(),
        }

    # -- throwing away ------------------------------------------------------------------------------------------------
    async def remove(self, name: str) -> None:
        """Forget a name; its files go if no other name stands for them and no sandbox uses them, else when that is so.

        Raises TemplateError for an unknown name.
        """
        await asyncio.to_thread(self._remove, name)

    def _remove(self, name: str) -> None:
        template_id = self._resolve(name).id
        if template_id == HOST:
            raise TemplateError("the template 'host' is this machine: it cannot be removed")
        names = self._names()
        for other, its_id in names.items():
            if other == name or (name not in names and its_id == template_id):  # by its hash: all names
                (self.folder / "names" / quote(other, safe="")).unlink(missing_ok=True)
        if template_id not in self._names().values():
            self._discard(template_id)

    def _discard(self, template_id: str) -> bool:
        """Remove a root that nobody uses; False if somebody does."""
        if template_id in set(self._in_use()):
            return False
        try:
            lock = _lock(self.folder / "holds" / template_id, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            doomed = self.folder / "tmp" / uuid.uuid4().hex
            self._root(template_id).rename(doomed)
            remove_tree(doomed)
        except FileNotFoundError:
            return True  # another process was faster
        finally:
            os.close(lock)
        return True

    def _make_room(self, keep: str) -> None:
        """Within the limit again: first layers that no template shares, then templates, the longest unused first.

        Nothing happens while somebody else builds: he will do it at his end.
        """
        try:
            lock = _lock(self.folder / "build.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            candidates = sorted(
                (root for root in self._roots() if root.name != keep), key=lambda root: root.stat().st_mtime
            )
            self._drop_layers()
            while self.num_bytes() > self._cache_bytes and candidates:
                oldest = candidates.pop(0)
                if self._discard(oldest.name):
                    log.info("template %s was thrown away to make room", oldest.name[:12])
                    self._drop_layers()
            if self.num_bytes() > self._cache_bytes:
                log.warning("templates need more than their %d MiB: all are in use", self._cache_bytes >> 20)
        finally:
            os.close(lock)

    def num_bytes(self) -> int:
        """What all templates and layers take on the disk."""
        return sum(_facts(root)["own_bytes"] for root in self._roots()) + sum(layer.num_bytes for layer in self._layers)

    def _drop_layers(self) -> None:
        """Remove unshared layers, oldest first, as long as there is too much."""
        shared = {digest for root in self._roots() for digest in _facts(root)["layers"]}
        unshared = [layer for layer in self._layers if layer.digest not in shared]
        for layer in sorted(unshared, key=lambda layer: layer.folder.stat().st_mtime):
            if self.num_bytes() <= self._cache_bytes:
                return
            remove_tree(layer.folder)


def _load(root: Path) -> Template:
    return Template(root.name, root / "rootfs", _facts(root)["env"])


def _facts(root: Path) -> dict[str, Any]:
    return json.loads((root / "template.json").read_text())


def _checked_id(template_id: str) -> str:
    if not _ID.fullmatch(template_id):
        raise TemplateError(f"{template_id!r} is no content hash of a template")
    return template_id


def _write_name(path: Path, template_id: str) -> None:
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    unfinished.write_text(template_id)
    unfinished.rename(path)
    flush_folder(path.parent)


def _lock(path: Path, how: int) -> int:
    """A descriptor that holds the lock. Raises BlockingIOError where another one has it and `how` does not wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync_file_system(folder: Path) -> None:
    """A tree has too many files to flush each."""
    import ctypes

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(handle)
