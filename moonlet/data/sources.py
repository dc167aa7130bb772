"""One reader for every kind of source."""

from __future__ import annotations

from collections.abc import Iterator

from moonlet.config.run import SourceConfig
from moonlet.data import records
from moonlet.data.documents import MAX_DOCUMENT_BYTES, Document, ReadReport, describe, read_stdlib, read_text
from moonlet.errors import DataError


def read_source(
    source: SourceConfig, report: ReadReport | None = None, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Document]:
    """Documents of one source, in the order of its files; what cannot be decoded is skipped and put into `report`.

    Raises:
        DataError: the path is missing, a record is malformed, or no document with any text is left.
    """
    report = report if report is not None else ReadReport()
    match source.kind:
        case "stdlib":
            found = read_stdlib(source, report, max_document_bytes)
        case "text":
            found = read_text(source, report, max_document_bytes)
        case "jsonl":
            found = records.read_jsonl(source, report)
        case "parquet":
            found = records.read_parquet(source, report)
        case "huggingface":
            found = records.read_huggingface(source, report)
        case "planted":
            raise DataError(f"source '{source.name}' is planted: its documents are made while training, not read")
    count = 0
    for document in found:
        if document.text:
            count += 1
            yield document
    if not count:
        skipped = f"; skipped {report.skipped[:5]}" if report.skipped else ""
        raise DataError(f"source '{source.name}' has no document with text in it ({describe(source)}){skipped}")
