"""Readers of text files: what they take, how they name it, and what they refuse."""

from __future__ import annotations

import logging
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.data.documents import ReadReport
from moonlet.data.sources import read_source
from moonlet.errors import DataError


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_standard_library(new_source):
    root = Path(sysconfig.get_path("stdlib"))
    documents = list(read_source(new_source("stdlib")))
    places = [document.id.partition(":")[2] for document in documents]
    assert places == sorted(places)
    assert {"os.py", "asyncio/events.py"} <= set(places)
    parts = {part for place in places for part in place.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__"}
    assert not [place for place in places if "sysconfigdata" in place or place.startswith("/")]
    found = next(document for document in documents if document.id.endswith(":os.py"))
    assert found.text.encode() == (root / "os.py").read_bytes()


def test_folder_file_and_glob_name_the_same_documents(new_source, tmp_path):
    write(tmp_path / "a", **{"one.txt": b"first"})
    write(tmp_path / "a" / "deep", **{"two.txt": "zweite ä".encode(), ".hidden": b"no"})
    whole = list(read_source(new_source("text", tmp_path / "a")))
    assert [document.text for document in whole] == ["zweite ä", "first"]
    assert [document.id.partition(":")[2] for document in whole] == ["deep/two.txt", "one.txt"]
    assert list(read_source(new_source("text", f"{tmp_path}/a/**/*.txt"))) == whole
    assert [d.text for d in read_source(new_source("text", tmp_path / "a" / "one.txt"))] == ["first"]


def test_ids_do_not_hold_the_folder(new_source, tmp_path):
    left = write(tmp_path / "x", **{"same.txt": b"text"})
    right = write(tmp_path / "y" / "z", **{"same.txt": b"text"})
    ids = [[document.id for document in read_source(new_source("text", folder))] for folder in (left, right)]
    assert ids[0] == ids[1]


def test_not_utf8_is_skipped_and_named(new_source, tmp_path, caplog):
    write(tmp_path, **{"bad.txt": b"good start \xff\xfe", "good.txt": b"fine"})
    report = ReadReport()
    with caplog.at_level(logging.WARNING, logger="moonlet"):
        documents = list(read_source(new_source("text", tmp_path), report))
    assert [document.text for document in documents] == ["fine"]
    assert report.skipped == ["bad.txt"]
    assert [record.getMessage() for record in caplog.records] == ["skipped bad.txt: not UTF-8 at byte 11"]


def test_nothing_left_is_an_error(new_source, tmp_path):
    write(tmp_path, **{"bad.txt": b"\xff", "empty.txt": b""})
    with pytest.raises(DataError, match=r"no document with text.*bad\.txt"):
        list(read_source(new_source("text", tmp_path)))


def test_empty_file_is_passed_over(new_source, tmp_path):
    write(tmp_path, **{"empty.txt": b"", "full.txt": b"x"})
    assert [document.text for document in read_source(new_source("text", tmp_path))] == ["x"]


@pytest.mark.parametrize("path", ["absent", "absent/*.txt", "."])
def test_no_file_is_an_error_that_names_the_path(new_source, tmp_path, path):
    with pytest.raises(DataError, match="no file"):
        list(read_source(new_source("text", tmp_path / path)))


def test_missing_path_and_planted(new_source):
    with pytest.raises(DataError, match="needs a path"):
        list(read_source(new_source("text")))
    with pytest.raises(DataError, match="planted"):
        list(read_source(new_source("planted")))


@given(st.text(alphabet="aé漢🙂\n", min_size=1, max_size=200), st.integers(8, 40))
@settings(max_examples=60, deadline=None)
def test_huge_file_comes_in_parts(new_source, tmp_path_factory, text, limit):
    """Parts join to the file, stay within the limit, and end at a line end where a line is short enough."""
    path = tmp_path_factory.mktemp("huge") / "huge.txt"
    path.write_bytes(text.encode())
    parts = [document.text for document in read_source(new_source("text", path), max_document_bytes=limit)]
    assert "".join(parts) == text
    assert all(len(part.encode()) <= limit for part in parts)
    for part, after in pairwise(parts):
        assert part.endswith("\n") or "\n" not in part
        assert after


def test_bad_byte_late_in_a_huge_file_skips_all_of_it(new_source, tmp_path):
    write(tmp_path, **{"huge.txt": b"line\n" * 100 + b"\x80", "ok.txt": b"fine"})
    report = ReadReport()
    documents = list(read_source(new_source("text", tmp_path), report, max_document_bytes=64))
    assert [document.text for document in documents] == ["fine"]
    assert report.skipped == ["huge.txt"]


def test_bad_byte_offset_across_blocks(new_source, tmp_path, caplog):
    """A character cut short by the end of a block of reading, then by the end of the file."""
    size = (1 << 20) - 1
    write(
        tmp_path,
        **{"a.txt": b"x" * size + "é".encode() + b"\xff", "b.txt": b"x" * size + "漢".encode()[:2], "c.txt": b"c"},
    )
    with caplog.at_level(logging.WARNING, logger="moonlet"):
        list(read_source(new_source("text", tmp_path)))
    offsets = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert offsets == [str(size + 2), str(size)]
