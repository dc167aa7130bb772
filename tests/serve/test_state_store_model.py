"""Random histories of a tiered store against a dict: what comes out is what was put in, whatever happens between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scripted_tier import ScriptedTier
from store_servers import wait_until

from moonlet.serve.state_store import DiskTier, Patience, RamTier, Tier, TieredStore

LONG_S = 60.0
KEYS = [bytes([number]) * 3 for number in range(6)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
# Large ones do not fit into RAM, and the largest not onto the disk.
values = st.builds(
    lambda seed, size: bytes([seed]) * size, st.integers(0, 255), st.sampled_from([0, 1, 150, 300, 900, 2000])
)
items = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=4)

SETTINGS = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Stack:
    """A store of three small tiers; disk and the scripted tier outlive it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moonlet-store-"))
        self.kept: dict[bytes, bytes] = {}
        self.left: list[TieredStore] = []
        self.open("back")

    def open(self, write: str, queue_bytes: int = 1 << 20) -> None:
        self.tiers: list[Tier] = [RamTier(700), DiskTier(self.folder, 1600), ScriptedTier(blobs=self.kept)]
        patience = Patience(0.0, 0.0)
        self.store = TieredStore(self.tiers, write=write, queue_bytes=queue_bytes, patience=patience)  # type: ignore[arg-type]

    @property
    def scripted(self) -> ScriptedTier:
        tier = self.tiers[2]
        assert isinstance(tier, ScriptedTier)
        return tier

    def remove(self) -> None:
        for store in (self.store, *self.left):
            store.close()
        shutil.rmtree(self.folder)


