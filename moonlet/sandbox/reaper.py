"""What nobody needs any more is found and removed: at the start of a manager and every 30 seconds.

Machines are known by their label, folders by the records. A sweep and the start of a machine exclude each other, so that a
machine which has no record in `keep` yet is never taken for a leftover.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from moonlet.errors import MoonletError
from moonlet.sandbox.api import State
from moonlet.sandbox.generations import generation_folder, in_thread, remove_tree
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.copying import collect_snapshots
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.killing import begin_kill
from moonlet.sandbox.lifecycle.recovery import sweep_machines

EVERY_S = 30.0
_PATIENCE_S = 2.0  # starts of machines are held up at most so long by a sweep that waits for its turn

log = logging.getLogger(__name__)


async def reap_for_ever(core: Core) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            await reap(core)
        except MoonletError as error:
            log.error("cleaning up failed: %s", error)


async def reap(core: Core) -> list[str]:
    """One round; returns what was found, in words."""
    found: list[str] = []
    try:
        async with core.gate.write(patience_s=_PATIENCE_S):
            keep = {box.id for box in core.boxes.values() if box.machine is not None or box.task is not None}
            found += await sweep_machines(core, keep | core.records.unreadable)
    except TimeoutError:
        log.debug("machines are being started: the sweep waits for the next round")
    found += await _reap_folders(core)
    await collect_snapshots(core)
    for box in list(core.boxes.values()):
        if box.state == State.KILLING and box.task is None:
            found.append(f"sandbox {box.id}, whose destruction failed before")
            await asyncio.wait([begin_kill(core, box)])
    core.num_reaped += len(found)
    return found


async def _reap_folders(core: Core) -> list[str]:
    """Folders of sandboxes that are gone, and what an unfinished transition left in those that are not."""
    found: list[str] = []
    for folder in await in_thread(lambda: sorted(core.sandboxes_folder.iterdir())):
        box = core.boxes.get(folder.name)
        if folder.name in core.records.unreadable:
            continue
        if box is None:
            found += await _remove(folder)
            continue
        with contextlib.suppress(TimeoutError):
            async with box.lock.write(patience_s=0):  # a transition has it
                for path in await in_thread(_leftovers, box):
                    found += await _remove(path)
    return found


def _leftovers(box: Box) -> list[Path]:
    kept = {generation_folder(box.folder, box.row.generation)}
    if box.machine is not None:
        kept.add(box.live)
    return [
        path
        for path in sorted(box.folder.iterdir() if box.folder.exists() else ())
        if path.is_dir() and path not in kept and (path.name.startswith("gen-") or path == box.live)
    ]


async def _remove(path: Path) -> list[str]:
    try:
        await in_thread(remove_tree, path)
    except OSError as error:
        log.error("%s could not be removed: %s", path, error)
    return [str(path)]
