"""The records: what was written is read back, all or nothing, and what cannot be read is left alone."""

from __future__ import annotations

import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox.scripted_backend import scripted_caps

from moonlet.errors import SandboxStateError, StorageError
from moonlet.sandbox.api import FailReason, Limits, SandboxSpec, State
from moonlet.sandbox.records import CreateKey, Records, SandboxRow, SnapshotInfo, snapshot_from_json, to_json

ROW = SandboxRow(
    id="sb1",
    state=State.FAILED,
    spec=SandboxSpec(
        limits=Limits(memory_bytes=7), env={"A": "b\n"}, metadata={"ü": "x"}, allow_hosts=("a.b",), idle_pause_s=2.5
    ),
    backend="scripted",
    version="1",
    template_id="host",
    caps=replace(scripted_caps(), notes=("one", "two")),
    created_at=12.5,
    expires_at=None,
    generation=3,
    is_live=True,
    origin="snap1",
    reason=FailReason.OOM,
)
SNAPSHOT = SnapshotInfo("snap1", "name", "sb1", ROW.spec, "scripted", "1", "host", ROW.caps, 3.5, 99, True)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "records"
    records = Records(path)
    records.add(ROW, CreateKey("key", "sb1", "digest"))
    records.put_snapshot(SNAPSHOT)
    records.close()
    again = Records(path)
    assert again.sandboxes() == [ROW]
    assert again.snapshots() == [SNAPSHOT]
    assert again.key("key") == CreateKey("key", "sb1", "digest")
    assert snapshot_from_json(to_json(SNAPSHOT)) == SNAPSHOT
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_key_outlives_its_sandbox_unless_the_create_failed(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    for name in ("sb1", "sb2"):
        records.add(replace(ROW, id=name), CreateKey(f"key {name}", name, ""))
    records.delete("sb1")
    records.delete("sb2", with_key=True)
    assert records.sandboxes() == []
    assert records.key("key sb1") is not None
    assert records.key("key sb2") is None


def test_several_rows_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    refuse(tmp_path / "records", "NEW.id = 'sb2'")
    with pytest.raises(StorageError, match="free some space"):
        records.put(ROW, replace(ROW, id="sb2"))
    assert records.sandboxes() == []


def refuse(path: Path, condition: str) -> None:
    """From now on the file refuses sandboxes of which `condition` holds, as a full disk would."""
    with sqlite3.connect(path) as db:
        db.execute(
            f"CREATE TRIGGER refusal BEFORE INSERT ON sandboxes WHEN {condition} "
            "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
    db.close()


def test_a_row_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    records.put(ROW)
    with sqlite3.connect(tmp_path / "records") as db:
        db.execute("INSERT INTO sandboxes VALUES ('sb9', 'running', '{\"id\": 3}')")
    db.close()
    assert records.sandboxes() == [ROW]
    assert records.unreadable == {"sb9"}


def test_fields_of_a_later_version_are_ignored_and_a_later_format_is_refused(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    records.put(ROW)
    records.close()
    with sqlite3.connect(tmp_path / "records") as db:
        db.execute("UPDATE sandboxes SET body = json_set(body, '$.novel', 1, '$.caps.novel', 2)")
    assert Records(tmp_path / "records").sandboxes() == [ROW]
    with sqlite3.connect(tmp_path / "records") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(SandboxStateError, match="newer Moonlet"):
        Records(tmp_path / "records")


def test_what_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"not a database" * 1000)
    with pytest.raises(StorageError, match="records"):
        Records(tmp_path / "records")
