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
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from moonlet.errors import StorageError

TMP = ".tmp"
_FEW_FILES = 64  # more than so many are flushed by one syncfs instead of one fsync each
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
        if error.errno not in _DISK_ERRORS:
            raise
        raise StorageError(f"{what}: {error.strerror}; free some space, what was there before is intact") from error


def check_space(folder: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Raises StorageError if writing `needed_bytes` would leave less than `reserve_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + reserve_bytes:
        raise StorageError(
            f"the disk of {folder} has {free >> 20} MiB free, {(needed_bytes + reserve_bytes) >> 20} MiB are needed "
            f"({reserve_bytes >> 20} of them in reserve): free some space; the sandbox goes on as before"
        )


def folder_bytes(folder: Path) -> int:
    """Bytes on the disk of all files below."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def remove_tree(folder: Path) -> None:
    """Remove all of it, folders without permissions too; nothing there is fine. Raises OSError if something stays.

    Symbolic links are removed, never followed.
    """

    def retry(work: Callable[..., Any], path: str, error: tuple[type, BaseException, Any]) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        for name in (os.path.dirname(path), path):
            if stat.S_ISDIR(os.lstat(name).st_mode):
                os.chmod(name, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif work not in (os.rmdir, os.scandir):
            os.unlink(path)

    shutil.rmtree(folder, onerror=retry)


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
        if len(found) <= _FEW_FILES:
            for path in reversed(found):
                _fsync(path)
            return
    except PermissionError:  # the guest's modes forbid the owner to open it
        pass
    _flush_file_system(folder)


def _files_and_folders(folder: Path) -> list[Path]:
    found, at = [folder], 0
    while at < len(found):
        if at == 0 or found[at].is_dir():
            with os.scandir(found[at]) as entries:
                found += [
                    Path(entry.path)
                    for entry in entries
                    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                ]
        at += 1
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
