"""Files of the guest agent: any bytes, any names, any size, all or nothing, and nothing that could make it wait."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox.guest_process import running_guest, wait_until, with_guest

from moonlet.errors import GuestFileError, StorageError
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import MAX_BODY_BYTES

ODD_NAMES = ["a\nb", "ü 漢 😀", "x\udcff\udc80", 'quote"back\\slash', "\t\x01\x7f", "-rf", ".hidden", "n" * 255]


async def _code(awaitable: object) -> str:
    with pytest.raises(GuestFileError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value.code


@pytest.mark.parametrize(
    "size", [0, 1, MAX_BODY_BYTES - 1, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 5 * MAX_BODY_BYTES + 17]
)
def test_round_trip_at_the_edges_of_a_frame(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)

    async def work(guest: Guest) -> None:
        await guest.write_file("deep/er/file", data)
        assert (tmp_path / "home/deep/er/file").read_bytes() == data
        assert await guest.read_file("deep/er/file") == data
        (tmp_path / "from").write_bytes(data)
        await guest.upload(tmp_path / "from", "up/loaded")
        await guest.download("up/loaded", tmp_path / "to")
        assert (tmp_path / "to").read_bytes() == data
        assert sorted(os.listdir(tmp_path / "home/up")) == ["loaded"]

    with_guest(tmp_path, work)


def test_sixteen_mebibytes_of_everything(tmp_path: Path) -> None:
    data = os.urandom(16 << 20)

    async def work(guest: Guest) -> None:
        await guest.write_file("big", data)
        assert await guest.read_file("big") == data
        result = await guest.exec("sha256sum big")
        assert result.text.split()[0] == hashlib.sha256(data).hexdigest()

    with_guest(tmp_path, work)


def test_odd_names(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        for name in ODD_NAMES:
            await guest.write_file(name, name.encode("utf-8", "surrogateescape"))
        assert {info.name for info in await guest.list_files()} == set(ODD_NAMES)
        assert {os.fsdecode(name) for name in os.listdir(os.fsencode(tmp_path / "home"))} == set(ODD_NAMES)
        for name in ODD_NAMES:
            assert await guest.read_file(name) == os.fsencode(name)
            assert (await guest.stat(name)).name == name
            result = await guest.exec(["cat", "--", name])
            assert result.stdout == os.fsencode(name)
            await guest.rename(name, name[:200] + "2")
            await guest.remove(name[:200] + "2")
        assert await guest.list_files() == []

    with_guest(tmp_path, work)


def test_paths_that_are_none(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        for path in ("", "a\0b"):
            assert await _code(guest.read_file(path)) == "EINVAL"
        assert await _code(guest.read_file("x" * 300)) == "ENAMETOOLONG"
        assert await _code(guest.read_file("x/" * 3000)) == "ENAMETOOLONG"
        assert await _code(guest.read_file("absent")) == "ENOENT"
        assert await _code(guest.read_file(".")) == "EISDIR"
        assert await _code(guest.write_file(".", b"")) == "EISDIR"
        assert await _code(guest.stat("absent")) == "ENOENT"
        assert await _code(guest.remove("absent")) == "ENOENT"
        assert await _code(guest.list_files("absent")) == "ENOENT"
        assert await _code(guest.rename("absent", "b")) == "ENOENT"
        await guest.write_file("file", b"")
        for bad in (guest.write_file("file/below", b""), guest.make_dir("file/below"), guest.list_files("file")):
            assert await _code(bad) == "ENOTDIR"
        assert await _code(guest.make_dir("file")) == "EEXIST"

    with_guest(tmp_path, work)


def test_no_file_can_make_the_agent_wait(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        os.mkfifo(tmp_path / "home" / "fifo")
        assert await _code(guest.read_file("fifo")) == "EINVAL"
        assert await _code(guest.stream.call("write", body=b"x", path="fifo")) in ("ENXIO", "EINVAL")
        assert await _code(guest.read_file("/dev/zero")) == "EINVAL"
        await guest.write_file("fifo", b"a file now")
        assert await guest.read_file("fifo") == b"a file now"
        assert (await guest.read_file("/proc/self/stat")).split()[0].isdigit()  # of no size, yet with bytes
        os.symlink("loop", tmp_path / "home" / "loop")
        assert await _code(guest.read_file("loop")) == "ELOOP"

    with_guest(tmp_path, work)


def test_modes_and_links(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def work(guest: Guest) -> None:
        await guest.write_file("new", b"")
        assert stat.S_IMODE((home / "new").stat().st_mode) == 0o644
        await guest.write_file("tool", b"#!/bin/sh\necho ran\n", mode=0o750)
        assert (await guest.exec(["./tool"])).stdout == b"ran\n"
        await guest.write_file("tool", b"#!/bin/sh\necho again\n")
        assert (await guest.exec(["./tool"])).stdout == b"again\n"  # it kept its mode
        os.mkdir(home / "real")
        (home / "real" / "target").write_text("old")
        os.symlink("real/target", home / "link")
        await guest.write_file("link", b"new")
        assert (home / "link").is_symlink() and (home / "real" / "target").read_bytes() == b"new"
        await guest.write_file("link", b"z" * (MAX_BODY_BYTES + 1))
        assert (home / "link").is_symlink() and (home / "real" / "target").stat().st_size == MAX_BODY_BYTES + 1
        info = await guest.stat("link")
        assert (info.kind, info.link_target) == ("symlink", "real/target")
        await guest.remove("link")
        assert (home / "real" / "target").exists()

    with_guest(tmp_path, work)


def test_listings(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def work(guest: Guest) -> None:
        for path in ("b/c/d/file", "a", "b.txt", "b/z"):
            await guest.write_file(path, b"123")
        os.symlink(".", home / "loop")
        names = [os.path.relpath(info.path, home) for info in await guest.list_files(depth=9)]
        assert names == ["a", "b", "b/c", "b/c/d", "b/c/d/file", "b/z", "b.txt", "loop"]
        assert [info.name for info in await guest.list_files("b", depth=2)] == ["c", "d", "z"]
        info = (await guest.list_files("./b/c/d/"))[0]
        found = (home / "b/c/d/file").stat()
        assert (info.path, info.kind, info.size, info.mode) == (str(home / "b/c/d/file"), "file", 3, found.st_mode)
        assert abs(info.mtime - found.st_mtime) < 1e-3 and (info.owner, info.group) == (found.st_uid, found.st_gid)
        assert {info.kind for info in await guest.list_files("/dev") if info.name in ("null", "pts")} == {
            "other",
            "dir",
        }

    with_guest(tmp_path, work)


def test_a_huge_directory_comes_in_pages(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def work(guest: Guest) -> None:
        (home / "many").mkdir()
        for i in range(6001):
            (home / "many" / f"{i}-{'x' * 90}").touch()
        for i in range(40):
            (home / "many" / "0" / str(i)).mkdir(parents=True)
            (home / "many" / "0" / str(i) / "leaf").touch()
        names = [info.name for info in await guest.list_files("many")]
        assert names == sorted(os.listdir(home / "many"), key=os.fsencode) and len(names) == 6002
        assert len(await guest.list_files("many", depth=3)) == 6002 + 80
        small = await guest.stream.call("list", path="many", depth=3, limit=7, after="0/5/leaf")
        assert [Path(item["path"]).name for item in small.objects("entries")] == [
            "6",
            "leaf",
            "7",
            "leaf",
            "8",
            "leaf",
            "9",
        ]
        await guest.remove("many")
        assert os.listdir(home) == []

    with_guest(tmp_path, work)


def test_removal_of_trees(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()

    async def work(guest: Guest) -> None:
        await guest.exec(
            "mkdir -p t/locked/in; touch t/locked/in/file; chmod 0 t/locked/in t/locked; ln -s ../../outside t/link"
        )
        await guest.exec("i=0; while [ $i -lt 300 ]; do mkdir d; cd d; touch f; i=$((i+1)); done", cwd="t")
        await guest.remove("t")
        assert os.listdir(home) == [] and (tmp_path / "outside" / "precious").exists()

    with_guest(tmp_path, work)


def test_the_agent_serves_while_it_removes(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def work(guest: Guest) -> None:
        for folder in range(20):
            (home / "t" / str(folder)).mkdir(parents=True)
            for i in range(300):
                (home / "t" / str(folder) / str(i)).touch()
        removal = asyncio.ensure_future(guest.remove("t"))
        await guest.list_files("/")
        await removal
        assert os.listdir(home) == []

    with_guest(tmp_path, work)


def test_an_upload_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (1 << 20)
        raise ValueError("the source broke")

    async def work(guest: Guest) -> None:
        await guest.write_file("file", b"old")
        with pytest.raises(ValueError, match="broke"):
            await guest.upload(broken(), "file")
        await wait_until(lambda: os.listdir(home) == ["file"])
        assert await guest.read_file("file") == b"old"

    with_guest(tmp_path, work)


def test_a_download_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        (tmp_path / "target").write_text("old")
        assert await _code(guest.download("absent", tmp_path / "target")) == "ENOENT"
        await guest.write_file("there", b"x")
        for unreadable in (tmp_path / "absent", tmp_path):
            with pytest.raises(StorageError, match="cannot read"):
                await guest.upload(unreadable, "there")
        with pytest.raises(StorageError, match="cannot write"):
            await guest.download("there", tmp_path / "no folder" / "target")
        assert (tmp_path / "target").read_text() == "old"
        assert sorted(os.listdir(tmp_path)) == ["from_guest", "home", "target", "to_guest"]

    with_guest(tmp_path, work)


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the same path through the agent, without root."""

    async def run() -> None:
        import resource

        async with running_guest(tmp_path) as guest:
            pid = int((await guest.exec("ps -o ppid= -p $PPID")).text)
            await guest.write_file("file", b"old")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
            for size in (200_000, 2_000_000):
                assert await _code(guest.write_file("file", b"x" * size)) == "EFBIG"
            await wait_until(lambda: os.listdir(tmp_path / "home") == ["file"])
            assert await guest.read_file("file") == b"old"

    asyncio.run(run())


def test_a_file_that_shrinks_and_grows_while_it_is_read(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        file = tmp_path / "home" / "file"
        file.write_bytes(b"a" * (3 << 20))
        pieces = guest.stream_file("file")
        assert len(await anext(pieces)) == MAX_BODY_BYTES
        os.truncate(file, MAX_BODY_BYTES + 10)
        rest = [len(piece) async for piece in pieces]
        assert sum(rest) <= 3 << 20

    with_guest(tmp_path, work)
