"""What a state store promises: bytes by key, in batches, within a deadline, right or not at all (rl.md section 6.4)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_KEY_BYTES = 64


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and two gauges.

    Attributes:
        hits, misses: keys that were asked for; a key that could not be had in time or whole is a miss.
        hit_bytes, written_bytes: sizes with their checksums.
        writes, deletes: keys.
        evictions: values that made room for others.
        corrupt: values found damaged, and removed.
        failures: calls to a tier that raised. late: calls that were not done by the deadline. skipped: calls that were
            not made, since the tier had failed or hung shortly before.
        promoted: values copied up into the first tier.
        overflow: values lost since the queue to the lower tiers was full. dropped: those that no tier below took.
        held_bytes: in a tier, where it knows. queued_bytes: on their way down.
        tiers: the same of each tier by name.
    """

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    deletes: int = 0
    evictions: int = 0
    corrupt: int = 0
    failures: int = 0
    late: int = 0
    skipped: int = 0
    promoted: int = 0
    overflow: int = 0
    dropped: int = 0
    held_bytes: int = 0
    queued_bytes: int = 0
    tiers: Mapping[str, StoreStats] = field(default_factory=dict)


class Counters:
    """A `StoreStats` that several threads add to."""

    def __init__(self) -> None:
        self._stats = StoreStats()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in amounts.items()})

    def read(self, **gauges: Any) -> StoreStats:
        """The counters now, with `gauges` filled in."""
        with self._lock:
            return replace(self._stats, **gauges)


class StateStore(ABC):
    """Values by key, 1 to 64 bytes each. May be called from several threads; no method raises for a tier's sake.

    A key should name its value, as a hash of all that determines it does: while every tier works the last value put
    under a key is the one that is found, but where a tier failed in between, an older one may come back. A deleted key,
    too, may come back from a tier that could not be reached.

    Deadlines are in seconds from the call. Raises ValueError for a key of another length.
    """

    @abstractmethod
    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> dict[bytes, bytes]:
        """The values that could be had: a missing, late or damaged one, or one behind a failing tier, is absent."""

    @abstractmethod
    def put_many(self, items: Mapping[bytes, bytes], deadline_s: float) -> None:
        """Store values, as far as that works; what could not be stored is counted and will not be found."""

    @abstractmethod
    def contains_many(self, keys: Sequence[bytes], deadline_s: float) -> set[bytes]:
        """The keys that a tier says it has. Only `get_many` finds out whether the value is whole."""

    @abstractmethod
    def delete_many(self, keys: Sequence[bytes], deadline_s: float) -> None: ...

    @abstractmethod
    def flush(self, deadline_s: float) -> bool:
        """Bring what only this process's memory holds to where it survives; whether all of it got there in time."""

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def close(self) -> None:
        """Flush, for a bounded time, and let go of files, connections and threads. Later calls find nothing."""


def check_keys(keys: Iterable[bytes]) -> None:
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; a store's keys have 1 to {MAX_KEY_BYTES}")
