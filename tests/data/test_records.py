"""JSON lines, Parquet and Hugging Face datasets: one field of each record is the text."""

from __future__ import annotations

import gzip
import importlib.util
import json

import pyarrow
import pytest
from pyarrow import parquet

from moonlet.data.documents import ReadReport
from moonlet.data.sources import read_source
from moonlet.errors import DataError, MissingDependencyError


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def texts(source, report=None) -> list[str]:
    return [document.text for document in read_source(source, report)]


def test_jsonl_plain_and_gzip(new_source, tmp_path):
    (tmp_path / "b.jsonl").write_bytes(lines({"text": "zwei", "other": 1}) + b"\n" + lines({"text": "drei"}))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines({"text": "eins"})))
    (tmp_path / "notes.txt").write_text("not a record")
    documents = list(read_source(new_source("jsonl", tmp_path)))
    assert [document.text for document in documents] == ["eins", "zwei", "drei"]
    assert [document.id.partition(":")[2] for document in documents] == ["a.jsonl.gz:1", "b.jsonl:1", "b.jsonl:3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"x\.jsonl:2: not JSON"),
        (b"[1, 2]", r"x\.jsonl:2: expected a JSON object, got list"),
        (b'{"body": "a", "id": 3}', r"x\.jsonl:2: .*'text'.*\['body', 'id'\]"),
        (b'{"Text": "a"}', r"did you mean 'Text'"),
        (b'{"text": 5}', r"x\.jsonl:2: field 'text' is int, not text"),
        (b'{"text": "\xff"}', r"x\.jsonl:2: not UTF-8 at byte 10"),
    ],
)
def test_bad_line_is_named(new_source, tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "fine"}) + line + b"\n")
    with pytest.raises(DataError, match=message):
        texts(new_source("jsonl", tmp_path / "x.jsonl"))


@pytest.mark.parametrize("cut", [6, 20, -4])
def test_gzip_cut_short(new_source, tmp_path, cut):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines(*({"text": "t" * n} for n in range(50))))[:cut])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz"):
        texts(new_source("jsonl", tmp_path))


def test_half_a_surrogate_is_skipped(new_source, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a\\ud800"}\n' + lines({"text": "fine"}))
    report = ReadReport()
    assert texts(new_source("jsonl", tmp_path), report) == ["fine"]
    assert report.skipped == ["x.jsonl:1"]


def test_parquet(new_source, tmp_path):
    table = pyarrow.table({"body": ["eins", None, "drei"], "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "x.parquet")
    report = ReadReport()
    assert texts(new_source("parquet", tmp_path, field="body"), report) == ["eins", "drei"]
    assert report.skipped == ["x.parquet:1"]
    with pytest.raises(DataError, match=r"'text'.*\['body', 'id'\]"):
        texts(new_source("parquet", tmp_path))
    with pytest.raises(DataError, match="int, not text"):
        texts(new_source("parquet", tmp_path, field="id"))


def test_damaged_parquet(new_source, tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 1000]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.parquet.*damaged"):
        texts(new_source("parquet", path))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package datasets is installed")
def test_huggingface_says_how_to_install(new_source):
    with pytest.raises(MissingDependencyError, match=r"pip install 'moonlet\[datasets\]'"):
        texts(new_source("huggingface", "some/name"))


def test_huggingface_reads_a_local_dataset(new_source, tmp_path):
    pytest.importorskip("datasets")
    parquet.write_table(pyarrow.table({"text": ["eins", "zwei"]}), tmp_path / "train.parquet")
    assert texts(new_source("huggingface", tmp_path)) == ["eins", "zwei"]
    with pytest.raises(DataError, match="'body'"):
        texts(new_source("huggingface", tmp_path, field="body"))
    with pytest.raises(DataError, match="cannot open"):
        texts(new_source("huggingface", tmp_path, split="absent"))
