"""Tars from anywhere, read as a stream of entries that cannot mean anything outside of the tree they are applied to.

Names lose a leading slash; `..`, a NUL or an endless name are refused; devices and pipes are left out, for a guest's `/dev`
is its own. What a link leads to is not looked at here: `layers.py` follows links within the tree only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import subprocess
import tarfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal, Protocol

from moonlet.errors import TemplateError

MAX_ENTRIES = 2_000_000
MAX_BYTES = 256 << 30  # of all files of one tar
_MAX_NAME_BYTES = 4096
_MAX_HEADER_BYTES = 8 << 20  # one extended header
_CHUNK_BYTES = 1 << 20
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_LAST_TIME = 1 << 33

Kind = Literal["file", "dir", "symlink", "link", "whiteout", "opaque"]


@dataclass(frozen=True)
class Entry:
    """One name of a layer. `path` is relative, without `.` or `..`; "" is the root. `target` is a link's."""

    path: str
    kind: Kind
    mode: int = 0o755
    mtime: float = 0.0
    size: int = 0
    target: str = ""


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def read_entries(stream: Readable) -> Iterator[tuple[Entry, Readable | None]]:
    """Entries of an uncompressed tar in its order; of a file with its content, to be read before the next one.

    Raises TemplateError for what is no tar, is cut short, or is hostile.
    """
    counted = entries = 0
    try:
        with tarfile.open(fileobj=_Forward(stream), mode="r:", errors="surrogateescape") as tar:  # type: ignore[arg-type]
            while member := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # a million of them would stay in memory
                entries, counted = entries + 1, counted + max(0, member.size if member.isreg() else 0)
                if entries > MAX_ENTRIES or counted > MAX_BYTES:
                    raise TemplateError(
                        f"the tar has more than {MAX_ENTRIES} entries or {MAX_BYTES >> 30} GiB of files"
                    )
                entry = _entry(member)
                if entry is not None:
                    file = tar.extractfile(member) if entry.kind == "file" else None
                    yield entry, _Content(file) if file else None
    except (tarfile.TarError, EOFError, UnicodeError, OverflowError, ValueError) as error:
        raise TemplateError(f"not a whole tar: {error}") from error


class _Content:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._file.read(size)
        except tarfile.TarError as error:
            raise TemplateError(f"not a whole tar: {error}") from error


def _entry(member: tarfile.TarInfo) -> Entry | None:
    path = clean_path(member.name)
    parent, _, name = path.rpartition("/")
    if name == _OPAQUE:
        return Entry(parent, "opaque")
    if name.startswith(_WHITEOUT):
        hidden = name[len(_WHITEOUT) :]
        if hidden.startswith(_WHITEOUT):
            return None  # bookkeeping of aufs
        if hidden in ("", ".", ".."):
            raise TemplateError(f"the tar has a whiteout of nothing: {member.name!r}")
        return Entry(f"{parent}/{hidden}" if parent else hidden, "whiteout")
    mode, mtime = member.mode & 0o7777, _time(member.mtime)
    if member.isdir():
        return Entry(path, "dir", mode, mtime)
    if not path:
        raise TemplateError(f"the tar has something that is no directory as its root: {member.name!r}")
    if member.issym():
        return Entry(path, "symlink", mode, mtime, target=_checked(member.linkname))
    if member.islnk():
        return Entry(path, "link", mode, mtime, target=clean_path(member.linkname))
    if member.isreg():
        return Entry(path, "file", mode, mtime, size=member.size)
    return None


def clean_path(name: str) -> str:
    """Relative, without empty parts and `.`. Raises TemplateError for `..`."""
    parts = [part for part in _checked(name, may_be_empty=True).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TemplateError(f"a name leads out of the tree: {name[:200]!r}")
    return "/".join(parts)


def _checked(name: str, *, may_be_empty: bool = False) -> str:
    if "\0" in name or len(name) > _MAX_NAME_BYTES or not (name or may_be_empty):
        raise TemplateError(f"a name is not one: {name[:100]!r}")
    return name


def _time(seconds: float) -> float:
    return min(max(0.0, float(seconds)), _LAST_TIME) if math.isfinite(seconds) else 0.0


class _Forward(io.RawIOBase):
    """What `tarfile` needs of a file, for a stream; a header that asks for a gigabyte is refused."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 1:
            offset += self._at
        if whence == 2 or offset < self._at:
            raise TemplateError("not a whole tar: a header points backwards")
        while self._at < offset and self.read(min(_CHUNK_BYTES, offset - self._at)):
            continue
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _MAX_HEADER_BYTES:
            raise TemplateError(f"the tar has a header of {size} bytes")
        parts, missing = [], size
        while missing and (data := self._stream.read(missing)):
            parts.append(data)
            missing -= len(data)
        self._at += size - missing
        return b"".join(parts)


class Digested:
    """A stream that knows the digest and the length of what went through it."""

    def __init__(self, stream: Readable, algorithm: str = "sha256") -> None:
        self._stream = stream
        self._hash = hashlib.new(algorithm)
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        self.size += len(data)
        return data

    def finish(self) -> str:
        """The digest of all of it, read to the end."""
        while self.read(_CHUNK_BYTES):
            continue
        return self._hash.hexdigest()


def decompressed(stream: Readable) -> Readable:
    """The tar in a stream that is plain, gzip or zstd; told by its first bytes, not by what it is said to be."""
    head = stream.read(4)
    rejoined = _Rejoined(head, stream)
    if head[:2] == b"\x1f\x8b":
        return _Gunzipped(rejoined)
    if head == b"\x28\xb5\x2f\xfd":
        return _Unzstd(rejoined)
    return rejoined


class _Rejoined:
    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._rest.read(size)
        data, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        return data


class _Gunzipped:
    def __init__(self, stream: Readable) -> None:
        self._file = gzip.GzipFile(fileobj=stream, mode="rb")  # type: ignore[call-overload]

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise TemplateError(f"a compressed layer is damaged or cut short: {error}") from error


class _Unzstd:
    """Through the program `zstd`: Python has it from 3.14 on only."""

    def __init__(self, stream: Readable) -> None:
        try:
            self._process = subprocess.Popen(["zstd", "-dc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except FileNotFoundError as error:
            raise TemplateError("a layer is compressed with zstd: install it (apt-get install zstd)") from error
        self._feeder = threading.Thread(target=self._feed, args=(stream,), daemon=True)
        self._error: Exception | None = None
        self._feeder.start()

    def _feed(self, stream: Readable) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while data := stream.read(_CHUNK_BYTES):
                    pipe.write(data)
        except BrokenPipeError:
            return
        except Exception as error:
            self._error = error

    def read(self, size: int = -1) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if not data and size != 0:
            self._feeder.join()
            if self._error is not None:
                raise self._error
            if self._process.wait():
                raise TemplateError("a layer compressed with zstd is damaged")
        return data
