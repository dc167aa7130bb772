"""A manager on the scripted backend, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.scripted_backend import ScriptedBackend, labelled_below, living

from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager, ServiceConfig
from moonlet.sandbox.state_dir import label_of


def managed(folder: Path, backend: ScriptedBackend | None = None, **settings: Any) -> Manager:
    """Open it with `async with`."""
    backend = backend or ScriptedBackend()
    settings = {"reserve_bytes": 0, "drain_s": 0.2, **settings}
    return Manager(ServiceConfig(folder, **settings), backends={backend.name: backend})


async def new_sandbox(manager: Manager, **options: Any) -> LocalSandbox:
    from moonlet.sandbox.api import SandboxSpec

    return LocalSandbox(manager, (await manager.create(SandboxSpec(**options))).id)


@pytest.fixture(autouse=True)
def no_machine_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    """Import it: what a test that fails leaves over is ended."""
    yield
    for pid in labelled_below(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def machines(folder: Path) -> list[str]:
    """Sandboxes of a state directory that have a living machine."""
    return living(label_of(folder))


def names(folder: Path) -> list[str]:
    """What is below a state directory, without the files of the manager itself and the insides of machines."""
    return sorted(
        str(path.relative_to(folder))
        for path in [*folder.glob("sandboxes/*"), *folder.glob("sandboxes/*/*"), *folder.glob("snapshots/*")]
    )
