"""The state store's contract, the same for every kind of tier; deadlines; names of stores."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from scripted_tier import ScriptedTier
from store_servers import mooncake_master, redis_server, running, s3_server, wait_until

from moonlet.errors import ConfigError, StorageError
from moonlet.serve.state_store import (
    DiskTier,
    GuardedTier,
    Patience,
    RamTier,
    StateStore,
    Tier,
    TieredStore,
    open_store,
)
from moonlet.serve.state_store.archive_tier import ArchiveTier
from moonlet.serve.state_store.frame import seal
from moonlet.serve.state_store.mooncake_tier import MooncakeConfig, MooncakeTier
from moonlet.serve.state_store.opening import parse_bytes
from moonlet.serve.state_store.redis_tier import RedisTier

LONG_S = 60.0  # a deadline that no healthy tier misses
SHORT_S = 0.2  # one that a hanging tier misses
AT_MOST_S = 20.0  # how long a call with the short deadline may take on a busy machine; a hang takes for ever
OFF = Patience(1000.0, 1000.0)
BRIEF = Patience(0.001, 0.001)
KINDS = ["ram", "disk", "scripted", "redis", "redis in parts", "s3", "mooncake"]


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def value(number: int, num_bytes: int = 1000) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(num_bytes)


@pytest.fixture(scope="module")
def new_tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tier]]:
    """Makes an empty tier of a kind; servers start when they are first needed."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, str] = {}
        patch = stack.enter_context(pytest.MonkeyPatch.context())

        def address(kind: str) -> str:
            if kind not in servers:
                folder = tmp_path_factory.mktemp(kind)
                if kind == "redis":
                    servers[kind] = f"redis://127.0.0.1:{stack.enter_context(running(redis_server(folder))).port}"
                elif kind == "mooncake":
                    servers[kind] = f"127.0.0.1:{stack.enter_context(running(mooncake_master(folder))).port}"
                    lender = MooncakeTier(MooncakeConfig(servers[kind], segment_bytes=64 << 20))
                    lender.contains([key(0)], 0.0)  # joins the pool
                    stack.callback(lender.close)
                else:
                    servers[kind] = stack.enter_context(s3_server(patch))
            return servers[kind]

        def make(kind: str) -> Tier:
            unique = f"t{time.monotonic_ns()}"
            match kind.split()[0]:
                case "ram":
                    return RamTier(64 << 20)
                case "disk":
                    return DiskTier(tmp_path_factory.mktemp("tier") / "states", 64 << 20)
                case "redis":
                    part_bytes = 300 if kind.endswith("parts") else 16 << 20
                    return RedisTier(address("redis"), prefix=unique, part_bytes=part_bytes)
                case "s3":
                    return ArchiveTier(f"{address('s3')}/{unique}")
                case "mooncake":
                    return MooncakeTier(MooncakeConfig(address("mooncake"), buffer_bytes=32 << 20, prefix=unique))
            return ScriptedTier()

        yield make


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, new_tier: Callable[[str], Tier]) -> Tier:
    return new_tier(request.param)


@pytest.fixture(params=["alone", "below RAM"])
def store(request: pytest.FixtureRequest, tier: Tier) -> Iterator[StateStore]:
    made = GuardedTier(tier) if request.param == "alone" else TieredStore([RamTier(2500, name="first"), tier])
    yield made
    made.close()


# Every kind of tier


def test_values_come_back(store: StateStore) -> None:
    items = {key(n): value(n, size) for n, size in enumerate([0, 1, 299, 300, 301, 1000, 5000, 200_000])}
    store.put_many(items, LONG_S)
    assert store.get_many([*items, key(100)], LONG_S) == items
    assert store.contains_many([key(100), *items], LONG_S) == items.keys()
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.writes) == (8, 1, 8)
    assert not stats.failures and not stats.corrupt and not stats.dropped and not stats.late


def test_nothing_is_asked_for_nothing(store: StateStore) -> None:
    store.put_many({}, LONG_S)
    store.delete_many([], LONG_S)
    assert store.get_many([], LONG_S) == {} and store.contains_many([], LONG_S) == set()
    assert not store.stats().failures


