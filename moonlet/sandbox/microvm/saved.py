"""What the folder of a saved machine says about it. The folder also holds:

guest.ram   the RAM as it was when the template was ready, shared by all machines of the template
pages       what this machine has changed of it; missing in a template itself
state       processors and devices, as QEMU wrote them
disk-N      layers of the disk, see image.py
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moonlet.errors import SandboxDiedError, SandboxStateError
from moonlet.sandbox.microvm.qemu import Hardware
from moonlet.sandbox.processes import ProcessId

FACTS, PAGES, STATE = "machine.json", "pages", "state"
FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """`layer` is the number of the layer that is written to; the first `template_layers` are the template's.

    `kernel` and `agent` are digests of what runs in the machine: they are part of its RAM and go on with it.
    """

    identity: str
    kernel: str
    agent: str
    hardware: Hardware
    layer: int
    template_layers: int
    format: int = FORMAT

    def with_layer(self, layer: int) -> Saved:
        return replace(self, layer=layer)

    def write(self, folder: Path) -> None:
        _write(folder, asdict(self))

    @staticmethod
    def read(folder: Path) -> Saved:
        """Raises SandboxStateError if no machine was saved in the folder, or by a later version."""
        try:
            return _saved(json.loads((folder / FACTS).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxStateError(f"{folder} holds no machine of the backend 'microvm': {error}") from error

    def check(self, identity: str) -> None:
        """Raises SandboxStateError unless a machine saved so can go on under `identity`."""
        if (self.format, self.identity) != (FORMAT, identity):
            raise SandboxStateError(
                f"the machine was saved by {self.identity} (format {self.format}), here is {identity} (format {FORMAT}), "
                "which cannot go on with it: install that version again, or make a new sandbox"
            )


@dataclass(frozen=True)
class Life:
    """What the folder of a live machine says: how it would be saved, and which process it is."""

    saved: Saved
    process: ProcessId

    def write(self, folder: Path) -> None:
        _write(folder, {**asdict(self.saved), "process": asdict(self.process)})

    @staticmethod
    def read(folder: Path) -> Life:
        """Raises SandboxDiedError if no machine has started in the folder."""
        try:
            fields = json.loads((folder / FACTS).read_text())
            return Life(_saved(fields), ProcessId(**fields["process"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxDiedError(f"no virtual machine was in {folder}", "lost") from error

    def with_layer(self, layer: int) -> Life:
        return replace(self, saved=self.saved.with_layer(layer))


def _saved(fields: dict) -> Saved:
    names = ("identity", "kernel", "agent", "layer", "template_layers", "format")
    return Saved(hardware=Hardware(**fields["hardware"]), **{name: fields[name] for name in names})


def _write(folder: Path, fields: dict) -> None:
    unfinished = folder / (FACTS + ".tmp")
    unfinished.write_text(json.dumps(fields))
    unfinished.rename(folder / FACTS)
