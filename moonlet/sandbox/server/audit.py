"""The audit log: one JSON object per line for everything that was asked for, rotated by size."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

MAX_TEXT = 256  # characters kept of any one value


class AuditLog:
    """Appends to `path` (0600); at `max_bytes` it becomes `path.1`, and so on up to `num_files` old ones.

    A full disk must not stop the service: lines that cannot be written are counted in `num_lost`.
    """

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        self.num_lost = 0
        self._path, self._max_bytes, self._num_files = path, max_bytes, num_files
        self._lock = threading.Lock()
        self._descriptor = self._open()
        self._size = os.fstat(self._descriptor).st_size

    def write(self, action: str, **fields: object) -> None:
        """Append one line. Values are cut at 256 characters; secrets are the caller's to leave out."""
        entry = {"time": round(time.time(), 3), "action": action}
        entry |= {name: _clip(value) for name, value in fields.items() if value is not None}
        line = (json.dumps(entry) + "\n").encode()
        with self._lock:
            try:
                if self._size and self._size + len(line) > self._max_bytes:
                    self._rotate()
                self._size += os.write(self._descriptor, line)
            except OSError as error:
                self.num_lost += 1
                if self.num_lost == 1:
                    log.error("The audit log %s cannot be written (%s); lines are lost", self._path, error)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        for index in range(self._num_files, 0, -1):
            older = self._path if index == 1 else self._path.with_name(f"{self._path.name}.{index - 1}")
            if older.exists():
                older.replace(self._path.with_name(f"{self._path.name}.{index}"))
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, 0


def _clip(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
