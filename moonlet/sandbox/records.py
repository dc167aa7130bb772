"""What the service knows, in one SQLite file: a row per sandbox, a row per snapshot, the keys of idempotent creates.

Every method is one transaction that is on the disk when it returns (WAL, synchronous=FULL). A row that this version cannot
read is left where it is, and its folders with it.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from moonlet.errors import SandboxStateError, StorageError
from moonlet.sandbox.api import Caps, FailReason, Limits, SandboxInfo, SandboxSpec, State

_FORMAT = 1
_KEYS_KEPT_S = 24 * 3600.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, state TEXT NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (id TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS create_keys
    (key TEXT PRIMARY KEY, sandbox TEXT NOT NULL, request TEXT NOT NULL, made_at REAL NOT NULL) WITHOUT ROWID;
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SandboxRow:
    """A sandbox. Times are Unix seconds.

    `generation` is the number of the saved machine that a resume starts from, 0 for none; `is_live` says that a machine
    (running, or frozen in RAM) is in the folder `live`; `origin` is the snapshot that the live machine was started from,
    which must stay as long as the machine may read it; `version` is that of the program which runs or saved the machine.
    """

    id: str
    state: State
    spec: SandboxSpec
    backend: str
    version: str
    template_id: str
    caps: Caps
    created_at: float
    expires_at: float | None = None
    generation: int = 0
    is_live: bool = False
    origin: str = ""
    reason: FailReason | None = None

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            state=self.state,
            backend=self.backend,
            template=self.spec.template,
            created_at=self.created_at,
            expires_at=self.expires_at,
            limits=self.spec.limits,
            caps=self.caps,
            metadata=dict(self.spec.metadata),
            reason=self.reason,
            allow_hosts=tuple(self.spec.allow_hosts),
        )


@dataclass(frozen=True)
class SnapshotInfo:
    """A saved machine that new ones start from. Hidden ones are those of forks: they go with their last child."""

    id: str
    name: str
    sandbox_id: str  # whose machine it was
    spec: SandboxSpec
    backend: str
    version: str
    template_id: str
    caps: Caps
    created_at: float
    num_bytes: int = 0
    is_hidden: bool = False


@dataclass(frozen=True)
class CreateKey:
    """An idempotency key: which sandbox it made, and a digest of what was asked for."""

    key: str
    sandbox_id: str
    request: str


def to_json(value: SandboxRow | SnapshotInfo) -> str:
    return json.dumps(asdict(value))


def spec_from_json(body: Mapping[str, Any]) -> SandboxSpec:
    known = _known(SandboxSpec, body)
    known["limits"] = Limits(**_known(Limits, body["limits"]))
    known["allow_hosts"] = tuple(body["allow_hosts"])
    return SandboxSpec(**known)


def snapshot_from_json(text: str) -> SnapshotInfo:
    """Raises KeyError, TypeError or ValueError for what is no snapshot."""
    return SnapshotInfo(**_parts(SnapshotInfo, json.loads(text)))


def _row_from_json(text: str) -> SandboxRow:
    body = json.loads(text)
    known = _parts(SandboxRow, body)
    known["state"] = State(body["state"])
    known["reason"] = FailReason(body["reason"]) if body["reason"] else None
    return SandboxRow(**known)


def _parts(kind: type, body: Mapping[str, Any]) -> dict[str, Any]:
    known = _known(kind, body)
    known["spec"] = spec_from_json(body["spec"])
    caps = _known(Caps, body["caps"])
    known["caps"] = Caps(**{**caps, "notes": tuple(caps.get("notes", ()))})
    return known


def _known(kind: type, body: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in body.items() if name in names}


_Value = TypeVar("_Value")


class Records:
    """The file. Safe to call from any thread; raises StorageError where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable: set[str] = set()  # ids of rows that this version does not understand
        self._lock = threading.Lock()
        with _storage_errors(path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > _FORMAT:
            self._db.close()
            raise SandboxStateError(
                f"{path} was written by a newer Moonlet (format {version}, this one reads {_FORMAT}): upgrade, or name "
                "another state directory"
            )
        with _storage_errors(path):
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_FORMAT}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- sandboxes ----------------------------------------------------------------------------------------------------
    def sandboxes(self) -> list[SandboxRow]:
        return list(self._read("sandboxes", _row_from_json))

    def put(self, *rows: SandboxRow) -> None:
        """Add or replace rows, all or none."""
        with self._transaction():
            for row in rows:
                self._put(row)

    def add(self, row: SandboxRow, key: CreateKey | None) -> None:
        with self._transaction():
            self._put(row)
            if key is not None:
                self._db.execute("DELETE FROM create_keys WHERE made_at < ?", (time.time() - _KEYS_KEPT_S,))
                self._db.execute(
                    "INSERT OR REPLACE INTO create_keys VALUES (?, ?, ?, ?)",
                    (key.key, key.sandbox_id, key.request, time.time()),
                )

    def delete(self, sandbox_id: str, *, with_key: bool = False) -> None:
        """Forget a sandbox. Its key stays, so that a late repetition of the create makes no second one."""
        with self._transaction():
            self._db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))
            if with_key:
                self._db.execute("DELETE FROM create_keys WHERE sandbox = ?", (sandbox_id,))

    def key(self, key: str) -> CreateKey | None:
        with self._lock, _storage_errors(self.path):
            found = self._db.execute("SELECT key, sandbox, request FROM create_keys WHERE key = ?", (key,)).fetchone()
        return CreateKey(*found) if found else None

    def _put(self, row: SandboxRow) -> None:
        self._db.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?)", (row.id, row.state, to_json(row)))

    # -- snapshots ----------------------------------------------------------------------------------------------------
    def snapshots(self) -> list[SnapshotInfo]:
        return list(self._read("snapshots", snapshot_from_json))

    def put_snapshot(self, snapshot: SnapshotInfo) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (snapshot.id, to_json(snapshot)))

    def delete_snapshots(self, ids: Iterable[str]) -> None:
        with self._transaction():
            self._db.executemany("DELETE FROM snapshots WHERE id = ?", [(snapshot_id,) for snapshot_id in ids])

    # -- both ---------------------------------------------------------------------------------------------------------
    def _read(self, table: str, parse: Callable[[str], _Value]) -> Iterator[_Value]:
        with self._lock, _storage_errors(self.path):
            found = self._db.execute(f"SELECT id, body FROM {table} ORDER BY id").fetchall()
        for name, body in found:
            try:
                yield parse(body)
            except (KeyError, TypeError, ValueError) as error:
                self.unreadable.add(name)
                log.error(
                    "%s: the record of %s in %s cannot be read, it is left alone: %s", self.path, name, table, error
                )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _storage_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StorageError(f"cannot use {path}: {error}; free some space or repair it, then try again") from error
