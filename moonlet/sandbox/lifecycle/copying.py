"""Snapshots: a machine is saved while it goes on, and what was saved starts new ones.

A fork is a hidden snapshot with children. A snapshot's folder stays as long as a live machine was started from it, since
that machine may still read it, also when the snapshot itself was deleted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import replace
from pathlib import Path

from moonlet.errors import SandboxNotFoundError, SnapshotError
from moonlet.sandbox.api import State
from moonlet.sandbox.generations import TMP, check_space, folder_bytes, in_thread, remove_tree, whole_folder
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import as_sandbox_error, run_on
from moonlet.sandbox.records import SnapshotInfo, snapshot_from_json, to_json

_ID = re.compile(r"snap[a-z2-7]{16}")  # as `Core.new_id` makes them

log = logging.getLogger(__name__)


# -- saving -----------------------------------------------------------------------------------------------------------
async def capture(core: Core, box: Box, snapshot_id: str, name: str | None) -> SnapshotInfo:
    """Save the running machine of `box` as a snapshot, a hidden one if `name` is None; it goes on.

    Raises StorageError where there is no room.
    """
    box.require(State.RUNNING)
    await core.save(box, state=State.FORKING if name is None else State.SNAPSHOTTING)
    async with box.lock.quiet(core.config.drain_s):  # a long transfer need not be cut, since this machine goes on
        try:
            snapshot = await _save_snapshot(core, box, snapshot_id, name)
        except Exception as error:
            await run_on(core, box, error)
            raise as_sandbox_error(error, f"sandbox {box.id} could not be saved") from error
        await run_on(core, box, None)
    return snapshot


async def _save_snapshot(core: Core, box: Box, snapshot_id: str, name: str | None) -> SnapshotInfo:
    assert box.machine is not None
    usage = await in_thread(box.machine.usage)
    needed = usage.memory_bytes + usage.disk_bytes
    await in_thread(check_space, core.config.state_dir, needed, core.config.reserve_bytes)
    row = box.row
    snapshot = SnapshotInfo(
        id=snapshot_id,
        name=name or "",
        sandbox_id=box.id,
        spec=row.spec,
        backend=row.backend,
        version=row.version,
        template_id=row.template_id,
        caps=row.caps,
        created_at=time.time(),
        is_hidden=name is None,
    )
    target = core.snapshots_folder / snapshot.id
    with core.holding(snapshot.id):
        async with whole_folder(target) as folder:
            await in_thread((folder / "image").mkdir, 0o700)
            await box.machine.save(folder / "image", is_final=False)
            snapshot = replace(snapshot, num_bytes=await in_thread(folder_bytes, folder))
            await in_thread((folder / "snapshot.json").write_text, to_json(snapshot))
        await _record(core, snapshot, target)
    return snapshot


async def _record(core: Core, snapshot: SnapshotInfo, folder: Path) -> None:
    try:
        await core.write(
            core.records.put_snapshot, snapshot, then=lambda: core.snapshots.__setitem__(snapshot.id, snapshot)
        )
    except Exception:
        await in_thread(remove_tree, folder)
        raise


# -- snapshots --------------------------------------------------------------------------------------------------------
async def publish_snapshot(core: Core, snapshot: SnapshotInfo) -> None:
    """Put it where other hosts find it, if there is such a place; else, or on an error, it is as if it never was."""
    if core.repository is None:
        return
    try:
        await core.repository.put(snapshot.id, core.snapshots_folder / snapshot.id)
    except BaseException:
        await delete_local(core, [snapshot.id])
        raise


async def fetch(core: Core, name: str) -> SnapshotInfo | None:
    """A snapshot of another host, by id. Raises SnapshotError if it is damaged."""
    if core.repository is None or not _ID.fullmatch(name):
        return None
    with core.holding(name):
        async with core.fetches.setdefault(name, asyncio.Lock()):  # of several that ask, one fetches
            return core.snapshot(name) or await _fetch(core, name)


async def _fetch(core: Core, name: str) -> SnapshotInfo | None:
    target = core.snapshots_folder / name
    try:
        await core.repository.fetch(name, target)
    except SandboxNotFoundError:
        return None
    try:
        snapshot = snapshot_from_json(await in_thread((target / "snapshot.json").read_text))
        if snapshot.id != name or snapshot.is_hidden:
            raise ValueError(snapshot.id)
    except (OSError, KeyError, TypeError, ValueError) as error:
        await in_thread(remove_tree, target)
        raise SnapshotError(f"{name} in {core.config.snapshot_url} is no snapshot of a sandbox: remove it") from error
    await _record(core, snapshot, target)
    return snapshot


async def delete_snapshot(core: Core, name: str) -> None:
    """By id or name. Raises SandboxNotFoundError if there is none."""
    snapshot = core.snapshot(name)
    stored = name if snapshot is None else snapshot.id
    repository = core.repository
    stored_ids = [each.id for each in await repository.list()] if repository is not None else []
    if snapshot is None and stored not in stored_ids:
        raise SandboxNotFoundError(f"there is no snapshot {name!r}; `moonlet sandbox snapshot --list` shows all")
    if repository is not None and stored in stored_ids:
        await repository.remove(stored)
    await delete_local(core, [stored])


async def delete_local(core: Core, ids: list[str]) -> None:
    """Forget snapshots; their folders go once no machine needs them."""
    await core.write(core.records.delete_snapshots, ids)
    for snapshot_id in ids:
        core.snapshots.pop(snapshot_id, None)
    await collect_snapshots(core)


async def collect_snapshots(core: Core) -> None:
    """Remove what nobody needs any more: hidden snapshots without children, folders without a record."""
    async with core.collecting:
        await _collect(core)


async def _collect(core: Core) -> None:
    origins = {box.row.origin for box in core.boxes.values()}
    childless = [
        snapshot.id
        for snapshot in core.snapshots.values()
        if snapshot.is_hidden and snapshot.id not in origins and not core.busy[snapshot.id]
    ]
    if childless:
        await core.write(core.records.delete_snapshots, childless)
        for snapshot_id in childless:
            core.snapshots.pop(snapshot_id, None)
    for path in await in_thread(lambda: sorted(core.snapshots_folder.iterdir())):
        if not _is_needed(
            core, path.name.removesuffix(TMP)
        ):  # looked at after the listing: the new have a holder by now
            try:
                await in_thread(remove_tree, path)
            except OSError as error:
                log.error("%s could not be removed: %s", path, error)


def _is_needed(core: Core, name: str) -> bool:
    is_origin = any(box.row.origin == name for box in core.boxes.values())
    return is_origin or name in core.snapshots or name in core.busy or name in core.records.unreadable