class HealthyStore(RuleBasedStateMachine):
    """While every tier works, a store is a dict, also over a restart, and while values move between its tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[bytes, bytes] = {}
        self.stack = Stack()

    @rule(new=items)
    def put(self, new: dict[bytes, bytes]) -> None:
        self.stack.store.put_many(new, LONG_S)
        self.model |= new

    @rule(keys=some_keys)
    def get(self, keys: list[bytes]) -> None:
        assert self.stack.store.get_many(keys, LONG_S) == {key: self.model[key] for key in keys if key in self.model}

    @rule(keys=some_keys)
    def contains(self, keys: list[bytes]) -> None:
        assert self.stack.store.contains_many(keys, LONG_S) == {key for key in keys if key in self.model}

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        self.stack.store.delete_many(keys, LONG_S)
        for key in keys:
            self.model.pop(key, None)

    @rule()
    def flush(self) -> None:
        assert self.stack.store.flush(LONG_S)
        below = {key for tier in self.stack.tiers[1:] for key in tier.contains(KEYS, 0.0)}
        assert below == self.model.keys()

    @rule(write=st.sampled_from(["back", "through"]))
    def restart(self, write: str) -> None:
        self.stack.store.close()
        self.stack.open(write)

    @invariant()
    def everything_is_there(self) -> None:
        assert self.stack.store.get_many(KEYS, LONG_S) == self.model

    @invariant()
    def tiers_keep_their_limits(self) -> None:
        tiers = self.stack.store.stats().tiers
        assert tiers["ram"].held_bytes <= 700 and tiers["disk"].held_bytes <= 1600

    def teardown(self) -> None:
        stats = self.stack.store.stats()
        self.stack.remove()
        assert not stats.overflow and not stats.dropped
        assert not any(tier.failures or tier.late or tier.skipped or tier.corrupt for tier in stats.tiers.values())


class FaultyStore(RuleBasedStateMachine):
    """Whatever fails, a key gives a value that was put under it, whole, or nothing; and the store recovers."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.ever: dict[bytes, set[bytes]] = {key: set() for key in KEYS}

    @initialize(queue_bytes=st.sampled_from([500, 1 << 20]))
    def start(self, queue_bytes: int) -> None:
        self.stack.store.close()
        self.queue_bytes = queue_bytes
        self.stack.open("back", queue_bytes)

    @rule(new=items)
    def put(self, new: dict[bytes, bytes]) -> None:
        for key, value in new.items():
            self.ever[key].add(value)
        self.stack.store.put_many(new, LONG_S)

    @rule(keys=some_keys)
    def get(self, keys: list[bytes]) -> None:
        for key, value in self.stack.store.get_many(keys, LONG_S).items():
            assert key in keys and value in self.ever[key]

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        self.stack.store.delete_many(keys, LONG_S)

    @rule(failing=st.sets(st.sampled_from(["read", "write", "remove", "contains"])))
    def fail(self, failing: set[str]) -> None:
        self.stack.scripted.failing = failing

    @rule(room=st.integers(0, 3))
    def fill_up(self, room: int) -> None:
        self.stack.scripted.blobs_until_full = room

    @rule()
    def repair(self) -> None:
        self.stack.scripted.failing = set()
        self.stack.scripted.blobs_until_full = None

    @rule(
        level=st.integers(0, 2),
        key=st.sampled_from(KEYS),
        place=st.floats(0, 1, exclude_max=True),
        flip=st.integers(1, 255),
    )
    def flip_a_byte(self, level: int, key: bytes, place: float, flip: int) -> None:
        def flipped(blob: bytes) -> bytes:
            changed = bytearray(blob)
            changed[int(place * len(blob))] ^= flip
            return bytes(changed)

        self._change(level, key, flipped)

    @rule(level=st.integers(0, 2), key=st.sampled_from(KEYS), size=st.floats(0, 1))
    def cut(self, level: int, key: bytes, size: float) -> None:
        self._change(level, key, lambda blob: blob[: int(size * len(blob))])

    @rule(level=st.integers(0, 2), key=st.sampled_from(KEYS), other=st.sampled_from(KEYS))
    def swap(self, level: int, key: bytes, other: bytes) -> None:
        """A tier gives one key's value for another."""
        blobs = self._raw(level, [other])
        if other in blobs:
            self._change(level, key, lambda _: blobs[other])

    @rule()
    def restart(self) -> None:
        self.stack.store.close()
        self.stack.open("back", self.queue_bytes)

    @rule()
    def crash(self) -> None:
        """What was in memory only is gone; another process goes on with what lies on the disk at this moment."""
        self.stack.left.append(self.stack.store)
        self.stack.open("back", self.queue_bytes)

    @rule(key=st.sampled_from(KEYS), value=values.filter(lambda value: len(value) < 600))
    def recover(self, key: bytes, value: bytes) -> None:
        """Once everything works again, a new value goes in and is there, also after a restart."""
        self.repair()
        for store in self.stack.left:
            store.close()
        self.stack.left.clear()
        self.put({key: value})
        assert self.stack.store.get_many([key], LONG_S) == {key: value}
        wait_until(lambda: self.stack.store.flush(LONG_S))
        self.restart()
        assert self.stack.store.get_many([key], LONG_S) == {key: value}

    def _raw(self, level: int, keys: list[bytes]) -> dict[bytes, bytes]:
        """What lies in a tier, past all that fails."""
        if level == 2:
            return {key: self.stack.kept[key] for key in keys if key in self.stack.kept}
        return self.stack.tiers[level].read(keys, float("inf"))

    def _change(self, level: int, key: bytes, change: Callable[[bytes], bytes]) -> None:
        for blob in self._raw(level, [key]).values():
            if level == 2:
                self.stack.kept[key] = change(blob)
            else:
                self.stack.tiers[level].write({key: change(blob)}, float("inf"))

    @invariant()
    def no_wrong_value(self) -> None:
        for key, value in self.stack.store.get_many(KEYS, LONG_S).items():
            assert value in self.ever[key]

    def teardown(self) -> None:
        self.stack.remove()


TestHealthyStore = HealthyStore.TestCase
TestHealthyStore.settings = SETTINGS
TestFaultyStore = FaultyStore.TestCase
TestFaultyStore.settings = SETTINGS