def test_the_last_value_counts(store: StateStore) -> None:
    """Also where a value in parts follows one in a piece, and a large one a small one."""
    for size in (100, 3000, 200, 700, 50, 4000):
        for seed in (1, 2):
            store.put_many({key(1): value(seed, size)}, LONG_S)
            assert store.get_many([key(1)], LONG_S) == {key(1): value(seed, size)}


def test_deleted_values_are_gone(store: StateStore) -> None:
    items = {key(n): value(n) for n in range(6)}
    store.put_many(items, LONG_S)
    store.delete_many([key(0), key(3), key(100)], LONG_S)
    store.delete_many([key(0)], LONG_S)
    kept = {key(n): value(n) for n in (1, 2, 4, 5)}
    assert store.get_many(list(items), LONG_S) == kept
    assert store.contains_many(list(items), LONG_S) == kept.keys()
    store.put_many({key(0): value(7)}, LONG_S)
    assert store.get_many([key(0)], LONG_S) == {key(0): value(7)}


@pytest.mark.parametrize("bad", [b"", b"x" * 65])
@pytest.mark.parametrize("method", ["get_many", "put_many", "contains_many", "delete_many"])
@pytest.mark.parametrize("make", [GuardedTier, lambda tier: TieredStore([tier])], ids=["alone", "tiered"])
def test_keys_of_a_wrong_length_are_a_mistake(bad: bytes, method: str, make: Callable[[Tier], StateStore]) -> None:
    store = make(RamTier(100))
    with pytest.raises(ValueError, match="1 to 64"):
        getattr(store, method)({bad: b""}, 1.0)
    store.close()


def damage(how: str, tier: Tier) -> None:
    """Change what lies under key 1."""
    blob = tier.read([key(1)], float("inf"))[key(1)]
    changed = bytearray(blob)
    if how.startswith("flip"):
        changed[{"flip head": 2, "flip size": 5, "flip checksum": 20, "flip value": 700}[how]] ^= 1
    damaged = {"cut": blob[:-1], "cut short": blob[:20], "empty": b"", "longer": blob + b"\0"}
    of_another_key = seal(key(2), value(1))
    tier.write({key(1): damaged.get(how, of_another_key if how == "moved" else bytes(changed))}, float("inf"))


@pytest.mark.parametrize(
    "how", ["flip head", "flip size", "flip checksum", "flip value", "cut", "cut short", "empty", "longer", "moved"]
)
def test_a_damaged_value_is_a_miss_and_is_removed(tier: Tier, how: str) -> None:
    if how == "empty" and tier.name == "mooncake":
        pytest.skip("Mooncake keeps no empty objects")
    store = GuardedTier(tier)
    store.put_many({key(1): value(1), key(2): value(2)}, LONG_S)
    damage(how, tier)
    assert store.get_many([key(1), key(2)], LONG_S) == {key(2): value(2)}
    assert store.stats().corrupt == 1 and not store.stats().failures
    assert store.contains_many([key(1)], LONG_S) == set()
    store.put_many({key(1): value(1)}, LONG_S)
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    store.close()


def test_a_closed_store_finds_nothing_and_raises_nothing(store: StateStore) -> None:
    store.put_many({key(1): value(1)}, LONG_S)
    store.close()
    store.close()
    assert store.get_many([key(1)], LONG_S) == {} and store.contains_many([key(1)], LONG_S) == set()
    store.put_many({key(2): value(2)}, LONG_S)
    store.delete_many([key(1)], LONG_S)


# Moving down and up


def test_ram_passes_down_what_it_cannot_hold() -> None:
    below = ScriptedTier()
    store = TieredStore([RamTier(5000), below])
    items = {key(n): value(n) for n in range(40)}
    store.put_many(items, LONG_S)
    assert store.get_many(list(items), LONG_S) == items
    assert store.flush(LONG_S)
    assert below.blobs == {k: seal(k, v) for k, v in items.items()}
    assert store.stats().tiers["ram"].held_bytes <= 5000
    assert store.stats().tiers["ram"].evictions >= 36
    store.close()


def test_a_value_too_large_for_a_tier_goes_below_it() -> None:
    first, below = RamTier(500), ScriptedTier()
    store = TieredStore([first, below])
    store.put_many({key(1): b"small"}, LONG_S)
    store.put_many({key(1): value(1)}, LONG_S)
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    assert store.flush(LONG_S) and below.blobs == {key(1): seal(key(1), value(1))}
    store.close()


