"""Machines of the backend namespace for one test, and what they start from."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.namespace import bwrap
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.namespace.bwrap import Bubblewrap
from moonlet.sandbox.namespace.machine import NamespaceMachine

PROGRAMS = ("sh", "cat", "ls", "id", "touch", "mkdir", "rm", "chmod", "stat", "ln", "sleep", "mv", "head", "dd")


class Life:
    """Machines of one test, each with an open stream to its agent."""

    def __init__(self, folder: Path, label: str, backend: NamespaceBackend | None = None) -> None:
        self.backend = backend or NamespaceBackend()
        self.folder, self.label = folder, label
        self.machines: list[NamespaceMachine] = []
        self.guests: list[Guest] = []

    def spec(self, name: str = "one", template: Template | None = None, **limits: int) -> MachineSpec:
        return MachineSpec(name, self.label, template or Template("host"), Limits(**limits), hostname=name)  # type: ignore[arg-type]

    async def start(self, spec: MachineSpec | None = None, image: Path | None = None) -> tuple[NamespaceMachine, Guest]:
        spec = spec or self.spec()
        live = self.folder / spec.id
        live.mkdir()
        await self.backend.prepare(spec.template, spec.limits, lambda *_: None)
        made = self.backend.launch(spec, live) if image is None else self.backend.restore(spec, live, image)
        machine = await made
        assert isinstance(machine, NamespaceMachine)
        self.machines.append(machine)
        self.guests.append(Guest(await GuestStream.open(machine.endpoint(), is_fresh=True)))
        return machine, self.guests[-1]

    async def image(self, machine: NamespaceMachine, name: str = "image", *, is_final: bool = False) -> Path:
        image = self.folder / name
        image.mkdir()
        await machine.save(image, is_final=is_final)
        return image


@asynccontextmanager
async def life(folder: Path, label: str, backend: NamespaceBackend | None = None) -> AsyncIterator[Life]:
    one = Life(folder, label, backend)
    try:
        yield one
    finally:
        for guest in one.guests:
            guest.stream.close()
        for machine in one.machines:
            await machine.destroy()


def old_bubblewrap() -> Bubblewrap:
    program = bwrap._examine(Path(shutil.which("bwrap") or "/nowhere"))
    if program is None:
        pytest.skip("no bubblewrap on the PATH: apt-get install bubblewrap")
    return replace(program, has_overlay=False)


def make_rootfs(root: Path) -> Path:
    """A system of a few programs with their libraries."""
    for name in ("bin", "etc", "tmp", "lower/deep", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in PROGRAMS:
        program = Path(shutil.which(name) or "")
        shutil.copy(program, root / "bin" / name)
        for word in subprocess.run(["ldd", program], capture_output=True, text=True).stdout.split():
            if word.startswith("/") and not (root / word[1:]).exists():
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "lower/deep/file").write_text("of the template\n")
    (root / "lower/gone").write_text("of the template\n")
    return root
