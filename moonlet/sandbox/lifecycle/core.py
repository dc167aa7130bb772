"""What all transitions of one manager share: folders, records, backends, templates, and who may start machines now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from moonlet.errors import (
    BackendUnavailableError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    TemplateError,
    nearest_name,
)
from moonlet.sandbox.backend import Backend, Probe, Template
from moonlet.sandbox.choose import effective_strength
from moonlet.sandbox.generations import settled
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.network import Denied
from moonlet.sandbox.readers_writer import ReadersWriter
from moonlet.sandbox.records import Records, SandboxRow, SnapshotInfo
from moonlet.sandbox.settings import ServiceConfig
from moonlet.sandbox.state_dir import label_of

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


class Templates(Protocol):
    """What the manager needs of a template store."""

    async def resolve(self, name: str) -> Template: ...

    def hold(self, template_id: str) -> contextlib.AbstractContextManager[Any]: ...


class HostTemplate:
    """The store of a manager that has none: the host's own system."""

    async def resolve(self, name: str) -> Template:
        if name != "host":
            raise TemplateError(
                f"there is no template '{name}'{nearest_name(name, ['host'])}: this manager has only 'host'"
            )
        return Template("host")

    def hold(self, template_id: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Core:
    """State of one manager. All of it belongs to one event loop."""

    def __init__(
        self, config: ServiceConfig, backends: Mapping[str, Backend], templates: Templates, repository: Any
    ) -> None:
        self.config = config
        self.backends = dict(backends)
        self.templates = templates
        self.repository = repository
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, SnapshotInfo] = {}
        self.busy: Counter[str] = Counter()  # ids of snapshots that are being written or used
        self.num_reaped = 0
        self.on_denied: Callable[[str, Denied], None] | None = None
        self._chosen: set[str] = set()
        self.collecting = asyncio.Lock()
        self.fetches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.records: Records
        self.gate = ReadersWriter()  # starts of machines are readers, sweeps are writers
        self.starting = asyncio.Semaphore(config.max_starting)
        self.timers_changed = asyncio.Event()
        self.label = label_of(config.state_dir)
        self._writer = ThreadPoolExecutor(1, "moonlet-records")  # one thread: writes happen in the order of the calls
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- folders and names --------------------------------------------------------------------------------------------
    @property
    def sandboxes_folder(self) -> Path:
        return self.config.state_dir / "sandboxes"

    @property
    def snapshots_folder(self) -> Path:
        return self.config.state_dir / "snapshots"

    def image_of(self, snapshot_id: str) -> Path:
        return self.snapshots_folder / snapshot_id / "image"

    @contextlib.contextmanager
    def holding(self, snapshot_id: str) -> Iterator[str]:
        """Keeps a snapshot from being collected before a record or a sandbox refers to it."""
        self.busy[snapshot_id] += 1
        try:
            yield snapshot_id
        finally:
            self.busy[snapshot_id] -= 1
            if not self.busy[snapshot_id]:
                del self.busy[snapshot_id]

    @staticmethod
    def new_id(prefix: str) -> str:
        """80 random bits, usable as a host name."""
        return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(16))

    # -- records ------------------------------------------------------------------------------------------------------
    async def write(
        self, work: Callable[..., _Result], *args: Any, then: Callable[[], None] | None = None, **options: Any
    ) -> _Result:
        """Run a method of the records in their thread, and `then` if it succeeded.

        A cancelled caller waits for its end all the same, and `then` is run: what is on the disk is known in memory.
        """
        future = asyncio.get_running_loop().run_in_executor(self._writer, lambda: work(*args, **options))
        try:
            return await settled(future)
        finally:
            if then is not None and future.exception() is None:
                then()

    async def save(
        self, box: Box, derive: Callable[[SandboxRow], Mapping[str, Any]] | None = None, **changes: Any
    ) -> None:
        """Change a row on the disk, then in memory. Raises StorageError, after which the row is as before.

        `derive` gives changes that depend on the row as it is then.
        """
        async with box.saving:
            if box.is_gone:
                raise SandboxNotFoundError(f"sandbox {box.id} is gone: it was destroyed")
            row: SandboxRow = replace(box.row, **changes, **(derive(box.row) if derive else {}))
            await self.write(self.records.put, row, then=lambda: self.publish(box, row))

    async def try_save(self, box: Box, **changes: Any) -> None:
        """For a way back: the state in memory is right even where the disk cannot be written, and a restart finds it."""
        async with box.saving:
            if box.is_gone:
                return
            row: SandboxRow = replace(box.row, **changes)
            try:
                await self.write(self.records.put, row, then=lambda: self.publish(box, row))
            except Exception as error:
                log.error("sandbox %s: %s could not be recorded: %s", box.id, row.state, error)
                self.publish(box, row)

    def publish(self, box: Box, row: SandboxRow) -> None:
        box.publish(row)
        self.timers_changed.set()

    # -- questions ----------------------------------------------------------------------------------------------------
    def box(self, sandbox_id: str) -> Box:
        box = self.boxes.get(sandbox_id)
        if box is None or box.is_gone:
            raise SandboxNotFoundError(f"there is no sandbox {sandbox_id!r}{nearest_name(sandbox_id, self.boxes)}")
        return box

    def snapshot(self, name: str) -> SnapshotInfo | None:
        """By id, else the newest of that name."""
        visible = [snapshot for snapshot in self.snapshots.values() if not snapshot.is_hidden]
        for snapshot in visible:
            if snapshot.id == name:
                return snapshot
        named = [snapshot for snapshot in visible if name and snapshot.name == name]
        return max(named, key=lambda snapshot: snapshot.created_at) if named else None

    def admit(self, *, running: int = 0, total: int = 0) -> None:
        """Raises SandboxLimitError if so many more would be too many."""
        active = sum(box.is_active for box in self.boxes.values())
        retry_s = self._next_free_s()
        if running and active + running > self.config.max_running:
            what = (
                f"{active} sandboxes run and at most {self.config.max_running} may (max_running): pause or destroy one"
            )
        elif total and len(self.boxes) + total > self.config.max_total:
            what = f"there are {len(self.boxes)} sandboxes and at most {self.config.max_total} may be (max_total): destroy some"
        else:
            return
        raise SandboxLimitError(f"{what}, or try again in {retry_s:.0f} s", retry_s)

    def _next_free_s(self) -> float:
        deadlines = [box.deadline for box in self.boxes.values() if box.is_active and box.deadline is not None]
        soonest = min(deadlines, default=0.0) + self.config.scoring_slack_s - time.monotonic()
        return min(max(soonest, 1.0), 30.0)

    # -- backends -----------------------------------------------------------------------------------------------------
    async def choose_backend(self, name: str) -> tuple[Backend, Probe]:
        """The backend of this name, or the strongest one that works; with the answer of its probe.

        Raises BackendUnavailableError that says why.
        """
        if name == "auto":
            name = self.config.backend
        if name != "auto":
            return await self.usable_backend(name)
        reasons: list[str] = []
        best: tuple[int, Backend, Probe] | None = None
        for backend in sorted(self.backends.values(), key=lambda backend: -backend.strength):
            if backend.strength <= (best[0] if best else 0):  # cannot win, or only by name
                continue
            probe = await backend.probe()
            strength = effective_strength(backend, probe)
            if strength > (best[0] if best else 0):
                best = strength, backend, probe
            elif probe.caps is None:
                reasons.append(f"{backend.name}: {probe.reason}")
        if best is None:
            raise BackendUnavailableError("no kind of sandbox works on this machine: " + "; ".join(reasons))
        if best[1].name not in self._chosen:
            self._chosen.add(best[1].name)
            why = f"; not {'; not '.join(reasons)}" if reasons else ""
            log.info(
                "sandboxes are made by %s (%s), the strongest that works here%s", best[1].name, best[2].version, why
            )
        return best[1], best[2]

    async def usable_backend(self, name: str) -> tuple[Backend, Probe]:
        backend = self.backends.get(name)
        if backend is None:
            known = ", ".join(sorted(self.backends))
            raise BackendUnavailableError(f"there is no backend '{name}'{nearest_name(name, self.backends)}: {known}")
        probe = await backend.probe()
        if probe.caps is None:
            raise BackendUnavailableError(f"the backend {name} does not work here: {probe.reason}")
        return backend, probe

    async def matching_backend(self, name: str, version: str, what: str) -> Backend:
        """The backend that can restore what `version` of it saved. Raises SandboxStateError for another version."""
        backend, probe = await self.usable_backend(name)
        if probe.version != version:
            raise SandboxStateError(
                f"{what} was saved by {name} {version or '(no version)'}, this machine has {probe.version or '(no version)'}, "
                "which cannot read it: install that version again, or make a new sandbox"
            )
        return backend

    # -- network --------------------------------------------------------------------------------------------------------
    def deny(self, sandbox_id: str, denied: Denied) -> None:
        """A sandbox asked for a host that it may not reach."""
        log.warning("sandbox %s: refused %s:%d: %s", sandbox_id, denied.host, denied.port, denied.reason)
        if self.on_denied is not None:
            self.on_denied(sandbox_id, denied)

    # -- tasks --------------------------------------------------------------------------------------------------------
    def spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        """A background task that the manager ends when it closes."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap_task)
        return task

    def _reap_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())

    async def stop_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close_records(self) -> None:
        self._writer.shutdown(wait=True)
        self.records.close()
