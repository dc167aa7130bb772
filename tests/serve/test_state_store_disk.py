"""States on disk: killed writers, several processes, a full disk, restarts."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_tier import ScriptedTier
from store_servers import wait_until

from moonlet.serve.state_store import DiskTier, GuardedTier, Patience, RamTier, TieredStore
from moonlet.serve.state_store.frame import HEADER_BYTES, is_whole, seal

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def value(number: int, num_bytes: int = 1000) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(num_bytes)


def blob_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if path.is_file()]


def unfinished(folder: Path) -> list[Path]:
    return list((folder / "unfinished").iterdir())


def test_values_survive_a_restart_and_the_oldest_make_room(tmp_path: Path) -> None:
    num_bytes = 10 * (1000 + HEADER_BYTES)
    store = GuardedTier(DiskTier(tmp_path, num_bytes))
    for number in range(10):
        store.put_many({key(number): value(number)}, LONG_S)
        os.utime(next(tmp_path.glob(f"*/{key(number).hex()}")), ns=(number * 10**9, number * 10**9))
    store.close()
    store = GuardedTier(DiskTier(tmp_path, num_bytes))
    assert store.stats().held_bytes == num_bytes
    assert store.get_many([key(0)], LONG_S) == {key(0): value(0)}  # used: no longer the oldest
    store.put_many({key(10): value(10)}, LONG_S)
    # One more than is needed makes room, so that not every write has to.
    assert store.get_many([key(n) for n in range(11)], LONG_S) == {key(n): value(n) for n in (0, *range(3, 11))}
    stats = store.stats()
    assert stats.evictions == 2 and stats.held_bytes == sum(path.stat().st_size for path in blob_files(tmp_path))
    store.close()


def test_a_smaller_limit_holds_from_the_next_write_on(tmp_path: Path) -> None:
    store = GuardedTier(DiskTier(tmp_path, 1 << 20))
    store.put_many({key(n): value(n) for n in range(50)}, LONG_S)
    store.close()
    store = GuardedTier(DiskTier(tmp_path, 5000))
    store.put_many({key(50): value(50)}, LONG_S)
    assert store.get_many([key(50)], LONG_S) == {key(50): value(50)}
    assert sum(path.stat().st_size for path in blob_files(tmp_path)) <= 5000
    store.close()


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    store = GuardedTier(DiskTier(tmp_path / "states", 1 << 20))
    store.put_many({key(1): value(1)}, LONG_S)
    for path in [tmp_path / "states", *(tmp_path / "states").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    store.close()


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path) -> None:
    import shutil

    store = GuardedTier(DiskTier(tmp_path / "states", 1 << 20))
    store.put_many({key(1): value(1)}, LONG_S)
    shutil.rmtree(tmp_path / "states")
    assert store.get_many([key(1)], LONG_S) == {} and not store.stats().failures
    store.put_many({key(2): value(2)}, LONG_S)
    assert store.get_many([key(2)], LONG_S) == {key(2): value(2)}
    store.close()


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_WRITE_FOR_EVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from test_state_store_disk import DiskTier, key, seal, value
tier = DiskTier(Path(sys.argv[1]), 1 << 30)
blob = seal(key(1), value(1, 32 << 20))
print("ready", flush=True)
number = 0
while True:
    tier.write({key(1): blob if number % 2 else seal(key(1), value(2, 32 << 20)), key(100 + number): value(number)}, 0.0)
    number += 1
"""


def start(code: str, *arguments: object) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


def test_a_writer_killed_in_the_middle_leaves_the_old_value_or_the_new(tmp_path: Path) -> None:
    for _ in range(3):
        writer = start(_WRITE_FOR_EVER, tmp_path, Path(__file__).parent)
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            wait_until(lambda: any(size_of(path) > 1 << 20 for path in unfinished(tmp_path)))
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        for path in tmp_path.glob(f"??/{key(1).hex()}"):
            assert is_whole(key(1), path.read_bytes())
    left = unfinished(tmp_path)
    assert left, "no writer was killed in the middle"
    store = GuardedTier(DiskTier(tmp_path, 1 << 30))
    assert set(store.get_many([key(1)], LONG_S).values()) <= {value(1, 32 << 20), value(2, 32 << 20)}
    assert not store.stats().corrupt
    store.close()
    assert unfinished(tmp_path) == left  # young: for all this process knows they are being written
    for path in left:
        os.utime(path, (0, 0))
    DiskTier(tmp_path, 1 << 30)
    assert unfinished(tmp_path) == []


