"""A state directory belongs to one service at a time, and says where that service listens.

service.lock   held with flock by the process that has the manager; a process that dies lets go of it
service.json   url and process of the service that serves it, readable by its owner only
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moonlet.errors import SandboxStateError, StorageError

_FILE = "service.json"


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


@dataclass(frozen=True)
class Service:
    """A service that runs. `api_key` is what its own user needs to be let in."""

    url: str
    pid: int
    start: int
    api_key: str = ""


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
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise SandboxStateError(
                f"the state directory {folder} is in use by process {owner or '(unknown)'}: use the service there "
                "(`url`), stop it, or name another state directory"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def announce_service(folder: Path, url: str, api_key: str = "") -> None:
    """Say where this process serves the directory, so that `Sandbox.create()` and the command line find it."""
    me = Owner.me()
    unfinished = folder / f"{_FILE}.tmp"
    unfinished.unlink(missing_ok=True)
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(Service(url, me.pid, me.start, api_key)), file)
    os.rename(unfinished, folder / _FILE)


def withdraw_service(folder: Path) -> None:
    (folder / _FILE).unlink(missing_ok=True)


def find_service(folder: Path) -> Service | None:
    """The service of this directory, if it is alive."""
    try:
        service = Service(**json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return service if Owner(service.pid, service.start).is_alive else None
