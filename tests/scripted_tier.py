"""A tier of the state store that fails, hangs and runs full when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from moonlet.serve.state_store import Tier


class ScriptedTier(Tier):
    """Blobs in a dict, which outlives the tier where it is handed to the next one.

    Attributes:
        failing: methods that raise.
        blobs_until_full: so many blobs are written, then a write raises in its middle.
        calls: methods in the order in which they were called.
    """

    def __init__(self, name: str = "scripted", blobs: dict[bytes, bytes] | None = None) -> None:
        self.name = name
        self.blobs = blobs if blobs is not None else {}
        self.failing: set[str] = set()
        self.blobs_until_full: int | None = None
        self.calls: list[str] = []
        self._open = threading.Event()
        self._open.set()

    def hang(self) -> None:
        """Calls do not return before `release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        self._act("read")
        return {key: self.blobs[key] for key in keys if key in self.blobs}

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        self._act("write")
        for key, blob in blobs.items():
            if self.blobs_until_full is not None:
                if not self.blobs_until_full:
                    raise OSError("no room")
                self.blobs_until_full -= 1
            self.blobs[key] = blob

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        self._act("contains")
        return {key for key in keys if key in self.blobs}

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        self._act("remove")
        for key in keys:
            self.blobs.pop(key, None)

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        return {key: self.blobs[key][:num_bytes] for key in keys if key in self.blobs}

    def _act(self, method: str) -> None:
        self.calls.append(method)
        self._open.wait()
        if method in self.failing:
            raise ConnectionError(f"{method} fails, as the script says")
