"""State stores over real servers (Redis, Mooncake, moto's S3) that die, hang, run full and come back."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_servers import (
    Server,
    free_port,
    mooncake_master,
    need,
    redis_server,
    running,
    s3_server,
    wait_until,
)

from moonlet.errors import ConfigError
from moonlet.serve.state_store import GuardedTier, Patience, StateStore, open_store
from moonlet.serve.state_store.archive_tier import ArchiveTier
from moonlet.serve.state_store.mooncake_tier import MooncakeConfig, MooncakeTier
from moonlet.serve.state_store.redis_tier import RedisTier

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0
SHORT_S = 0.3
AT_MOST_S = 20.0
BRIEF = Patience(0.05, 0.05)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def value(number: int, num_bytes: int = 1000) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(num_bytes)


def in_time(call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = call()
    assert time.monotonic() - began < AT_MOST_S
    return result


def calls_end_in_time_and_find_nothing(store: StateStore) -> None:
    """Whatever is wrong with the server."""
    assert in_time(lambda: store.get_many([key(1)], SHORT_S)) == {}
    in_time(lambda: store.put_many({key(2): value(2)}, SHORT_S))
    in_time(lambda: store.contains_many([key(1)], SHORT_S))
    in_time(lambda: store.delete_many([key(3)], SHORT_S))


# Redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    with running(redis_server(tmp_path)) as server:
        yield server


def redis_url(server: Server) -> str:
    return f"redis://127.0.0.1:{server.port}"


def client_of(server: Server) -> Any:
    import redis as package

    return package.Redis(port=server.port)


def test_a_store_by_name_shares_its_server(redis: Server, tmp_path: Path) -> None:
    """Two hosts with a disk each: what one wrote the other finds."""
    names = [f"redis://127.0.0.1:{redis.port}/3?part=64kb&ttl_s=1000", f"valkey://127.0.0.1:{redis.port}/3"]
    ours = open_store(["ram:1MiB", f"disk:{tmp_path / 'ours'}", names[0]], write="through")
    theirs = open_store(["ram:1MiB", f"disk:{tmp_path / 'theirs'}", names[1]])
    items = {key(n): value(n, 100_000) for n in range(5)}
    ours.put_many(items, LONG_S)
    assert theirs.get_many(list(items), LONG_S) == items
    assert theirs.stats().tiers["valkey"].hits == 5
    database = client_of(redis)
    database.select(3)
    names_there = list(database.scan_iter())
    assert len(names_there) == 5 + 10 and all(0 < database.ttl(name) <= 1000 for name in names_there)
    for store in (ours, theirs):
        store.close()


def test_redis_keeps_a_large_value_in_parts_and_none_of_them_for_longer(redis: Server) -> None:
    store = GuardedTier(RedisTier(redis_url(redis), part_bytes=1000))
    database = client_of(redis)
    for number, size in [(1, 10_000), (2, 5000), (1, 10_000), (3, 100), (4, 7000)]:
        store.put_many({key(1): value(number, size)}, LONG_S)
        assert store.get_many([key(1)], LONG_S) == {key(1): value(number, size)}
        parts = -(-(size + 44) // 1000) if size > 1000 else 0
        assert database.dbsize() == 1 + parts, "parts of an older value are left"
    store.delete_many([key(1)], LONG_S)
    assert database.dbsize() == 0
    store.close()


@pytest.mark.parametrize("how", ["part is gone", "part is changed", "manifest is changed", "manifest is noise", "head"])
def test_a_value_in_parts_is_whole_or_a_miss(redis: Server, how: str) -> None:
    store = GuardedTier(RedisTier(redis_url(redis), part_bytes=1000))
    store.put_many({key(1): value(1, 10_000), key(2): value(2, 10_000)}, LONG_S)
    database = client_of(redis)
    name = b"moonlet:" + key(1).hex().encode()
    part = sorted(database.scan_iter(name + b":*"))[3]
    {
        "part is gone": lambda: database.delete(part),
        "part is changed": lambda: database.setrange(part, 10, b"!"),
        "manifest is changed": lambda: database.set(name, database.get(name).replace(b'"parts": 11', b'"parts": 10')),
        "manifest is noise": lambda: database.set(name, b"M{" + bytes(range(256))),
        "head": lambda: database.setrange(name, 0, b"?"),
    }[how]()
    assert store.get_many([key(1), key(2)], LONG_S) == {key(2): value(2, 10_000)}
    assert (store.stats().corrupt, store.stats().failures) == (1, 0)
    store.put_many({key(1): value(3, 10_000)}, LONG_S)
    assert store.get_many([key(1)], LONG_S) == {key(1): value(3, 10_000)}
    store.close()


def test_a_redis_server_that_dies_and_comes_back(redis: Server) -> None:
    store = GuardedTier(RedisTier(redis_url(redis)), patience=BRIEF)
    store.put_many({key(1): value(1)}, LONG_S)
    redis.kill()
    calls_end_in_time_and_find_nothing(store)
    assert store.stats().failures >= 1 and store.stats().dropped == 1
    redis.start()

    def works() -> bool:
        store.put_many({key(1): value(1)}, LONG_S)
        return store.get_many([key(1)], LONG_S) == {key(1): value(1)}

    wait_until(works)
    store.close()


def test_a_restarted_redis_server_costs_an_idle_store_nothing(redis: Server) -> None:
    """Its connection is closed by then; that is found out and mended within the call."""
    store = GuardedTier(RedisTier(redis_url(redis)))
    store.put_many({key(1): value(1)}, LONG_S)
    redis.kill()
    redis.start()
    store.put_many({key(1): value(1)}, LONG_S)
    assert store.get_many([key(1)], LONG_S) == {key(1): value(1)}
    assert store.stats().failures == 0
    store.close()


def test_a_redis_server_that_hangs(redis: Server) -> None:
    store = GuardedTier(RedisTier(redis_url(redis)), patience=BRIEF)
    store.put_many({key(1): value(1)}, LONG_S)
    redis.send(signal.SIGSTOP)
    calls_end_in_time_and_find_nothing(store)
    assert store.stats().late >= 2
    redis.send(signal.SIGCONT)
    wait_until(lambda: store.get_many([key(1)], LONG_S) == {key(1): value(1)})
    store.close()


def test_a_redis_server_without_room_is_still_read(tmp_path: Path) -> None:
    with running(redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")) as server:
        store = GuardedTier(RedisTier(redis_url(server)), patience=Patience(0.0, 0.0))
        items = {key(n): value(n, 200_000) for n in range(30)}
        for each, data in items.items():
            store.put_many({each: data}, LONG_S)
        found = store.get_many(list(items), LONG_S)
        stats = store.stats()
        assert stats.failures == stats.dropped == 30 - len(found) > 0
        assert found and found.items() <= items.items()
        store.close()


def test_a_redis_server_that_makes_room_gives_misses(tmp_path: Path) -> None:
    with running(redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")) as server:
        store = GuardedTier(RedisTier(redis_url(server), part_bytes=50_000))
        items = {key(n): value(n, 200_000) for n in range(30)}
        for each, data in items.items():
            store.put_many({each: data}, LONG_S)
        found = store.get_many(list(items), LONG_S)
        assert 0 < len(found) < 30 and found.items() <= items.items()
        assert store.stats().failures == 0
        store.close()


def test_a_password_is_in_no_log_and_no_counter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(redis_server(tmp_path, "--requirepass", "open sesame")) as server, caplog.at_level(logging.DEBUG):
        right = open_store(f"redis://:open%20sesame@127.0.0.1:{server.port}")
        right.put_many({key(1): value(1)}, LONG_S)
        assert right.get_many([key(1)], LONG_S) == {key(1): value(1)}
        wrong = open_store(f"redis://:close%20sesame@127.0.0.1:{server.port}")
        assert wrong.get_many([key(1)], LONG_S) == {}
        assert wrong.stats().tiers["redis"].failures == 1
        written = caplog.text + repr(wrong.stats()) + repr(right.stats())
        assert "sesame" not in written and "state store, redis, reads" in caplog.text
        for store in (right, wrong):
            store.close()


def test_a_server_that_was_never_there_is_no_error() -> None:
    store = open_store(["ram:1MiB", f"redis://127.0.0.1:{free_port()}"])
    store.put_many({key(1): value(1)}, LONG_S)
    assert store.get_many([key(1), key(2)], LONG_S) == {key(1): value(1)}
    assert not store.flush(LONG_S) and store.stats().dropped == 1
    in_time(store.close)


# S3


def test_an_archive_outlives_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with s3_server(monkeypatch) as bucket:
        items = {key(n): value(n, 10_000) for n in range(20)}
        first = open_store(["ram:50kB", f"disk:{tmp_path / 'a'}?size=100kB", f"{bucket}/states"])
        first.put_many(items, LONG_S)
        assert first.flush(LONG_S)
        archived = first.stats().tiers["s3"].writes
        assert 10 <= archived < 20, "the archive gets what the disk evicts"
        first.close()
        second = open_store(["ram:1MiB", f"{bucket}/states"])
        found = second.get_many(list(items), LONG_S)
        assert archived <= len(found) < 20 and found.items() <= items.items()
        assert second.flush(LONG_S) and second.stats().tiers["s3"].writes == 0  # all of it is there already
        second.close()


def test_an_archive_without_its_bucket_or_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as bucket:
        store = GuardedTier(ArchiveTier(f"{bucket}-of-nobody/states"), patience=BRIEF)
        assert store.get_many([key(1)], LONG_S) == {}
        store.put_many({key(1): value(1)}, LONG_S)
        assert (store.stats().failures, store.stats().dropped) == (1, 1)
        store.close()
        left = GuardedTier(ArchiveTier(f"{bucket}/states"), patience=BRIEF)
        left.put_many({key(1): value(1)}, LONG_S)
    calls_end_in_time_and_find_nothing(left)
    assert left.stats().failures + left.stats().late >= 1
    left.close()


# Mooncake


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    with running(mooncake_master(tmp_path)) as server:
        yield server


def mooncake_config(server: Server, segment_bytes: int = 16 << 20) -> MooncakeConfig:
    return MooncakeConfig(f"127.0.0.1:{server.port}", segment_bytes=segment_bytes, buffer_bytes=16 << 20)


def start(code: str, argument: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


_OTHER_HOST = """
import sys
from test_state_store_servers import *
store = open_store(f"mooncake://127.0.0.1:{sys.argv[1]}?segment=16MiB&buffer=16MiB")
print(store.get_many([key(1)], LONG_S) == {key(1): value(1, 1 << 20)}, flush=True)
store.put_many({key(2): value(2, 1 << 20)}, LONG_S)
print(len(store.get_many([key(2)], LONG_S)), flush=True)
sys.stdin.read()
"""


def test_the_memory_of_two_hosts_is_one_pool(master: Server) -> None:
    """What one put the other gets. When a host dies its objects are misses, and those of the others are not."""
    store = GuardedTier(MooncakeTier(mooncake_config(master)), patience=BRIEF)
    store.put_many({key(1): value(1, 1 << 20)}, LONG_S)
    other = start(_OTHER_HOST, str(master.port))
    try:
        assert other.stdout is not None
        assert [other.stdout.readline() for _ in range(2)] == ["True\n", "1\n"]
        assert store.get_many([key(2)], LONG_S) == {key(2): value(2, 1 << 20)}
    finally:
        other.kill()
        other.wait()
    found = in_time(lambda: store.get_many([key(1), key(2)], 10.0))
    assert found.items() <= {key(1): value(1, 1 << 20), key(2): value(2, 1 << 20)}.items()
    store.close()


_ORPHAN = """
import gc, sys, threading, time
from test_state_store_servers import *
ticks = []

