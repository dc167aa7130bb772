"""Whole folders into a sandbox and out of it. What comes out is of a guest that nobody trusts.

A downloaded folder is built under a temporary name, where no link of ours or theirs lies in the way, and renamed when it
is whole. Names that are none, links and special files never become local files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from moonlet.errors import GuestFileError, SandboxError, StorageError
from moonlet.sandbox.api import FileInfo, Sandbox
from moonlet.sandbox.generations import in_thread, remove_tree

MAX_BYTES = 64 << 30
MAX_FILES = 100_000

Note = Callable[[str, int], None]  # path and size of a file that was copied


@dataclass
class Copied:
    """What a transfer did. `skipped` are links and special files, which are not copied."""

    num_files: int = 0
    num_bytes: int = 0
    skipped: list[str] = field(default_factory=list)

    def add(self, path: str, size: int, note: Note | None) -> None:
        self.num_files += 1
        self.num_bytes += size
        if note:
            note(path, size)


async def upload_path(sandbox: Sandbox, source: Path, path: str, note: Note | None = None) -> Copied:
    """Copy a local file or folder into the sandbox; into the folder `path` if there is one or the path ends with a slash.

    Raises StorageError if the source cannot be read, GuestFileError if the guest cannot write.
    """
    if not await in_thread(os.path.exists, source):
        raise StorageError(f"there is no file or folder {source}")
    target = await _guest_target(sandbox, path, source.resolve().name)
    copied = Copied()
    if not source.is_dir():
        await sandbox.upload(source, target)
        copied.add(target, source.stat().st_size, note)
        return copied
    await sandbox.make_dir(target)
    for folder, names, files in await in_thread(lambda: list(os.walk(source))):
        inside = str(PurePosixPath(target, Path(folder).relative_to(source).as_posix()))
        for name in names:
            if os.path.islink(os.path.join(folder, name)):
                copied.skipped.append(f"{inside}/{name}")
            else:
                await sandbox.make_dir(f"{inside}/{name}")
        for name in files:
            local = Path(folder, name)
            if local.is_symlink() or not local.is_file():
                copied.skipped.append(f"{inside}/{name}")
                continue
            await sandbox.upload(local, f"{inside}/{name}")
            copied.add(f"{inside}/{name}", local.stat().st_size, note)
    return copied


async def download_path(sandbox: Sandbox, path: str, target: Path, note: Note | None = None) -> Copied:
    """Copy a file or folder out of the sandbox; into the folder `target` if there is one.

    A file that is there is replaced, a folder is not. Raises GuestFileError, StorageError, and SandboxError for a folder
    that is larger than MAX_BYTES or MAX_FILES or has names that no file may have.
    """
    found = await sandbox.stat(path)
    name = PurePosixPath(path).name or "root"
    if await in_thread(os.path.isdir, target):
        target = target / ("root" if name in (".", "..") else name)
    if found.kind != "dir":
        if await in_thread(os.path.isdir, target):
            raise StorageError(f"{target} is a folder: name a file, or remove it")
        copied = Copied()
        await sandbox.download(path, target)
        copied.add(str(target), target.stat().st_size, note)
        return copied
    if await in_thread(os.path.lexists, target):
        raise StorageError(f"{target} is there already: remove it, or name another place")
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        copied = await _download_folder(sandbox, path, unfinished, note)
        await in_thread(os.rename, unfinished, target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        await in_thread(remove_tree, unfinished)
    return copied


async def _download_folder(sandbox: Sandbox, path: str, target: Path, note: Note | None) -> Copied:
    copied, seen = Copied(), 0
    pending = [(path, target)]
    while pending:
        inside, folder = pending.pop()
        await in_thread(os.mkdir, folder, 0o755)
        for entry in await sandbox.list_files(inside):
            seen += 1
            local = folder / _checked_name(entry)
            if seen > MAX_FILES or copied.num_bytes > MAX_BYTES:
                raise SandboxError(
                    f"{path} holds more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB: copy parts of it, or an archive"
                )
            if entry.kind == "dir":
                pending.append((entry.path, local))
            elif entry.kind == "file":
                await sandbox.download(entry.path, local)
                await in_thread(os.chmod, local, 0o755 if entry.mode & 0o111 else 0o644)
                copied.add(entry.path, local.stat().st_size, note)
            else:
                copied.skipped.append(entry.path)
    return copied


def _checked_name(entry: FileInfo) -> str:
    name = entry.path.rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name:
        raise SandboxError(f"the sandbox lists a file {entry.path!r}, which cannot be one: nothing was copied")
    return name


async def _guest_target(sandbox: Sandbox, path: str, name: str) -> str:
    """Where a copy goes: below `path` if that is a folder."""
    if path.endswith("/") or path in (".", ""):
        return f"{path or '.'}/{name}" if not path.endswith("/") else path + name
    try:
        found = await sandbox.stat(path)
    except GuestFileError as error:
        if error.code not in ("ENOENT", "ENOTDIR"):
            raise
        return path
    return f"{path}/{name}" if found.kind == "dir" else path
