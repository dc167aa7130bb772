"""A state directory belongs to one service at a time, and says where that service listens.

service.lock   held with flock by the process that has the manager; a process that dies lets go of it
service.json   url and process of the service that serves it, readable by its owner only
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import SandboxStateError, StorageError

_INHERITED_S = 2.0


@dataclass(frozen=True)
class Owner:
    """A process that cannot be taken for a later one: `start` is field 22 of /proc/PID/stat, ticks after boot."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> Owner | None:
        """The process that has this number now, if there is one and it is no zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else Owner(pid, int(fields[19]))

    @staticmethod
    def me() -> Owner:
        found = Owner.of(os.getpid())
        assert found is not None
        return found

    @property
    def is_alive(self) -> bool:
        return Owner.of(self.pid) == self


@contextlib.contextmanager
def locked_state_dir(folder: Path) -> Iterator[None]:
    """Make the directory if need be and hold its lock. Raises SandboxStateError if another process has it."""
    try:
        for part in (folder, folder / "sandboxes", folder / "snapshots"):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"cannot use the state directory {folder}: {error.strerror}; name another one") from error
    try:
        _take_lock(handle, folder)
        os.ftruncate(handle, 0)
        me = Owner.me()
        os.pwrite(handle, f"{me.pid} {me.start}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _take_lock(handle: int, folder: Path) -> None:
    """A process that was killed while it started another may leave the lock to that one until it has become a program."""
    deadline = time.monotonic() + _INHERITED_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            named = re.fullmatch(rb"(\d+) (\d+)", os.pread(handle, 64, 0))
            owner = Owner(int(named[1]), int(named[2])) if named else None
            if time.monotonic() > deadline or (owner is not None and owner.is_alive):
                raise SandboxStateError(
                    f"the state directory {folder} is in use by process {owner.pid if owner else '(unknown)'}: use the "
                    "service there (`url`), stop it, or name another state directory"
                ) from None
            time.sleep(0.01)


def find_service(folder: Path) -> str | None:
    """The URL of the service that serves this directory now, if there is one: a dead one has let go of the lock."""
    try:
        with open(folder / "service.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        url = json.loads((folder / "service.json").read_text())["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def label_of(folder: Path) -> str:
    """The mark of everything that belongs to this state directory."""
    return "moonlet-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
