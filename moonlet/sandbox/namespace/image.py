"""What says of a folder that it holds a machine's files: their format, and the template that they lie over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moonlet.errors import SandboxStateError
from moonlet.sandbox.backend import MachineSpec

IMAGE_FORMAT = 1
IMAGE_NOTE, LIVE_NOTE = "image.json", "machine.json"


def describe(spec: MachineSpec) -> dict[str, Any]:
    return {"format": IMAGE_FORMAT, "template": spec.template.id}


def check_image(folder: Path, spec: MachineSpec) -> None:
    """Raises SandboxStateError if a machine of `spec` cannot be made of it. The folder of a dead machine will do."""
    try:
        note = folder / IMAGE_NOTE
        record = json.loads((note if note.exists() else folder / LIVE_NOTE).read_text())
    except (FileNotFoundError, ValueError) as error:
        raise SandboxStateError(f"{folder} holds no machine of the backend namespace: destroy the sandbox") from error
    if record.get("format") != IMAGE_FORMAT:
        raise SandboxStateError(f"{folder} was written by another version of Moonlet: restore it with that one")
    if record.get("template") != spec.template.id:
        raise SandboxStateError(f"{folder} is of template {record.get('template')}, not of {spec.template.id}")
