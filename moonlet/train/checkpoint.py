"""Checkpoints that are either whole or not there.

A checkpoint is a folder `step_N` with model.safetensors, optimizer.safetensors, state.json, tokenizer.json and the
marker COMPLETE, which names every other file with its size and CRC-32. It is written as `step_N.tmp`: files first,
each flushed to the disk, the marker last, then one rename. A process killed at any moment leaves an older checkpoint
whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moonlet.errors import CheckpointError, NoCheckpointError, StorageError

MARKER = "COMPLETE"
MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TOKENIZER_FILE = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tokenizer.json",
)
_FORMAT = 1
_NAME = re.compile(r"step_(\d+)")
_READ_BYTES = 1 << 22

log = logging.getLogger("moonlet")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
        model, optimizer: tensors by name.
        state: JSON values; "step" is the number of finished optimiser steps.
        tokenizer: bytes of the tokenizer's file.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    tokenizer: bytes = field(repr=False, default=b"")

    @property
    def step(self) -> int:
        return self.state["step"]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, permanent: bool = False) -> Path:
    """Write `folder/step_N`; a complete one of that step stays as it is. Returns its path.

    Raises:
        StorageError: the disk is full or cannot be written; what was saved before is intact.
    """
    final = folder / f"step_{checkpoint.step}"
    draft = folder / f"{final.name}.tmp"
    if what_is_wrong(final) is None:
        return final
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write_files(draft, checkpoint)
        _write_marker(draft, permanent)
        _sync(draft)
        _remove(final)
        os.replace(draft, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        advice = "free some space and resume: earlier checkpoints are intact"
        raise StorageError(f"cannot save the checkpoint '{final}': {error}; {advice}") from error
    return final


def _write_files(draft: Path, checkpoint: Checkpoint) -> None:
    for name, tensors in ((MODEL_FILE, checkpoint.model), (OPTIMIZER_FILE, checkpoint.optimizer)):
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, draft / name)
    (draft / STATE_FILE).write_text(json.dumps({"format": _FORMAT, **checkpoint.state}))
    (draft / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer)
    for path in draft.iterdir():
        path.chmod(0o644)
        _sync(path)


def _write_marker(draft: Path, permanent: bool) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in sorted(draft.iterdir())}
    (draft / MARKER).write_text(json.dumps({"permanent": permanent, "files": files}))
    _sync(draft / MARKER)


def what_is_wrong(path: Path) -> str | None:
    """Why `path` is not a complete checkpoint, by the files' names and sizes; None where it is one."""
    if not path.is_dir():
        return "it does not exist"
    if not (path / MARKER).is_file():
        return f"it has no marker {MARKER}: its saving did not finish"
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        for name, facts in files.items():
            if not (path / name).is_file():
                return f"'{name}' is missing"
            if (size := (path / name).stat().st_size) != facts["bytes"]:
                return f"'{name}' has {size:,} bytes instead of {facts['bytes']:,}: it was cut short or changed"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its marker {MARKER} is damaged"
    return None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first; damaged ones are logged and passed over."""
    found = []
    for path in folder.glob("step_*") if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            if (problem := what_is_wrong(path)) is None:
                found.append((int(match[1]), path))
            else:
                log.warning("checkpoint '%s' is passed over: %s", path, problem)
    return [path for _, path in sorted(found)]


def latest_complete(folder: Path) -> Path:
    """The newest checkpoint in `folder` that is whole.

    Raises:
        NoCheckpointError: there is none.
    """
    complete = complete_checkpoints(folder)
    if not complete:
        raise NoCheckpointError(f"there is no complete checkpoint in '{folder}'")
    return complete[-1]


def load_checkpoint(path: Path, with_optimizer: bool = True) -> Checkpoint:
    """Read a checkpoint folder back.

    Raises:
        CheckpointError: it is incomplete, or a file was changed since.
    """
    if problem := what_is_wrong(path):
        raise CheckpointError(
            f"'{path}' is not a usable checkpoint: {problem}; delete or move that folder, and the one before it is taken"
        )
    for name, facts in json.loads((path / MARKER).read_text())["files"].items():
        if (with_optimizer or name != OPTIMIZER_FILE) and _crc32(path / name) != facts["crc32"]:
            raise CheckpointError(
                f"'{path / name}' is damaged (its checksum is wrong); delete or move '{path}', and the one before it is taken"
            )
    try:
        state = json.loads((path / STATE_FILE).read_text())
        if state.pop("format") != _FORMAT:
            raise CheckpointError(f"'{path}' was written by another version of Moonlet")
        optimizer = load_tensors(path / OPTIMIZER_FILE) if with_optimizer else {}
        return Checkpoint(load_tensors(path / MODEL_FILE), optimizer, state, (path / TOKENIZER_FILE).read_bytes())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"'{path}' cannot be read: {error}; delete or move that folder, and the one before it is taken"
        ) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def prune_checkpoints(folder: Path, keep_last: int) -> None:
    """Delete what is left of unfinished saves, and rolling checkpoints but for the newest `keep_last`."""
    for draft in folder.glob("step_*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)
    rolling = [path for path in complete_checkpoints(folder) if not _is_permanent(path)]
    for path in rolling[: max(0, len(rolling) - keep_last)]:
        _remove(path)


def _is_permanent(path: Path) -> bool:
    return bool(json.loads((path / MARKER).read_text())["permanent"])


def _remove(path: Path) -> None:
    """Out of sight in one move, then gone: a kill in between leaves nothing that looks like a checkpoint."""
    if path.exists():
        doomed = path.with_name(f"{path.name}.old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
