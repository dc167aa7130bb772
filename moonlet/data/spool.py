"""Every document read, on disk, while a corpus is prepared: memory holds places and hashes only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonlet.data.documents import Document


@dataclass(frozen=True)
class SpooledDocument:
    id: str
    source: str
    content_hash: bytes
    start: int
    num_bytes: int


class TextSpool:
    """Append-only texts in one file, read back by place."""

    def __init__(self, path: Path) -> None:
        self.documents: list[SpooledDocument] = []
        self.num_bytes = 0
        self._writer = path.open("wb")
        self._reader = path.open("rb")

    def add(self, document: Document) -> SpooledDocument:
        data = document.text.encode()
        self._writer.write(data)
        spooled = SpooledDocument(document.id, document.source, document.content_hash, self.num_bytes, len(data))
        self.documents.append(spooled)
        self.num_bytes += len(data)
        return spooled

    def seal(self) -> None:
        """Call after the last `add`, before the first `text`."""
        self._writer.flush()

    def text(self, document: SpooledDocument) -> str:
        self._reader.seek(document.start)
        return self._reader.read(document.num_bytes).decode("utf-8")

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
