"""Tiers below one another, as one store: hits move up, what the fast ones cannot hold moves down (rl.md section 6.4)."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from moonlet.serve.state_store.frame import seal, value_of
from moonlet.serve.state_store.guard import GuardedTier
from moonlet.serve.state_store.lane import Patience
from moonlet.serve.state_store.protocol import Counters, StateStore, StoreStats, check_keys
from moonlet.serve.state_store.tier import Tier
from moonlet.serve.state_store.write_down import WriteDown

_FLUSH_BYTES = 16 << 20
_CLOSE_S = 10.0


class TieredStore(StateStore):
    """A store over tiers, the fastest first.

    Args:
        write: "back": values go to the first tier, and further down when it evicts them or on `flush`. "through": they
            go to every tier at once, and `put_many` waits for that as long as its deadline allows.
        queue_bytes: of values on their way down; more are lost, and counted.
        patience: how long a tier that failed or hung is left alone.
        write_timeout_s: of one batch on its way down.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        write: Literal["back", "through"] = "back",
        queue_bytes: int = 256 << 20,
        patience: Patience | None = None,
        write_timeout_s: float = 30.0,
    ) -> None:
        if not tiers:
            raise ValueError("a store needs a tier")
        if len({tier.name for tier in tiers}) < len(tiers):
            raise ValueError(f"tiers need different names: {[tier.name for tier in tiers]}")
        self._tiers = [GuardedTier(tier, patience=patience) for tier in tiers]
        self._write = write
        self._counters = Counters()
        self._down = WriteDown(self._tiers, self._counters, max_bytes=queue_bytes, write_timeout_s=write_timeout_s)
        # Keys that were put or deleted while somebody reads: what is read of them below is old, and must not move up.
        self._touched: set[bytes] = set()
        self._num_readers = 0
        self._lock = threading.Lock()
        for level, tier in enumerate(tiers[:-1]):
            tier.on_evict = functools.partial(self._evicted, level + 1)

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> dict[bytes, bytes]:
        check_keys(keys)
        until = time.monotonic() + deadline_s
        found: dict[bytes, bytes] = {}
        missing = list(dict.fromkeys(keys))
        with self._reading():
            for level, tier in enumerate(self._tiers):
                # On its way to a tier a value is newer than the one that is there.
                found |= self._down.find(level, missing)
                hits = tier.read_frames([key for key in missing if key not in found], until - time.monotonic())
                found |= hits
                if level and hits:
                    self._promote(hits)
                missing = [key for key in missing if key not in found]
                if not missing:
                    break
        num_bytes = sum(map(len, found.values()))
        self._counters.add(hits=len(found), misses=len(missing), hit_bytes=num_bytes)
        return {key: value_of(frame) for key, frame in found.items()}

    def put_many(self, items: Mapping[bytes, bytes], deadline_s: float) -> None:
        check_keys(items)
        until = time.monotonic() + deadline_s
        frames = {key: seal(key, value) for key, value in items.items()}
        self._touch(frames)
        self._counters.add(writes=len(frames), written_bytes=sum(map(len, frames.values())))
        lost = self._tiers[0].write_frames(frames, until - time.monotonic())
        if self._write == "back":
            if lost:
                self._down.offer(1, lost)
            return
        for level in range(1, len(self._tiers)):
            self._down.offer(level, frames, until)
        self._down.wait_for(list(frames), until)

    def contains_many(self, keys: Sequence[bytes], deadline_s: float) -> set[bytes]:
        check_keys(keys)
        until = time.monotonic() + deadline_s
        found: set[bytes] = set()
        for level, tier in enumerate(self._tiers):
            found |= self._down.find(level, keys).keys()
            if missing := [key for key in keys if key not in found]:
                found |= tier.contains_many(missing, until - time.monotonic())
        return found

    def delete_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        check_keys(keys)
        until = time.monotonic() + deadline_s
        self._touch(keys)
        self._counters.add(deletes=len(keys))
        for tier in self._tiers:
            # From above downwards: what a tier has evicted before it forgot the keys is on its way down by then.
            tier.delete_many(keys, until - time.monotonic())
            self._down.forget(keys, until)

    def flush(self, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        lost_before = self._lost()
        is_down = len(self._tiers) > 1 or not self._tiers[0].tier.is_volatile
        for level, guarded in enumerate(self._tiers[:-1]):
            if guarded.tier.is_volatile:
                for frames in self._held(guarded):
                    is_down &= self._down.offer(level + 1, frames, until)
        return self._down.wait_for(None, until) and is_down and self._lost() == lost_before

    def stats(self) -> StoreStats:
        tiers = {guarded.tier.name: guarded.stats() for guarded in self._tiers}
        return self._counters.read(tiers=tiers, queued_bytes=self._down.num_bytes)

    def close(self) -> None:
        self.flush(_CLOSE_S)
        self._down.close()
        for tier in self._tiers:
            tier.close()

    def _evicted(self, level: int, key: bytes, frame: bytes) -> None:
        self._down.offer(level, {key: frame})

    def _held(self, guarded: GuardedTier) -> Iterator[dict[bytes, bytes]]:
        """What a volatile tier holds, in pieces."""
        frames: dict[bytes, bytes] = {}
        num_bytes = 0
        for key in guarded.tier.held_keys():
            frames |= guarded.tier.read([key], float("inf"))
            num_bytes += len(frames.get(key, b""))
            if num_bytes > _FLUSH_BYTES:
                yield frames
                frames, num_bytes = {}, 0
        yield frames

    def _lost(self) -> int:
        stats = self._counters.read()
        return stats.overflow + stats.dropped

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._num_readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_readers -= 1
                if not self._num_readers:
                    self._touched.clear()

    def _touch(self, keys: Mapping[bytes, bytes] | Sequence[bytes]) -> None:
        with self._lock:
            if self._num_readers:
                self._touched.update(keys)

    def _promote(self, frames: Mapping[bytes, bytes]) -> None:
        with self._lock:
            fresh = {key: frame for key, frame in frames.items() if key not in self._touched}
            if self._tiers[0].write_soon(fresh):
                self._counters.add(promoted=len(fresh))