def test_hits_move_up_and_are_not_written_down_again() -> None:
    below = ScriptedTier(blobs={key(n): seal(key(n), value(n)) for n in range(10)})
    store = TieredStore([RamTier(3000), below])
    for n in (0, 1, 0, 1):
        assert store.get_many([key(n)], LONG_S) == {key(n): value(n)}
    assert below.calls.count("read") == 2 and store.stats().promoted == 2
    store.get_many([key(n) for n in range(10)], LONG_S)
    assert store.flush(LONG_S)
    assert "write" not in below.calls
    store.close()


def test_a_hit_moves_up_into_a_first_tier_that_blocks(tmp_path: Path) -> None:
    below = ScriptedTier(blobs={key(1): seal(key(1), value(1))})
    disk = DiskTier(tmp_path, 1 << 20)
    store = TieredStore([disk, below])
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    wait_until(lambda: disk.contains([key(1)], 0.0))
    below.failing = {"read"}
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    store.close()


def test_write_through_reaches_every_tier_before_it_returns() -> None:
    second, third = ScriptedTier("second"), ScriptedTier("third")
    store = TieredStore([RamTier(1 << 20), second, third], write="through")
    store.put_many({key(1): value(1)}, LONG_S)
    assert second.blobs == third.blobs == {key(1): seal(key(1), value(1))}
    store.close()


def test_write_back_touches_lower_tiers_only_on_eviction_and_flush() -> None:
    below = ScriptedTier()
    store = TieredStore([RamTier(1 << 20), below])
    store.put_many({key(n): value(n) for n in range(10)}, LONG_S)
    assert store.get_many([key(3)], LONG_S) and below.calls == []
    assert store.flush(LONG_S) and len(below.blobs) == 10
    store.close()


def test_closing_flushes() -> None:
    below = ScriptedTier()
    store = TieredStore([RamTier(1 << 20), below])
    store.put_many({key(1): value(1)}, LONG_S)
    store.close()
    assert below.blobs == {key(1): seal(key(1), value(1))}


def test_a_store_in_memory_alone_says_that_it_cannot_flush() -> None:
    store = TieredStore([RamTier(1 << 20)])
    assert not store.flush(LONG_S)
    store.close()


def test_a_batch_that_breaks_off_goes_on_to_the_next_tier() -> None:
    second, third = ScriptedTier("second"), ScriptedTier("third")
    second.blobs_until_full = 3
    store = TieredStore([RamTier(1 << 20), second, third], patience=BRIEF)
    items = {key(n): value(n) for n in range(10)}
    store.put_many(items, LONG_S)
    assert store.flush(LONG_S)
    stats = store.stats()
    assert stats.tiers["second"].failures == 1 and not stats.dropped
    assert len(second.blobs) == 3 and third.blobs.keys() == items.keys()
    store.close()


# Tiers that fail and hang


def test_a_failing_tier_is_a_counted_miss_and_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    tier = ScriptedTier()
    tier.failing = {"read"}
    store = TieredStore([RamTier(1 << 20), tier], patience=OFF)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert store.get_many([key(1)], LONG_S) == {}
    stats = store.stats().tiers["scripted"]
    assert (stats.failures, stats.skipped, stats.misses, tier.calls) == (1, 4, 5, ["read"])
    assert [record.message.startswith("state store, scripted, reads") for record in caplog.records] == [True]
    store.close()


def test_a_tier_that_cannot_write_is_still_read() -> None:
    tier = ScriptedTier(blobs={key(1): seal(key(1), value(1))})
    tier.failing = {"write"}
    store = GuardedTier(tier, patience=OFF)
    store.put_many({key(2): value(2)}, LONG_S)
    store.put_many({key(3): value(3)}, LONG_S)
    assert store.get_many([key(1), key(2)], LONG_S) == {key(1): value(1)}
    stats = store.stats()
    assert (stats.failures, stats.skipped, stats.dropped, tier.calls) == (1, 1, 2, ["write", "read"])
    store.close()


