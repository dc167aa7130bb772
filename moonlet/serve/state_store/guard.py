"""One tier as a store: nothing it does can give a wrong value, raise, or take longer than the caller has."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from moonlet.serve.state_store.frame import HEADER_BYTES, is_whole, seal, value_of
from moonlet.serve.state_store.lane import Lane, LaneLateError, LaneSkippedError, Patience
from moonlet.serve.state_store.protocol import Counters, StateStore, StoreStats, check_keys
from moonlet.serve.state_store.tier import Tier

T = TypeVar("T")
_CLOSE_S = 2.0

log = logging.getLogger(__name__)


class GuardedTier(StateStore):
    """A `StateStore` over one tier. Reads and writes back off separately: a full disk can still be read.

    The methods that move frames (values with their checksums) are for `TieredStore`, which need not compute them anew.
    """

    def __init__(self, tier: Tier, *, patience: Patience | None = None) -> None:
        patience = patience or Patience()
        self.tier = tier
        self._counters = Counters()
        self._reads = Lane(f"state store, {tier.name}, reads", patience, is_threaded=tier.may_block)
        self._writes = Lane(f"state store, {tier.name}, writes", patience, is_threaded=tier.may_block)

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> dict[bytes, bytes]:
        check_keys(keys)
        return {key: value_of(frame) for key, frame in self.read_frames(keys, deadline_s).items()}

    def put_many(self, items: Mapping[bytes, bytes], deadline_s: float) -> None:
        check_keys(items)
        lost = self.write_frames({key: seal(key, value) for key, value in items.items()}, deadline_s)
        self._counters.add(dropped=len(lost))

    def contains_many(self, keys: Sequence[bytes], deadline_s: float) -> set[bytes]:
        check_keys(keys)
        until = time.monotonic() + deadline_s
        return self._attempt(self._reads, lambda: self.tier.contains(keys, until), deadline_s) or set()

    def delete_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        check_keys(keys)
        until = time.monotonic() + deadline_s

        def remove() -> None:
            self.tier.remove(keys, until)
            self._counters.add(deletes=len(keys))

        if keys:
            self._attempt(self._writes, remove, deadline_s)

    def flush(self, deadline_s: float) -> bool:
        return not self.tier.is_volatile or not self.tier.held_keys()

    def stats(self) -> StoreStats:
        return self._counters.read(evictions=self.tier.evictions, held_bytes=self.tier.held_bytes())

    def close(self) -> None:
        for lane in (self._reads, self._writes):
            lane.close(_CLOSE_S)
        closing = Lane(f"state store, {self.tier.name}, close", Patience(), is_threaded=self.tier.may_block)
        self._attempt(closing, self.tier.close, _CLOSE_S)
        closing.close(0.0)

    def read_frames(self, keys: Sequence[bytes], deadline_s: float) -> dict[bytes, bytes]:
        """Whole frames by key; as `get_many`."""
        if not keys:
            return {}
        until = time.monotonic() + deadline_s
        frames = self._attempt(self._reads, lambda: self._read_whole(keys, until), deadline_s) or {}
        num_bytes = sum(map(len, frames.values()))
        self._counters.add(hits=len(frames), misses=len(keys) - len(frames), hit_bytes=num_bytes)
        return frames

    def write_frames(
        self, frames: Mapping[bytes, bytes], deadline_s: float, *, only_changed: bool = False
    ) -> dict[bytes, bytes]:
        """Store frames; returns those that are not known to be stored. With `only_changed` equal ones stay as they are."""
        until = time.monotonic() + deadline_s
        small, large = self._by_size(frames)
        if large:  # what is here under their keys is older
            self._attempt(self._writes, lambda: self.tier.remove(list(large), until), deadline_s)
        work = self._writer(small, until, only_changed)
        if small and not self._attempt(self._writes, work, until - time.monotonic()):
            return dict(frames)
        return large

    def write_soon(self, frames: Mapping[bytes, bytes]) -> bool:
        """Store frames some time, where that is possible without waiting; whether it will be tried."""
        small, _ = self._by_size(frames)
        write = self._writer(small, float("inf"), only_changed=True)

        def write_and_count() -> None:
            try:
                write()
            except Exception:
                self._counters.add(failures=1)
                raise

        return bool(small) and self._writes.post(write_and_count)

    def _by_size(self, frames: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        limit = self.tier.max_blob_bytes
        if limit is None:
            return dict(frames), {}
        small = {key: frame for key, frame in frames.items() if len(frame) <= limit}
        return small, {key: frame for key, frame in frames.items() if len(frame) > limit}

    def _writer(self, frames: dict[bytes, bytes], until: float, only_changed: bool) -> Callable[[], bool]:
        def write() -> bool:
            heads = self.tier.heads(list(frames), HEADER_BYTES, until) if only_changed else {}
            changed = {key: frame for key, frame in frames.items() if heads.get(key) != frame[:HEADER_BYTES]}
            if changed:
                self.tier.write(changed, until)
            self._counters.add(writes=len(changed), written_bytes=sum(map(len, changed.values())))
            return True

        return write

    def _read_whole(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        blobs = self.tier.read(keys, until)
        whole = {key: blobs[key] for key in keys if key in blobs and is_whole(key, blobs[key])}
        damaged = [key for key in keys if key in blobs and key not in whole]
        if damaged:
            self._counters.add(corrupt=len(damaged))
            log.warning("state store, %s: %d damaged values are removed", self.tier.name, len(damaged))
            with contextlib.suppress(Exception):
                self.tier.remove(damaged, until)
        return whole

    def _attempt(self, lane: Lane, work: Callable[[], T], deadline_s: float) -> T | None:
        """What `work` returns, or None where that cannot be had; counted, and logged by the lane."""
        try:
            return lane.call(work, deadline_s)
        except LaneSkippedError:
            self._counters.add(skipped=1)
        except LaneLateError:
            self._counters.add(late=1)
        except Exception:
            self._counters.add(failures=1)
        return None
