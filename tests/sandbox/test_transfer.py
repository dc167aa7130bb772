"""Folders into a sandbox and out of it, with a guest that lies about its files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from sandbox.managed import managed, new_sandbox
from sandbox.scripted_sandbox import ScriptedHost, ScriptedSandbox

from moonlet.errors import GuestFileError, SandboxError, StorageError
from moonlet.sandbox import transfer
from moonlet.sandbox.api import FileInfo
from moonlet.sandbox.transfer import download_path, upload_path


class LyingSandbox(ScriptedSandbox):
    """Has one folder, with the entries of a test, and answers every download with `content`."""

    def __init__(self, entries: list[FileInfo], content: bytes = b"x") -> None:
        super().__init__(ScriptedHost(), "liar")
        self.entries, self.content = entries, content

    async def stat(self, path: str) -> FileInfo:
        return FileInfo(path, "dir", 0, 0o40755, 0.0)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        return self.entries if path == "t" else []

    async def download(self, path: str, target: Path) -> None:
        target.write_bytes(self.content)


def entry(path: str, kind: Any = "file", mode: int = 0o100644) -> FileInfo:
    return FileInfo(path, kind, 1, mode, 0.0)


@pytest.mark.parametrize("path", ["/workspace/t/..", "/workspace/t/.", "/workspace/t/", "/t/a\0b", ""])
def test_names_that_are_none_stop_the_copy(path: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot be one"):
        asyncio.run(download_path(LyingSandbox([entry("/t/first"), entry(path)]), "t", tmp_path / "copy"))
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_part_of_a_name_counts(tmp_path: Path) -> None:
    """And a file never gets the modes of the guest: no setuid, no locked folders."""
    entries = [entry("/etc/passwd"), entry("../../tool", mode=0o104777), entry("/t/locked", "dir", 0o40000)]
    asyncio.run(download_path(LyingSandbox(entries), "t", tmp_path / "copy"))
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "copy").iterdir()}
    assert modes == {"passwd": 0o644, "tool": 0o755, "locked": 0o755}


def test_links_and_special_files_stay_out(tmp_path: Path) -> None:
    entries = [entry("/t/link", "symlink"), entry("/t/pipe", "other"), entry("/t/file")]
    copied = asyncio.run(download_path(LyingSandbox(entries), "t", tmp_path / "copy"))
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["file"]
    assert copied.skipped == ["/t/link", "/t/pipe"] and copied.num_files == 1


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_a_folder_has_bounds(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, limit, 5)
    entries = [entry(f"/t/{number}") for number in range(10)]
    with pytest.raises(SandboxError, match="holds more than"):
        asyncio.run(download_path(LyingSandbox(entries, b"xx"), "t", tmp_path / "copy"))
    assert list(tmp_path.iterdir()) == []


def test_the_same_name_twice_does_no_harm(tmp_path: Path) -> None:
    """A folder and a file of one name, as no file system has them."""
    with pytest.raises((StorageError, IsADirectoryError, SandboxError)):
        asyncio.run(download_path(LyingSandbox([entry("/t/a", "dir"), entry("/t/a", "dir")]), "t", tmp_path / "copy"))
    assert list(tmp_path.iterdir()) == []


def test_a_whole_folder_there_and_back(tmp_path: Path) -> None:
    source = tmp_path / "source"
    odd = os.fsdecode(b"not \xff utf-8\n")
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / odd).write_bytes(bytes(range(256)))
    (source / "big").write_bytes(os.urandom(700_000))
    (source / "outside").symlink_to("/etc")

    async def run() -> None:
        async with managed(tmp_path / "s") as manager:
            box = await new_sandbox(manager)
            copied = await upload_path(box, source, "there/")
            assert copied.num_files == 2 and len(copied.skipped) == 1
            await download_path(box, "there/source", tmp_path / "back")
            assert (tmp_path / "back" / "deep" / odd).read_bytes() == bytes(range(256))
            assert (tmp_path / "back" / "big").read_bytes() == (source / "big").read_bytes()
            assert (tmp_path / "back" / "deep" / "empty").is_dir() and not (tmp_path / "back" / "outside").exists()
            await download_path(box, "there/source", tmp_path / "back")
            assert (tmp_path / "back" / "source" / "big").exists(), "into the folder that is there"
            with pytest.raises(StorageError, match="there already"):
                await download_path(box, "there/source", tmp_path / "back")
            with pytest.raises(StorageError, match="no file or folder"):
                await upload_path(box, tmp_path / "nothing", "x")
            with pytest.raises(GuestFileError):
                await download_path(box, "nothing", tmp_path / "x")
            assert not any(path.name.startswith(".") for path in tmp_path.iterdir())

    asyncio.run(run())