def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)

threading.Thread(target=tick, daemon=True).start()
store = GuardedTier(MooncakeTier(MooncakeConfig(sys.argv[1], buffer_bytes=16 << 20, segment_bytes=16 << 20)), patience=BRIEF)
store.put_many({key(1): value(1)}, LONG_S)
print(store.get_many([key(1)], LONG_S) == {key(1): value(1)}, flush=True)
sys.stdin.readline()
calls_end_in_time_and_find_nothing(store)
stats = store.stats()
print(stats.failures + stats.late > 0, flush=True)
del ticks[:-1]
store.close()
del store
gc.collect()
time.sleep(0.1)
print(max(later - sooner for sooner, later in zip(ticks, ticks[1:])) < 5.0, flush=True)
os._exit(0)  # its client would wait for the master
"""


def test_a_mooncake_master_that_dies_does_not_hold_up_the_process(master: Server) -> None:
    """Neither while it is asked nor when the store is closed, where its client stops all threads for ten seconds."""
    child = start(_ORPHAN, f"127.0.0.1:{master.port}")
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "True\n"
        master.kill()
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.read() == "True\nTrue\n"
    finally:
        child.kill()
        child.wait()


def test_a_mooncake_master_that_was_never_there(master: Server) -> None:
    """Joining the pool would go on for a minute and a half; nobody waits for that."""
    store = open_store(["ram:1MiB", f"mooncake://127.0.0.1:{free_port()}"])
    assert in_time(lambda: store.get_many([key(1)], LONG_S)) == {}
    assert store.stats().tiers["mooncake"].failures == 1
    in_time(store.close)


def test_a_full_pool_is_a_counted_failure(master: Server) -> None:
    store = GuardedTier(MooncakeTier(mooncake_config(master)), patience=Patience(0.0, 0.0))
    items = {key(n): value(n, 3 << 20) for n in range(8)}
    for each, data in items.items():
        store.put_many({each: data}, LONG_S)
    found = store.get_many(list(items), LONG_S)
    assert 0 < len(found) < 8 and found.items() <= items.items()
    store.put_many({key(9): value(9, 9 << 20)}, LONG_S)  # larger than a client can move
    assert store.get_many([key(9)], LONG_S) == {}
    assert store.stats().dropped >= 1
    store.close()


def test_a_mooncake_address_needs_a_port(master: Server) -> None:
    with pytest.raises(ConfigError, match="mooncake://HOST:PORT"):
        open_store("mooncake://somewhere")
    with pytest.raises(ConfigError, match=r"'segmant' is no option of mooncake \(did you mean 'segment'\?\)"):
        open_store("mooncake://somewhere:1?segmant=1GiB")


def test_without_a_client_of_mooncake_the_message_says_what_to_install() -> None:
    code = "import sys; sys.modules['mooncake.store'] = None\nfrom moonlet.serve.state_store import open_store\nopen_store('mooncake://a:1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "pip install mooncake-transfer-engine where there is CUDA" in done.stderr.replace("\n", " ")


def test_required_servers_fail_where_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONLET_REQUIRE_REDIS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        need(None, "MOONLET_REQUIRE_REDIS", "not here")
    monkeypatch.setenv("MOONLET_REQUIRE_REDIS", "1")
    with pytest.raises(pytest.fail.Exception, match="not here"):
        need(None, "MOONLET_REQUIRE_REDIS", "not here")
