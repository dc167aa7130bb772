"""Readers for files of records (JSON lines, Parquet) and for Hugging Face datasets: one field of each record is the text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from moonlet.config.run import SourceConfig
from moonlet.data.documents import Document, ReadReport, list_files, make_document
from moonlet.errors import DataError, MissingDependencyError, MoonletError, nearest_name


def read_jsonl(source: SourceConfig, report: ReadReport) -> Iterator[Document]:
    """One JSON object a line, plain or gzip.

    Raises:
        DataError: a line is not a JSON object or lacks the field, named by file and line.
    """
    for path, name in list_files(source, (".jsonl", ".jsonl.gz")):
        for number, line in _lines(path):
            if line.strip():
                where = f"{path}:{number}"
                text = _text_of(_parse_line(line, where), source, where)
                yield from _checked(text, f"{name}:{number}", source, report)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"'{path}' is damaged after line {number}: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _text_of(record: dict[str, Any], source: SourceConfig, where: str) -> str:
    if source.field not in record:
        raise DataError(_missing_field(source, list(record), where))
    value = record[source.field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field '{source.field}' is {type(value).__name__}, not text")
    return value


def _missing_field(source: SourceConfig, fields: list[str], where: str) -> str:
    near = nearest_name(source.field, fields)
    return f"{where}: source '{source.name}' reads field '{source.field}'{near}; there are {sorted(fields)}"


def _checked(text: str, place: str, source: SourceConfig, report: ReadReport) -> Iterator[Document]:
    """The document, unless its text holds half a surrogate pair (JSON can write one, UTF-8 cannot)."""
    try:
        yield make_document(text, place, source.name)
    except UnicodeEncodeError as error:
        report.skip(place, f"not valid Unicode at character {error.start}")


def read_parquet(source: SourceConfig, report: ReadReport) -> Iterator[Document]:
    """One row a document, read batch by batch.

    Raises:
        DataError: a file is not Parquet or lacks the column.
    """
    import pyarrow
    from pyarrow import parquet

    for path, name in list_files(source, (".parquet",)):
        try:
            file = parquet.ParquetFile(path)
            if source.field not in file.schema_arrow.names:
                raise DataError(_missing_field(source, file.schema_arrow.names, str(path)))
            rows = (
                value.as_py()
                for batch in file.iter_batches(columns=[source.field])
                for value in batch.column(source.field)
            )
            yield from _rows(rows, name, source, report)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"'{path}' is not a Parquet file, or it is damaged: {error}") from None


def read_huggingface(source: SourceConfig, report: ReadReport) -> Iterator[Document]:
    """A dataset by name, streamed; `name:configuration` chooses one of its configurations.

    Raises:
        MissingDependencyError: the package `datasets` is not installed.
        DataError: the dataset, split or column does not exist or cannot be reached.
    """
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError("datasets", "datasets", "reading Hugging Face datasets") from None
    if not source.path:
        raise DataError(f"source '{source.name}' of kind huggingface needs a path: the dataset's name")
    name, _, configuration = source.path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=source.split, streaming=True)
    except Exception as error:  # the library raises many kinds
        raise DataError(f"source '{source.name}': cannot open dataset '{source.path}': {error}") from None
    try:
        yield from _rows((_column(row, source) for row in rows), source.path, source, report)
    except MoonletError:
        raise
    except Exception as error:  # the connection breaks, a shard is damaged
        raise DataError(f"source '{source.name}': dataset '{source.path}' cannot be read on: {error}") from None


def _column(row: Any, source: SourceConfig) -> Any:
    if source.field not in row:
        raise DataError(_missing_field(source, list(row), f"dataset '{source.path}'"))
    return row[source.field]


def _rows(values: Iterable[Any], name: str, source: SourceConfig, report: ReadReport) -> Iterator[Document]:
    for number, value in enumerate(values):
        if value is None:
            report.skip(f"{name}:{number}", "no text")
        elif not isinstance(value, str):
            raise DataError(f"{name}: row {number}: column '{source.field}' is {type(value).__name__}, not text")
        else:
            yield from _checked(value, f"{name}:{number}", source, report)