def test_a_tier_comes_back_after_its_pause() -> None:
    tier = ScriptedTier(blobs={key(1): seal(key(1), value(1))})
    tier.failing = {"read"}
    store = GuardedTier(tier, patience=BRIEF)
    assert store.get_many([key(1)], LONG_S) == {}
    tier.failing = set()
    wait_until(lambda: store.get_many([key(1)], LONG_S) == {key(1): value(1)})
    store.close()


def test_pauses_grow_up_to_a_limit() -> None:
    patience = Patience(0.5, 30.0)
    assert [patience.pause_s(n) for n in (1, 2, 3, 7, 8, 5000)] == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_a_hanging_tier_costs_one_deadline_and_then_nothing() -> None:
    hanging = ScriptedTier("hanging", blobs={key(1): seal(key(1), value(1))})
    below = ScriptedTier("below", blobs={key(2): seal(key(2), value(2))})
    store = TieredStore([RamTier(1 << 20), hanging, below], patience=BRIEF)
    hanging.hang()
    assert timed(lambda: store.get_many([key(1), key(2)], SHORT_S)) < AT_MOST_S
    # Its call still goes on, so it is not asked again, however long ago that began; the tier below is.
    for _ in range(3):
        assert store.get_many([key(1), key(2)], LONG_S) == {key(2): value(2)}
        time.sleep(0.01)
    stats = store.stats().tiers["hanging"]
    assert (stats.late, stats.failures, hanging.calls) == (1, 0, ["read"]) and stats.skipped == 3
    hanging.release()
    wait_until(lambda: store.get_many([key(1)], LONG_S) == {key(1): value(1)})
    store.close()


