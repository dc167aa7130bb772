"""Values on their way down to the slower tiers: a bounded queue and the one thread that empties it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from moonlet.serve.state_store.guard import GuardedTier
from moonlet.serve.state_store.protocol import Counters

_BATCH_BYTES = 32 << 20
_BATCH_COUNT = 64

Place = tuple[int, bytes]  # the level that a frame goes to, and its key


class WriteDown:
    """Frames for the tiers below the first. One that a tier does not take goes on to the next one below.

    A frame can be found here from the moment it is offered until a tier has it.

    Args:
        tiers: all tiers, the fastest first.
        max_bytes: of frames in the queue; a single one may be larger.
        write_timeout_s: of one batch to one tier.
    """

    def __init__(
        self, tiers: Sequence[GuardedTier], counters: Counters, *, max_bytes: int, write_timeout_s: float
    ) -> None:
        self._tiers = tiers
        self._counters = counters
        self._max_bytes = max_bytes
        self._write_timeout_s = write_timeout_s
        self._queue: OrderedDict[Place, bytes] = OrderedDict()
        self._in_flight: dict[Place, bytes] = {}
        self._unwanted: set[Place] = set()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def offer(self, level: int, frames: Mapping[bytes, bytes], until: float | None = None) -> bool:
        """Take frames for `tiers[level]`; whether there was room for all. Waits for room only where `until` is given."""
        if level >= len(self._tiers):
            self._counters.add(dropped=len(frames))
            return not frames
        with self._changed:
            taken = [self._take_in((level, key), frame, until) for key, frame in frames.items()]
            self._counters.add(overflow=taken.count(False))
            return all(taken)

    def find(self, level: int, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Frames that are on their way to `tiers[level]`, the newer of two under one key."""
        with self._changed:
            older = {
                key: self._in_flight[level, key]
                for key in keys
                if (level, key) in self._in_flight and (level, key) not in self._unwanted
            }
            return older | {key: self._queue[level, key] for key in keys if (level, key) in self._queue}

    def forget(self, keys: Sequence[bytes], until: float) -> None:
        """Drop frames; one that is being written at this moment is removed as soon as it is."""
        wanted = set(keys)
        with self._changed:
            for place in [place for place in self._queue if place[1] in wanted]:
                self._num_bytes -= len(self._queue.pop(place))
            going = {place for place in self._in_flight if place[1] in wanted}
            self._unwanted |= going
            self._changed.notify_all()
            self._wait(lambda: not going & self._in_flight.keys(), until)

    def wait_for(self, keys: Sequence[bytes] | None, until: float) -> bool:
        """Wait until none of the keys (None: nothing at all) is on its way down."""
        wanted = None if keys is None else set(keys)
        with self._changed:
            return self._wait(lambda: not any(wanted is None or key in wanted for _, key in self._places()), until)

    def close(self) -> None:
        """Stop after the batch that is being written; what is left is lost, and counted."""
        with self._changed:
            self._is_closed = True
            self._counters.add(dropped=len(self._queue))
            self._num_bytes -= sum(map(len, self._queue.values()))
            self._queue.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(2.0)

    def _take_in(self, place: Place, frame: bytes, until: float | None) -> bool:
        def has_room() -> bool:
            others = self._num_bytes - len(self._queue.get(place, b""))
            return others + len(frame) <= self._max_bytes or not others

        if until is not None:
            self._wait(lambda: has_room() or self._is_closed, until)
        if self._is_closed or not has_room():
            return False
        self._num_bytes += len(frame) - len(self._queue.pop(place, b""))
        self._queue[place] = frame
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="state store, write down", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _wait(self, condition: Callable[[], bool], until: float) -> bool:
        return self._changed.wait_for(condition, max(0.0, until - time.monotonic()))

    def _places(self) -> list[Place]:
        return [*self._queue, *self._in_flight]

    def _run(self) -> None:
        while batch := self._next_batch():
            level = next(iter(batch))[0]
            frames = {key: frame for (_, key), frame in batch.items()}
            rest = self._tiers[level].write_frames(frames, self._write_timeout_s, only_changed=True)
            self._finish(level, batch, rest)

    def _next_batch(self) -> dict[Place, bytes]:
        """The oldest frames for one tier; none when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            batch: dict[Place, bytes] = {}
            num_bytes = 0
            for place, frame in self._queue.items():
                is_full = len(batch) == _BATCH_COUNT or num_bytes + len(frame) > _BATCH_BYTES
                if batch and (is_full or place[0] != next(iter(batch))[0]):
                    break
                batch[place] = frame
                num_bytes += len(frame)
            for place in batch:
                del self._queue[place]
            self._in_flight = batch
            return batch

    def _finish(self, level: int, batch: Mapping[Place, bytes], rest: Mapping[bytes, bytes]) -> None:
        removed: set[Place] = set()
        while True:
            with self._changed:
                unwanted = self._unwanted - removed
                if not unwanted:
                    self._pass_on(level, batch, rest)
                    return
            self._tiers[level].delete_many([key for _, key in unwanted], self._write_timeout_s)
            removed |= unwanted

    def _pass_on(self, level: int, batch: Mapping[Place, bytes], rest: Mapping[bytes, bytes]) -> None:
        """Queue what the tier did not take for the next one, in place of an older frame that the tier has evicted."""
        wanted = {key: frame for key, frame in rest.items() if (level, key) not in self._unwanted}
        self._num_bytes -= sum(map(len, batch.values()))
        if self._is_closed or level + 1 == len(self._tiers):
            self._counters.add(dropped=len(wanted))
        else:
            for key, frame in wanted.items():
                self._num_bytes += len(frame) - len(self._queue.pop((level + 1, key), b""))
                self._queue[level + 1, key] = frame
        self._in_flight, self._unwanted = {}, set()
        self._changed.notify_all()
