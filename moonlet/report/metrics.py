"""The seam for metrics and events, and the two append-only files behind it.

A run writes `metrics.jsonl` (numbers by step) and `events.jsonl` (what happened when): one JSON object a line, each
line one write, so that a killed process can tear only the last one. Readers need nothing but the files.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from moonlet.errors import StorageError

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class Sink(Protocol):
    """Where a run says how it goes."""

    def metrics(self, step: int, /, **values: Any) -> None:
        """Numbers at an optimiser step; `kind` among the values says which ("train", "heldout", "depth", ...)."""
        ...

    def event(self, event: str, /, **values: Any) -> None:
        """Something that happened once ("start", "stage", "checkpoint", "resume", "warning", "done", ...)."""
        ...

    def close(self) -> None: ...


class FanOut:
    """One sink that passes everything on to several."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def metrics(self, step: int, /, **values: Any) -> None:
        for sink in self._sinks:
            sink.metrics(step, **values)

    def event(self, event: str, /, **values: Any) -> None:
        for sink in self._sinks:
            sink.event(event, **values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class MetricsLog:
    """The sink that is always on: `metrics.jsonl` and `events.jsonl` in the run directory.

    With `resume_step`, metrics beyond that step are dropped first: the resumed run writes them again. Events stay, they
    are history. A line that a killed process tore is dropped either way.

    Raises StorageError when a line cannot be written.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _keep_lines(folder / METRICS_FILE, resume_step)
        _keep_lines(folder / EVENTS_FILE, None)
        self._metrics = _open_for_append(folder / METRICS_FILE)
        self._events = _open_for_append(folder / EVENTS_FILE)

    def metrics(self, step: int, /, **values: Any) -> None:
        _append(self._metrics, {"kind": values.pop("kind", "train"), "step": step, **values})

    def event(self, event: str, /, **values: Any) -> None:
        _append(self._events, {"time": round(time.time(), 3), "event": event, **values})

    def close(self) -> None:
        for descriptor in (self._metrics, self._events):
            if descriptor >= 0:
                os.close(descriptor)
        self._metrics = self._events = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Metric lines in the order written, those of one kind if asked; [] where the file is absent."""
    lines = (line for line, _ in _complete_lines(Path(run_dir) / METRICS_FILE))
    return [line for line in lines if kind is None or line.get("kind") == kind]


def read_events(run_dir: str | Path, event: str | None = None) -> list[dict[str, Any]]:
    """Event lines in the order written, those of one name if asked; [] where the file is absent."""
    lines = (line for line, _ in _complete_lines(Path(run_dir) / EVENTS_FILE))
    return [line for line in lines if event is None or line.get("event") == event]


def plain_values(value: Any) -> Any:
    """`value` as JSON can hold it: arrays and tensors as lists, NaN and infinities as null, paths as text."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if hasattr(value, "tolist"):
        return plain_values(value.tolist())
    return str(value)


def _complete_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Lines that are whole JSON objects, parsed and as written; torn ones are passed over."""
    if not path.is_file():
        return
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line, raw


def _keep_lines(path: Path, last_step: int | None) -> None:
    """Rewrite `path` with its complete lines up to `last_step`; replaced in one move, or left alone if nothing goes."""
    if not path.is_file():
        return
    lines = [raw for line, raw in _complete_lines(path) if last_step is None or line.get("step", 0) <= last_step]
    content = b"".join(raw + b"\n" for raw in lines)
    if content == path.read_bytes():
        return
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"cannot rewrite {path}: {error.strerror}; free some space and start again") from error


def _open_for_append(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _append(descriptor: int, line: dict[str, Any]) -> None:
    data = (json.dumps(plain_values(line), ensure_ascii=False) + "\n").encode()
    try:
        if os.write(descriptor, data) != len(data):
            raise StorageError("a metrics line was written in part: the disk is full; free some space and resume")
    except OSError as error:
        raise StorageError(f"cannot write metrics: {error.strerror}; free some space and resume") from error