def test_callers_that_wait_behind_a_slow_call_give_up_in_time_too() -> None:
    tier = ScriptedTier()
    store = GuardedTier(tier, patience=OFF)
    tier.hang()
    threads = [threading.Thread(target=store.get_many, args=([key(1)], SHORT_S)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AT_MOST_S)
        assert not thread.is_alive()
    stats = store.stats()
    assert stats.late + stats.skipped == 8 and stats.late >= 1 and tier.calls == ["read"]
    tier.release()
    store.close()


@pytest.mark.parametrize("write", ["back", "through"])
def test_every_call_ends_in_time_over_a_tier_that_hangs(write: Literal["back", "through"]) -> None:
    hanging = ScriptedTier("hanging")
    store = TieredStore([hanging, ScriptedTier("below")], write=write, patience=BRIEF)
    hanging.hang()
    assert timed(lambda: store.put_many({key(1): value(1)}, SHORT_S)) < AT_MOST_S
    assert timed(lambda: store.get_many([key(2)], SHORT_S)) < AT_MOST_S
    assert timed(lambda: store.contains_many([key(2)], SHORT_S)) < AT_MOST_S
    assert timed(lambda: store.delete_many([key(2)], SHORT_S)) < AT_MOST_S
    assert timed(store.close) < AT_MOST_S
    hanging.release()


def test_a_deadline_that_is_over_asks_no_tier_that_blocks() -> None:
    tier = ScriptedTier(blobs={key(1): seal(key(1), value(1))})
    store = TieredStore([RamTier(1 << 20), tier], patience=OFF)
    assert store.get_many([key(1)], 0.0) == {} and store.get_many([key(1)], -1.0) == {}
    assert store.stats().tiers["scripted"].late == 2
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    store.close()


def test_a_full_queue_loses_values_and_counts_them_and_never_blocks() -> None:
    hanging = ScriptedTier("hanging")
    store = TieredStore([RamTier(2500), hanging], queue_bytes=5000, patience=BRIEF)
    hanging.hang()
    took_s = timed(lambda: [store.put_many({key(n): value(n)}, SHORT_S) for n in range(50)])
    stats = store.stats()
    assert took_s < AT_MOST_S
    assert stats.overflow + len(store.contains_many([key(n) for n in range(50)], SHORT_S)) == 50
    assert stats.overflow >= 40 and stats.queued_bytes <= 5000
    assert store.get_many([key(49)], SHORT_S) == {key(49): value(49)}
    assert not store.flush(SHORT_S)
    hanging.release()
    store.close()


def test_values_on_their_way_down_are_found() -> None:
    hanging = ScriptedTier("hanging")
    store = TieredStore([RamTier(2500), hanging])
    hanging.hang()
    items = {key(n): value(n) for n in range(20)}
    store.put_many(items, LONG_S)
    assert store.get_many(list(items), SHORT_S) == items
    assert store.contains_many(list(items), SHORT_S) == items.keys()
    hanging.release()
    assert store.flush(LONG_S) and hanging.blobs.keys() == items.keys()
    store.close()


def test_a_value_deleted_on_its_way_down_does_not_come_back() -> None:
    slow = ScriptedTier("slow")
    store = TieredStore([RamTier(2500), slow], patience=BRIEF)
    slow.hang()
    store.put_many({key(n): value(n) for n in range(20)}, LONG_S)
    wait_until(lambda: "write" in slow.calls)
    store.delete_many([key(n) for n in range(15)], SHORT_S)
    kept = {key(n): value(n) for n in range(15, 20)}
    assert store.get_many([key(n) for n in range(20)], SHORT_S) == kept
    slow.release()
    found: list[dict] = []
    wait_until(lambda: found.append(store.get_many([key(n) for n in range(20)], LONG_S)) or found[-1] == kept)
    assert all(each.keys() <= kept.keys() for each in found)
    assert store.flush(LONG_S) and slow.blobs.keys() == kept.keys()
    store.close()


def test_what_was_read_below_does_not_cover_what_was_put_meanwhile() -> None:
    """A read of the old value that ends after a put, or a delete, must not move it up."""
    slow = ScriptedTier("slow", blobs={key(n): seal(key(n), b"old") for n in (1, 2)})
    store = TieredStore([RamTier(1 << 20), slow])
    slow.hang()
    reader = threading.Thread(target=store.get_many, args=([key(1), key(2)], LONG_S))
    reader.start()
    wait_until(lambda: slow.calls)
    store.put_many({key(1): b"new"}, LONG_S)
    deleter = threading.Thread(target=store.delete_many, args=([key(2)], LONG_S))
    deleter.start()
    wait_until(lambda: slow.calls == ["read", "remove"])
    slow.release()
    for thread in (reader, deleter):
        thread.join()
    assert store.get_many([key(1), key(2)], LONG_S) == {key(1): b"new"}
    store.close()


# Names of stores


def test_stores_by_name(tmp_path: Path) -> None:
    names = ["ram:1MiB", f"disk:{tmp_path / 'a'}?size=1MiB", f"disk:{tmp_path / 'b'}"]
    store = open_store(names)
    store.put_many({key(1): value(1)}, LONG_S)
    assert store.flush(LONG_S)
    assert list(store.stats().tiers) == ["ram", "disk", "disk-2"]
    store.close()
    alone = open_store(f"disk:{tmp_path / 'a'}?size=1MiB")
    assert alone.get_many([key(1)], LONG_S) == {key(1): value(1)}
    alone.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rdis://localhost", r"'rdis' is no kind of state store \(did you mean 'redis'\?\)"),
        ("memory", "'memory' is no kind"),
        ("ram:", "'' is no size"),
        ("ram:0", "'0' is no size"),
        ("ram:12 parsecs", "is no size"),
        ("ram:1MiB?size=3", "'size' is no option of ram; it has none"),
        ("disk:", "needs a directory"),
        ("disk:somewhere?sice=1GiB", r"'sice' is no option of disk \(did you mean 'size'\?\)"),
        ("disk:somewhere?size", "are not NAME=VALUE"),
        ("redis:6379", "'redis:6379' is no address: write redis://"),
        ("redis://localhost:port", "address is not understood"),
        ("redis://localhost?ttl_s=-1", "ttl_s = '-1' is no number above zero"),
        ("redis://localhost?ttl_s=soon", "ttl_s = 'soon' is no number above zero"),
        ("s3://", "names no bucket"),
        ("s3:bucket", "'s3:bucket' is no address"),
    ],
)
def test_names_that_make_no_sense(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(name)


def test_other_mistakes_in_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one tier"):
        open_store([])
    with pytest.raises(ConfigError, match="'back' or 'through'"):
        open_store("ram:1MiB", write="around")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different names"):
        TieredStore([RamTier(1), RamTier(1)])
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="name a directory"):
        open_store(f"disk:{tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("text", "size"), [("256MiB", 256 << 20), ("4 GiB", 4 << 30), ("1.5kb", 1500), ("10", 10), ("2TiB", 2 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
