"""Documents, and the readers of files that are text as they are: the standard library's source, files and folders."""

from __future__ import annotations

import codecs
import glob
import hashlib
import logging
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moonlet.config.run import SourceConfig
from moonlet.errors import DataError

log = logging.getLogger("moonlet")

MAX_DOCUMENT_BYTES = 16 << 20  # a longer text file is read as several documents, so that memory stays bounded
_READ_BYTES = 1 << 20

# Not the library's own text: tests, vendored and generated parts, character tables.
_STDLIB_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "__pycache__",
}


@dataclass(frozen=True)
class Document:
    """One text. `id` is the start of its content hash and its place in the source: the same on every machine."""

    id: str
    text: str
    source: str

    @property
    def content_hash(self) -> bytes:
        """sha256 of the text."""
        return hashlib.sha256(self.text.encode()).digest()


@dataclass
class ReadReport:
    """What a reader left out, by name."""

    skipped: list[str] = field(default_factory=list)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append(name)
        log.warning("skipped %s: %s", name, reason)


def make_document(text: str, place: str, source: str) -> Document:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Document(f"{digest[:16]}:{place}", text, source)


def describe(source: SourceConfig) -> str:
    return f"kind {source.kind}" + (f", path '{source.path}'" if source.path else "")


def list_files(source: SourceConfig, suffixes: tuple[str, ...] = ()) -> list[tuple[Path, str]]:
    """Files of a source with their names inside it, sorted by name: one file, a folder (hidden files left out), or a glob.

    Raises:
        DataError: `path` is not set, or there is nothing there.
    """
    if not source.path:
        raise DataError(f"source '{source.name}' of kind {source.kind} needs a path: a file, a folder or a glob")
    root = Path(source.path).expanduser()
    if root.is_file():
        return [(root, root.name)]
    if root.is_dir():
        paths = [path for path in root.rglob("*") if not _is_hidden(path.relative_to(root))]
    else:
        root, paths = _expand(str(root))
    files = [(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    files = sorted((pair for pair in files if not suffixes or pair[1].endswith(suffixes)), key=lambda pair: pair[1])
    if not files:
        kinds = f" that ends with {' or '.join(suffixes)}" if suffixes else ""
        raise DataError(f"source '{source.name}': there is no file{kinds} at '{source.path}'")
    return files


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _expand(pattern: str) -> tuple[Path, list[Path]]:
    """The folder before the first wildcard, and the files that match."""
    fixed: list[str] = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed), [Path(path) for path in glob.glob(pattern, recursive=True)]


def read_stdlib(source: SourceConfig, report: ReadReport, max_document_bytes: int) -> Iterator[Document]:
    """Source files of the Python standard library that runs this process."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py") if _is_library(path.relative_to(root)))
    for name in names:
        yield from _read_file(root / name, name.as_posix(), source.name, report, max_document_bytes)


def _is_library(name: Path) -> bool:
    """Whether a file is the library's own source and not what a build wrote about its machine."""
    is_generated = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
    return not is_generated and not _STDLIB_SKIPPED.intersection(name.parts)


def read_text(source: SourceConfig, report: ReadReport, max_document_bytes: int) -> Iterator[Document]:
    for path, name in list_files(source):
        yield from _read_file(path, name, source.name, report, max_document_bytes)


def _read_file(path: Path, name: str, source: str, report: ReadReport, max_bytes: int) -> Iterator[Document]:
    """One document, or several of at most `max_bytes` cut at line ends; none where the file is not UTF-8."""
    try:
        if (offset := _first_bad_byte(path)) is not None:
            report.skip(name, f"not UTF-8 at byte {offset}")
            return
        if path.stat().st_size <= max_bytes:
            yield make_document(path.read_bytes().decode("utf-8"), name, source)
            return
        for number, text in enumerate(_read_parts(path, max_bytes)):
            yield make_document(text, f"{name}#{number}", source)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def _first_bad_byte(path: Path) -> int | None:
    """Offset of the first byte that is not UTF-8; the whole file is checked before any part of it is used."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            block = file.read(_READ_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return offset - pending + error.start
            if not block:
                return None
            offset += len(block)


def _read_parts(path: Path, max_bytes: int) -> Iterator[str]:
    """Parts of a large file, cut after the last line end that fits (or between characters where a line is longer)."""
    with path.open("rb") as file:
        rest = b""
        while block := rest + file.read(max_bytes - len(rest)):
            is_last = len(block) < max_bytes
            cut = len(block) if is_last else block.rfind(b"\n") + 1 or _last_character_end(block)
            yield block[:cut].decode("utf-8")
            rest = block[cut:]


def _last_character_end(block: bytes) -> int:
    """Where the last complete UTF-8 character of `block` ends."""
    end = len(block)
    while end > 1 and 0x80 <= block[end - 1] < 0xC0:
        end -= 1
    return end - 1
