"""The templates of a state directory: built once, found by name or content. `shelf.py` is what it has on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonlet.errors import TemplateError, nearest_name
from moonlet.sandbox.backend import Progress, Template
from moonlet.sandbox.generations import storage_errors
from moonlet.sandbox.template.rootfs import finish_rootfs, measure_rootfs
from moonlet.sandbox.template.shelf import Shelf, read_facts
from moonlet.sandbox.template.source import Made, Source, Workshop

HOST = "host"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")
_SHORT_ID = re.compile(r"[0-9a-f]{12,64}")


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
    """Beyond `cache_bytes` the longest unused go, but none that is held and none of `in_use`."""

    def __init__(
        self, folder: Path, cache_bytes: int = 20 << 30, *, in_use: Callable[[], Iterable[str]] = lambda: ()
    ) -> None:
        self._shelf = Shelf(folder, cache_bytes, in_use)

    @property
    def folder(self) -> Path:
        return self._shelf.folder

    def num_bytes(self) -> int:
        """What all templates and layers take on the disk; blocking."""
        return self._shelf.num_bytes()

    # -- finding ------------------------------------------------------------------------------------------------------
    async def resolve(self, name: str) -> Template:
        """By name, or by content hash of which 12 digits are enough. Raises TemplateError with the nearest name."""
        return await asyncio.to_thread(self._resolve, name)

    def _resolve(self, name: str) -> Template:
        if name == HOST:
            return Template(HOST)
        names = self._shelf.names()
        template_id = names.get(name) or self._complete(name)
        if template_id is None:
            known = [HOST, *names]
            raise TemplateError(
                f"there is no template '{name}'{nearest_name(name, known)}; there are: {', '.join(known)}. "
                "Build one with: moonlet sandbox template build"
            )
        root = self._shelf.root(template_id)
        os.utime(root)
        return _load(root)

    def _complete(self, name: str) -> str | None:
        if not _SHORT_ID.fullmatch(name):
            return None
        found = [path.name for path in self._shelf.roots() if path.name.startswith(name)]
        return found[0] if len(found) == 1 else None

    async def list(self) -> Sequence[TemplateInfo]:
        """What was built, the last used first."""
        return await asyncio.to_thread(self._list)

    def _list(self) -> Sequence[TemplateInfo]:
        names = self._shelf.names()
        found = []
        for root in self._shelf.roots():
            with contextlib.suppress(FileNotFoundError):  # thrown away just now
                found.append(_describe(root, tuple(name for name, its_id in names.items() if its_id == root.name)))
        return sorted(found, key=lambda info: -info.used_at)

    # -- using --------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def hold(self, template_id: str) -> Iterator[None]:
        """Keep a template from being thrown away, by any process, until the block ends. Raises TemplateError if it is gone."""
        if template_id == HOST:
            yield
            return
        self._shelf.take(template_id)
        try:
            yield
        finally:
            self._shelf.release(template_id)

    async def remove(self, name: str) -> None:
        """Forget a name (by a hash: all its names). The files go if nothing else needs them, else once that is so.

        Raises TemplateError for an unknown name.
        """
        await asyncio.to_thread(self._remove, name)

    def _remove(self, name: str) -> None:
        template_id = self._resolve(name).id
        if template_id == HOST:
            raise TemplateError("the template 'host' is this machine: it cannot be removed")
        names = self._shelf.names()
        for other, its_id in names.items():
            if other == name or (name not in names and its_id == template_id):
                self._shelf.drop_name(other)
        if template_id not in self._shelf.names().values():
            with self._shelf.busy():
                self._shelf.discard(template_id)

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
        try:
            with storage_errors(f"the template '{name}' cannot be built"), self._shelf.workplace() as scratch:
                root = self._fill(source, scratch, progress, stop)
                self._shelf.put_name(name, root.name)
        except OSError as error:
            raise TemplateError(f"the template '{name}' cannot be built: {error}") from error
        self._shelf.make_room(keep=root.name)
        return _load(root)

    def _fill(self, source: Source, scratch: Path, progress: Progress, stop: threading.Event) -> Path:
        made_root = scratch / "root"
        rootfs = made_root / "rootfs"
        rootfs.mkdir(parents=True)
        workshop = Workshop(rootfs, scratch, self._shelf.layers, progress, stop)
        made = source.fill(workshop)
        workshop.tell("looking it through", None)
        finish_rootfs(rootfs)
        measured = measure_rootfs(rootfs, made.env, workshop.tick)
        facts = self._facts(source, made, measured.own_bytes)
        (made_root / "template.json").write_text(json.dumps(facts))
        root = self._shelf.put(made_root, measured.digest)
        workshop.tell(f"{measured.num_files} files, {(facts['own_bytes'] + facts['layer_bytes']) >> 20} MiB", 1.0)
        return root

    def _facts(self, source: Source, made: Made, own_bytes: int) -> dict[str, Any]:
        layers = [layer for layer in map(self._shelf.layers.find, made.layers) if layer]
        return {
            "source": str(source),
            "env": dict(made.env),
            "workdir": made.workdir,
            "layers": [layer.digest for layer in layers],
            "layer_bytes": sum(layer.num_bytes for layer in layers),
            "own_bytes": own_bytes,
            "created_at": time.time(),
        }


def _load(root: Path) -> Template:
    return Template(root.name, root / "rootfs", read_facts(root)["env"])


def _describe(root: Path, names: tuple[str, ...]) -> TemplateInfo:
    facts = read_facts(root)
    return TemplateInfo(
        id=root.name,
        names=names,
        source=facts["source"],
        num_bytes=facts["own_bytes"] + facts["layer_bytes"],
        created_at=facts["created_at"],
        used_at=root.stat().st_mtime,
        env=facts["env"],
        workdir=facts["workdir"],
    )
