"""Snapshots in a shared directory and in S3 (moto's server): whole or invisible, holes kept, damage found."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonlet.errors import SandboxNotFoundError, SnapshotError, StorageError
from moonlet.sandbox import snapshots
from moonlet.sandbox.object_store import open_store
from moonlet.sandbox.snapshots import CHUNK_BYTES, SnapshotRepository

HOLE = 64 << 20


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 server of moto in this process."""
    from moto.server import ThreadedMotoServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "shared" / "snapshots")
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


def write_image(folder: Path, seed: int = 1) -> None:
    """What an image may hold: RAM with holes, small files, links, modes, odd names, overlay marks."""
    folder.mkdir(parents=True)
    block = hashlib.sha256(bytes([seed])).digest() * (CHUNK_BYTES // 16)
    with open(folder / "ram", "wb") as file:
        file.truncate(HOLE)
        file.seek(HOLE // 2 + 12345)
        file.write(block)
    upper = folder / "upper"
    upper.mkdir()
    for number in range(50):
        (upper / f"file {number}").write_bytes(bytes([number]) * number * 100)
    (upper / "tool").write_text("#!/bin/sh\n")
    (upper / "tool").chmod(0o4755)
    os.link(upper / "tool", upper / "tool too")
    (upper / "link").symlink_to("/etc/passwd")
    (upper / os.fsdecode(b"not \xff utf-8\n")).write_bytes(b"odd")
    os.mkfifo(upper / "pipe")
    (upper / "closed").mkdir()
    (upper / "closed" / "inside").write_text("x")
    (upper / "closed").chmod(0o500)
    os.mknod(upper / "gone", stat.S_IFCHR, 0)
    os.setxattr(upper, "user.overlay.opaque", b"y")
    os.utime(upper / "tool", ns=(1, 1_000_000_007))


def describe(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        attributes = [] if path.is_symlink() else [(name, os.getxattr(path, name)) for name in os.listxattr(path)]
        found[str(path.relative_to(folder))] = (
            *(status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_rdev, status.st_mtime_ns),
            *(content, tuple(attributes)),
        )
    return found


def piece_keys(url: str) -> list[str]:
    return [blob.key for blob in open_store(url).list("objects")]


def leftovers(url: str) -> list[str]:
    store = open_store(url)
    return [blob.key for kind in ("uploads", "collectors") for blob in store.list(kind)]


def test_a_folder_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        stored = await repository.put("snap-1", tmp_path / "image")
        assert await repository.list() == [stored]
        await repository.fetch("snap-1", tmp_path / "deep" / "copy")

    asyncio.run(run())
    copy = tmp_path / "deep" / "copy"
    assert describe(copy) == describe(tmp_path / "image")
    assert (copy / "ram").stat().st_blocks * 512 <= 3 * CHUNK_BYTES, "holes are kept"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert [path.name for path in copy.parent.iterdir()] == ["copy"], "nothing unfinished is left"
    assert leftovers(url) == []


def test_a_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    write_image(tmp_path / "image")
    asyncio.run(SnapshotRepository(tmp_path / "shared").put("one", tmp_path / "image"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "shared").rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "shared").rglob("*") if path.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})


def test_snapshots_share_what_is_equal(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        await repository.put("one", tmp_path / "image")
        before = piece_keys(url)
        (tmp_path / "image" / "upper" / "file 7").write_bytes(b"changed")
        await repository.put("two", tmp_path / "image")
        assert len(piece_keys(url)) == len(before) + 1, "only the piece of the small files is new"
        await repository.remove("one")
        await repository.remove("one")
        with pytest.raises(SandboxNotFoundError, match="no snapshot one"):
            await repository.fetch("one", tmp_path / "copy")
        await repository.fetch("two", tmp_path / "copy")
        await repository.remove("two")
        assert piece_keys(url) == []

    asyncio.run(run())
    assert describe(tmp_path / "copy") == describe(tmp_path / "image")


@pytest.mark.parametrize("damage", ["changed", "short", "missing"])
def test_a_damaged_piece_is_an_error(url: str, tmp_path: Path, damage: str) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        await repository.put("one", tmp_path / "image")
        store = open_store(url)
        key = piece_keys(url)[0]
        data = store.read(key)
        if damage == "missing":
            store.remove(key)
        else:
            store.write(key, data[:-9] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(SnapshotError, match=key.split("/")[-1]):
            await repository.fetch("one", tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) in (["image"], ["image", "shared"])


def test_a_damaged_manifest_is_an_error_and_frees_nothing(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        await repository.put("one", tmp_path / "image")
        await repository.put("two", tmp_path / "image")
        pieces = piece_keys(url)
        store = open_store(url)
        store.write("snapshots/one", store.read("snapshots/one")[:-3])
        with pytest.raises(SnapshotError, match="manifest of snapshot one"):
            await repository.fetch("one", tmp_path / "copy")
        with pytest.raises(SnapshotError, match="manifest of snapshot one"):
            await repository.sweep()
        await repository.remove("two")
        assert piece_keys(url) == pieces, "nobody knows what the damaged one needs"
        await repository.remove("one")
        assert piece_keys(url) == []

    asyncio.run(run())


def test_the_same_content_at_once(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        puts = [SnapshotRepository(url).put(f"snap-{number}", tmp_path / "image") for number in range(4)]
        same = [SnapshotRepository(url).put("same", tmp_path / "image") for _ in range(2)]
        await asyncio.gather(*puts, *same)
        repository = SnapshotRepository(url)
        assert {snapshot.id for snapshot in await repository.list()} == {*(f"snap-{n}" for n in range(4)), "same"}
        await repository.fetch("same", tmp_path / "copy")

    asyncio.run(run())
    assert describe(tmp_path / "copy") == describe(tmp_path / "image")


def test_removal_and_upload_of_the_same_pieces(url: str, tmp_path: Path) -> None:
    """What a removal frees is what the other snapshot needs: whoever comes second waits."""
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        await repository.put("kept-0", tmp_path / "image")
        for number in range(5):
            await asyncio.gather(
                SnapshotRepository(url).remove(f"kept-{number}"),
                SnapshotRepository(url).put(f"kept-{number + 1}", tmp_path / "image"),
            )
            await repository.fetch(f"kept-{number + 1}", tmp_path / f"copy-{number}")

    asyncio.run(run())
    assert leftovers(url) == []


def test_a_cancelled_upload_is_invisible_and_swept(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")

    async def run() -> None:
        repository = SnapshotRepository(url)
        upload = asyncio.create_task(repository.put("one", tmp_path / "image"))
        while not await asyncio.to_thread(piece_keys, url) and not upload.done():
            await asyncio.sleep(0)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        if upload.cancelled():
            assert await repository.list() == []
            assert await repository.sweep() >= 1
            assert piece_keys(url) == []

    asyncio.run(run())
    assert leftovers(url) == []


def test_a_killed_upload_is_invisible_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "image")
    code = (
        "import asyncio, os, sys\nfrom moonlet.sandbox import snapshots\n"
        "def die(*_): os.kill(os.getpid(), 9)\nsnapshots._manifest = die\n"
        "asyncio.run(snapshots.SnapshotRepository(sys.argv[1]).put('one', snapshots.Path(sys.argv[2])))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "shared", tmp_path / "image"])
    assert done.returncode == -signal.SIGKILL
    repository = SnapshotRepository(tmp_path / "shared")
    assert asyncio.run(repository.list()) == [] and len(piece_keys(repository.url)) > 0
    monkeypatch.setattr(snapshots, "_COLLECT_WAIT_S", 0)
    assert asyncio.run(repository.sweep()) == 0, "its lease may be that of a living host"
    os.utime(next((tmp_path / "shared" / "uploads").iterdir()), (0, 0))
    (tmp_path / "shared" / ".unfinished" / "tmpxyz").touch()
    os.utime(tmp_path / "shared" / ".unfinished" / "tmpxyz", (0, 0))
    pieces = len(piece_keys(repository.url))
    assert asyncio.run(repository.sweep()) == pieces + 1
    assert piece_keys(repository.url) == leftovers(repository.url) == []


def test_an_upload_that_was_given_up_does_not_pretend(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "image")
    repository = SnapshotRepository(url)
    store = open_store(url)

    def scan(folder: Path, entries: list) -> list:
        for blob in store.list("uploads"):
            store.remove(blob.key)
        return []

    monkeypatch.setattr(snapshots, "_cut", scan)
    with pytest.raises(StorageError, match="put it again"):
        asyncio.run(repository.put("one", tmp_path / "image"))
    assert asyncio.run(repository.list()) == []


@pytest.mark.parametrize(
    "path, kind, target",
    [
        ("../out", "file", ""),
        ("/out", "file", ""),
        ("a/../../out", "file", ""),
        ("way/out", "file", ""),
        ("out", "link", "../../passwd"),
        ("out", "device", ""),
        ("out\0", "file", ""),
    ],
)
def test_a_manifest_cannot_reach_outside(tmp_path: Path, path: str, kind: str, target: str) -> None:
    repository = SnapshotRepository(tmp_path / "shared")
    entries = [
        snapshots.Entry("a", "dir", 0o700),
        snapshots.Entry("way", "symlink", target=str(tmp_path)),
        snapshots.Entry(path, kind, 0o600, target=target),
    ]
    stored = snapshots.StoredSnapshot("one", 0.0, 0, 1)
    open_store(tmp_path / "shared").write("snapshots/one", snapshots._manifest(stored, entries))
    with pytest.raises(SnapshotError):
        asyncio.run(repository.fetch("one", tmp_path / "copy"))
    assert [item.name for item in tmp_path.iterdir()] == ["shared"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x\n", "ü"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxNotFoundError, match="no name"):
        asyncio.run(SnapshotRepository(tmp_path).fetch(name, tmp_path / "copy"))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """Of the store while putting, of the target while fetching."""
    write_image(tmp_path / "image")
    (tmp_path / "image" / "noise").write_bytes(os.urandom(3 << 20))
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", small], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(StorageError, match="No space left"):
            asyncio.run(SnapshotRepository(small / "shared").put("one", tmp_path / "image"))
        assert asyncio.run(SnapshotRepository(small / "shared").list()) == []
        repository = SnapshotRepository(tmp_path / "shared")
        asyncio.run(repository.put("one", tmp_path / "image"))
        with pytest.raises(StorageError, match="No space left"):
            asyncio.run(repository.fetch("one", small / "copy"))
        assert [item.name for item in small.iterdir()] == ["shared"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_store_that_is_not_there(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "image")
    wrong = "s3://no-such-bucket-here/x" if url.startswith("s3") else "/proc/nothing/here"
    with pytest.raises(StorageError, match="cannot write"):
        asyncio.run(SnapshotRepository(wrong).put("one", tmp_path / "image"))
    with pytest.raises(StorageError, match=r"no place for snapshots.*s3://"):
        SnapshotRepository("nonsense://bucket")
