"""Folders that appear whole or not at all: written under a temporary name, brought to the disk, then renamed.

    sandboxes/ID/live        the machine that lives now
    sandboxes/ID/gen-0007    the machine as the seventh pause saved it; `gen-0008.tmp` while the eighth is being written
    snapshots/ID/            snapshot.json and image/

A saved machine depends on nothing outside of its folder but the template: older generations are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from moonlet.errors import StorageError

TMP = ".tmp"
_FEW_FILES = 64  # more than so many are flushed by one syncfs instead of one fsync each
_NAMES_AT_ONCE = 4096
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}

_Result = TypeVar("_Result")


async def in_thread(work: Callable[..., _Result], *args: Any) -> _Result:
    """Run blocking work in a thread. A cancelled caller waits for its end all the same: nothing goes on behind its back."""
    future = asyncio.get_running_loop().run_in_executor(None, work, *args)
    return await settled(future)


async def settled(future: asyncio.Future[_Result]) -> _Result:
    """The result of `future`; a cancellation of the caller is raised only when it is there."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        with contextlib.suppress(asyncio.CancelledError):
            future.exception()  # seen
        raise cancelled
    return future.result()


def generation_folder(sandbox: Path, number: int) -> Path:
    return sandbox / f"gen-{number:04d}"


@asynccontextmanager
async def whole_folder(target: Path) -> AsyncIterator[Path]:
    """A new empty folder to write into, which becomes `target`, on the disk, when the block ends without an error.

    Raises StorageError where the disk is full or fails; then, and after any other error, nothing is left.
    """
    unfinished = target.with_name(target.name + TMP)
    try:
        with storage_errors(f"cannot write {target}"):
            await in_thread(remake_folder, unfinished)
            yield unfinished
            await in_thread(_commit, unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            await in_thread(remove_tree, unfinished)
        raise


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns OSErrors of a disk that is full or broken into StorageError."""
    try:
        yield
    except OSError as error:
        code = _disk_error(error)
        if code is None:
            raise
        raise StorageError(f"{what}: {os.strerror(code)}; free some space, what was there before is intact") from error


def _disk_error(error: OSError) -> int | None:
    if isinstance(error, shutil.Error):  # of a tree: it holds the texts of many
        return next((code for code in _DISK_ERRORS if f"[Errno {code}]" in str(error)), None)
    return error.errno if error.errno in _DISK_ERRORS else None


def check_space(folder: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Raises StorageError if writing `needed_bytes` would leave less than `reserve_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + reserve_bytes:
        raise StorageError(
            f"the disk of {folder} has {free >> 20} MiB free, {(needed_bytes + reserve_bytes) >> 20} MiB are needed "
            f"({reserve_bytes >> 20} of them in reserve): free some space; the sandbox goes on as before"
        )


def folder_bytes(folder: Path) -> int:
    """Bytes on the disk of all files below; what cannot be looked at is not counted."""
    total = 0
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total


def remove_tree(folder: Path) -> None:
    """Remove all of it, folders without permissions too; nothing there is fine. Raises OSError if something stays.

    Symbolic links are removed, never followed. A guest may have made folders deeper than a path, or our stack, can be
    long: subfolders are moved up until there are none.
    """
    try:
        top = _open_folder(str(folder), None)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(folder)
        return
    try:
        fresh = (f".{secrets.token_hex(8)}.{number}" for number in itertools.count())
        while names := _some_names(top):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
                    _take_apart(top, name, fresh)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


def _take_apart(top: int, name: str, fresh: Iterator[str]) -> None:
    """Remove the file or folder `name` of the folder `top`; its subfolders become siblings of it."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except IsADirectoryError:
        folder = _open_folder(name, top)
    try:
        while names := _some_names(folder):
            for inner in names:
                with contextlib.suppress(FileNotFoundError):
                    _take_out(folder, inner, top, next(fresh))
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _take_out(folder: int, name: str, top: int, new_name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.close(_open_folder(name, folder))  # moving it takes the right to write into it
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=top)


def _open_folder(name: str, parent: int | None) -> int:
    """Opened, with all rights for its owner. Raises NotADirectoryError for a link too."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        handle = os.open(name, flags, dir_fd=parent)
    if os.fstat(handle).st_mode & 0o700 != 0o700:
        os.fchmod(handle, 0o700)
    return handle


def _some_names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _NAMES_AT_ONCE)]


def remake_folder(folder: Path) -> None:
    """An empty folder, whatever was there before."""
    remove_tree(folder)
    folder.mkdir(mode=0o700, parents=True)


def _commit(unfinished: Path, target: Path) -> None:
    _flush(unfinished)
    os.rename(unfinished, target)
    flush_folder(target.parent)


def flush_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush(folder: Path) -> None:
    """Bring all files and folders below to the disk."""
    try:
        found = _files_and_folders(folder)
        if found is not None:
            for path in reversed(found):
                _fsync(path)
            return
    except OSError as error:  # the guest's modes forbid the owner to open it, or its path is too long
        if error.errno not in (errno.EACCES, errno.ENAMETOOLONG):
            raise
    _flush_file_system(folder)


def _files_and_folders(folder: Path) -> list[Path] | None:
    """None if there are many."""
    found = [folder]
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    continue
                found.append(Path(entry.path))
                if len(found) > _FEW_FILES:
                    return None
    return found


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_file_system(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(handle)
