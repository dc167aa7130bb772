"""One transition of a sandbox at a time: the same ones join, others wait, whoever asked may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from moonlet.errors import SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import State
from moonlet.sandbox.lifecycle.box import Box


async def transition(
    box: Box,
    kind: str,
    work: Callable[[], Coroutine[Any, Any, Any]],
    *,
    joins: bool = True,
    before: Callable[[], None] | None = None,
) -> Any:
    """Run `work` once nothing else runs; with `joins` take the result of one of the same kind that runs already.

    `before` is called at the last moment and may refuse. A caller that is cancelled stops waiting, nothing more.
    """
    while box.task is not None:
        task, is_same = box.task, box.kind == kind
        await asyncio.wait([task])
        if joins and is_same and not task.cancelled():
            return task.result()
        box.require(*State)
    if before is not None:
        before()
    task = box.begin(kind, work())
    await asyncio.wait([task])
    if task.cancelled():
        raise SandboxNotFoundError(f"sandbox {box.id} is gone: it was destroyed meanwhile")
    return task.result()


def outcome(task: asyncio.Task[Any]) -> Any:
    """The result of a task that has ended; only the end of the service cancels one that somebody waits for."""
    if task.cancelled():
        raise SandboxStateError("the service was closed meanwhile")
    return task.result()