def test_a_file_that_is_being_written_is_not_swept_however_old(tmp_path: Path) -> None:
    import fcntl

    DiskTier(tmp_path, 1 << 20)
    path = tmp_path / "unfinished" / "slow"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(path, (0, 0))
        DiskTier(tmp_path, 1 << 20)
        assert path.exists()


_SHARE = """
import sys
from pathlib import Path
from test_state_store_disk import DiskTier, GuardedTier, key, value
seed, count = int(sys.argv[2]), int(sys.argv[3])
store = GuardedTier(DiskTier(Path(sys.argv[1]), 200_000))
print("ready", flush=True)
wrong = hits = 0
for step in range(count):
    number = (step * (7 + 4 * seed)) % 60
    store.put_many({key(number): value(number, 5000 + number)}, 60.0)
    other = (step * 7 + seed) % 60
    found = store.get_many([key(other)], 60.0)
    hits += len(found)
    wrong += found not in ({}, {key(other): value(other, 5000 + other)})
    if step % 11 == 0:
        store.delete_many([key((step + seed) % 60)], 60.0)
stats = store.stats()
print(wrong, hits > 0, stats.failures, stats.corrupt, stats.evictions > 0)
store.close()
"""


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    """Both write, read, delete and make room; whoever looks at a file at any time finds a whole one."""
    workers = [start(_SHARE, tmp_path, seed, 1500) for seed in (0, 1)]
    try:
        assert [worker.stdout.readline() for worker in workers if worker.stdout] == ["ready\n"] * 2
        looked = most = 0
        while any(worker.poll() is None for worker in workers):
            total = 0
            for path in blob_files(tmp_path):
                try:
                    blob = path.read_bytes()
                except FileNotFoundError:
                    continue
                assert is_whole(bytes.fromhex(path.name), blob)
                looked, total = looked + 1, total + len(blob)
            most = max(most, total)
        assert [worker.stdout.read() for worker in workers if worker.stdout] == ["0 True 0 0 True\n"] * 2
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert looked > 100
    assert most <= 200_000 * (1 + 2 / 8), "two processes exceed the limit by 2/8 at most"
    assert unfinished(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_counted_failure(small_disk: Path) -> None:
    """What was stored before can be read; the rest goes on to the next tier; with room again it is used again."""
    below = ScriptedTier("below")
    disk = DiskTier(small_disk / "states", 64 << 20)
    store = TieredStore([RamTier(64 << 20), disk, below], write="through", patience=Patience(0.001, 0.001))
    items = {key(n): value(n, 200_000) for n in range(8)}
    for each, data in items.items():
        store.put_many({each: data}, LONG_S)
    on_disk = disk.contains(list(items), 0.0)
    stats = store.stats()
    assert stats.tiers["disk"].failures >= 1 and not stats.dropped
    assert 3 <= len(on_disk) < 8 and below.blobs.keys() == items.keys()
    assert unfinished(small_disk / "states") == []
    alone = GuardedTier(DiskTier(small_disk / "states", 64 << 20), patience=Patience(1000.0, 1000.0))
    alone.put_many({key(100): value(100, 500_000)}, LONG_S)
    assert alone.get_many(list(items), LONG_S) == {each: items[each] for each in on_disk}
    assert (alone.stats().failures, alone.stats().dropped) == (1, 1)
    alone.close()
    store.delete_many(list(items), LONG_S)
    time.sleep(0.01)
    store.put_many({key(0): items[key(0)]}, LONG_S)
    assert disk.contains([key(0)], 0.0) == {key(0)}
    store.close()


def test_a_value_that_another_user_spoilt_is_a_miss(tmp_path: Path) -> None:
    """A folder in the place of a file: the tier fails, and nothing else does."""
    store = GuardedTier(DiskTier(tmp_path, 1 << 20), patience=Patience(0.0, 0.0))
    store.put_many({key(1): value(1)}, LONG_S)
    path = next(tmp_path.glob(f"*/{key(1).hex()}"))
    path.unlink()
    path.mkdir()
    assert store.get_many([key(1)], LONG_S) == {}
    assert store.stats().failures == 1
    store.put_many({key(2): value(2)}, LONG_S)
    assert store.get_many([key(2)], LONG_S) == {key(2): value(2)}
    store.close()


def test_frames_know_their_key() -> None:
    frame = seal(key(1), value(1))
    assert is_whole(key(1), frame) and not is_whole(key(2), frame) and not is_whole(key(1)[:-1], frame)
