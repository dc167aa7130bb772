"""Blobs in this process's memory, the least recently used of which make room for others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from moonlet.serve.state_store.tier import Tier


class RamTier(Tier):
    """At most `max_bytes` of blobs."""

    may_block = False
    is_volatile = True

    def __init__(self, max_bytes: int, *, name: str = "ram") -> None:
        self.name = name
        self.max_blob_bytes = max_bytes
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        with self._lock:
            found = {key: self._blobs[key] for key in keys if key in self._blobs}
            for key in found:
                self._blobs.move_to_end(key)
        return found

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        with self._lock:
            for key, blob in blobs.items():
                self._forget(key)
                self._blobs[key] = blob
                self._num_bytes += len(blob)
                self._make_room()

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        with self._lock:
            return {key for key in keys if key in self._blobs}

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        return {key: blob[:num_bytes] for key, blob in self.read(keys, until).items()}

    def held_keys(self) -> list[bytes]:
        with self._lock:
            return list(self._blobs)

    def held_bytes(self) -> int:
        return self._num_bytes

    def close(self) -> None:
        with self._lock:
            self._blobs.clear()
            self._num_bytes = 0

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes:
            key, blob = next(iter(self._blobs.items()))
            # The reader's lock is held, so it finds the blob either here or on its way down.
            if self.on_evict is not None:
                self.on_evict(key, blob)
            self._forget(key)
            self.evictions += 1

    def _forget(self, key: bytes) -> None:
        blob = self._blobs.pop(key, None)
        self._num_bytes -= len(blob) if blob is not None else 0
