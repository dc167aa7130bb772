"""Files of a guest: whole, in pieces, and as listings. Paths are resolved in the guest, never here."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from moonlet.errors import GuestFileError, SandboxError, StorageError
from moonlet.sandbox.api import FileInfo
from moonlet.sandbox.guest.stream import MAX_BODY_BYTES, GuestStream, Reply, Request

MAX_READ_BYTES = 1 << 30  # of `read_file`; larger ones are downloaded
_WINDOW = 4  # pieces under way at once
_ANSWER_S = 60.0
_LOCAL_BYTES = 4 << 20
_KINDS = {"file", "dir", "symlink", "other"}


def guest_path(path: str | os.PathLike[str]) -> str:
    """A path for the agent. Raises GuestFileError for one that no file can have."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise GuestFileError(f"{text!r} is not a path", "EINVAL")
    return text


def file_info(fields: dict[str, Any]) -> FileInfo:
    """A listing's entry. Raises SandboxError if the guest sent something else."""
    kind, path, link = fields.get("kind"), fields.get("path"), fields.get("link", "")
    mtime = fields.get("mtime")
    if (
        kind not in _KINDS
        or not isinstance(path, str)
        or not isinstance(link, str)
        or not isinstance(mtime, int | float)
    ):
        raise SandboxError("the guest agent sent a directory entry that is none: it is broken")
    numbers = Reply(fields)
    return FileInfo(
        path=path,
        kind=kind,
        size=numbers.number("size"),
        mode=numbers.number("mode"),
        mtime=float(mtime),
        owner=numbers.number("owner"),
        group=numbers.number("group"),
        link_target=link,
    )


class GuestFiles:
    """The half of `Guest` that works on files. All raise GuestFileError with the errno's name."""

    stream: GuestStream

    async def read(self, path: str, offset: int = 0, length: int = MAX_BODY_BYTES) -> bytes:
        """At most `length` bytes (no more than MAX_BODY_BYTES) from `offset`; empty at the end of the file."""
        reply = await self.stream.call("read", path=guest_path(path), offset=offset, length=length, timeout_s=_ANSWER_S)
        return reply.body

    async def read_file(self, path: str) -> bytes:
        """A whole file, at most MAX_READ_BYTES."""
        pieces, size = [], 0
        async for piece in self.stream_file(path):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_READ_BYTES:
                raise GuestFileError(f"{path} has more than {MAX_READ_BYTES} bytes: download it instead", "EFBIG")
        return b"".join(pieces)

    async def stream_file(self, path: str) -> AsyncIterator[bytes]:
        """A file of any size in pieces, some read ahead."""
        path = guest_path(path)
        first = await self.stream.call("read", path=path, offset=0, length=MAX_BODY_BYTES, timeout_s=_ANSWER_S)
        size, offset = first.number("size"), len(first.body)
        yield first.body
        if not first.body or (offset == size and offset < MAX_BODY_BYTES):
            return
        ahead: deque[tuple[int, Request]] = deque()
        try:
            while True:
                while len(ahead) < (_WINDOW if offset + len(ahead) * MAX_BODY_BYTES < size else 1):
                    at = offset + len(ahead) * MAX_BODY_BYTES
                    ahead.append((at, self.stream.request("read", path=path, offset=at, length=MAX_BODY_BYTES)))
                _, request = ahead.popleft()
                piece = (await request.wait(_ANSWER_S)).body
                if not piece:
                    return
                yield piece
                offset += len(piece)
                if len(piece) < MAX_BODY_BYTES:  # what was read ahead starts too far behind
                    while ahead:
                        ahead.pop()[1].cancel()
        finally:
            for _, request in ahead:
                request.cancel()

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """All or nothing; missing parent directories are made; a link's target is replaced, not the link.

        Without `mode` an existing file keeps its own and a new one gets 0644.
        """
        if len(data) <= MAX_BODY_BYTES:
            await self.stream.call(
                "put", body=bytes(data), path=guest_path(path), mode=_mode(mode), timeout_s=_ANSWER_S
            )
            return

        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await self.upload(pieces(), path, mode=mode)

    async def upload(self, source: Path | AsyncIterator[bytes], path: str, *, mode: int | None = None) -> None:
        """A local file, or pieces of any size, streamed to a temporary name that gets its own at the end.

        Raises StorageError if the local file cannot be read.
        """
        if isinstance(source, Path):
            mode = _local_mode(source) if mode is None else mode
            source = _local_pieces(source)
        path = guest_path(path)
        reply = await self.stream.call("begin", path=path)
        temporary = reply.fields.get("temporary")
        if not isinstance(temporary, str):
            raise SandboxError("the guest agent named no temporary file: it is broken")
        try:
            await self._write_pieces(temporary, source)
            await self.stream.call("rename", path=temporary, to=path, replace=True, mode=_mode(mode))
        except BaseException:
            self.stream.post("remove", path=temporary)
            raise

    async def _write_pieces(self, path: str, source: AsyncIterator[bytes]) -> None:
        offset = 0
        under_way: deque[Request] = deque()
        try:
            async for data in source:
                for at in range(0, len(data), MAX_BODY_BYTES):
                    piece = bytes(data[at : at + MAX_BODY_BYTES])
                    under_way.append(self.stream.request("write", body=piece, path=path, offset=offset))
                    offset += len(piece)
                    if len(under_way) >= _WINDOW:
                        await under_way.popleft().wait(_ANSWER_S)
            while under_way:
                await under_way.popleft().wait(_ANSWER_S)
        finally:
            for request in under_way:
                request.cancel()

    async def download(self, path: str, target: Path) -> None:
        """To a local file, through a temporary one beside it. Raises StorageError if that cannot be written."""
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            file = await asyncio.to_thread(open, unfinished, "xb")
            with file:
                async for piece in self.stream_file(path):
                    await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(os.replace, unfinished, target)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; free some space or choose another place") from error
        finally:
            unfinished.unlink(missing_ok=True)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        """Entries in order of their names, each directory before what it holds, at most `depth` levels."""
        return [info async for info in self.iter_files(path, depth=depth)]

    async def iter_files(self, path: str = ".", *, depth: int = 1) -> AsyncIterator[FileInfo]:
        """The same, page by page."""
        path, after, base = guest_path(path), "", None
        while True:
            reply = await self.stream.call("list", path=path, depth=depth, after=after, timeout_s=_ANSWER_S)
            entries = [file_info(item) for item in reply.objects("entries")]
            for info in entries:
                yield info
            if not reply.flag("more") or not entries:
                return
            if base is None:
                base = reply.fields.get("base")
                if not isinstance(base, str):
                    raise SandboxError("the guest agent's listing names no directory: it is broken")
            after = entries[-1].path.removeprefix(base).lstrip("/")

    async def stat(self, path: str) -> FileInfo:
        reply = await self.stream.call("stat", path=guest_path(path))
        entry = reply.fields.get("entry")
        return file_info(entry if isinstance(entry, dict) else {})

    async def make_dir(self, path: str) -> bool:
        """With its parents; False if it is there already."""
        return (await self.stream.call("mkdir", path=guest_path(path))).flag("created")

    async def remove(self, path: str) -> None:
        """A file, a link or a whole directory."""
        await self.stream.call("remove", path=guest_path(path), timeout_s=None)

    async def rename(self, path: str, to: str) -> None:
        await self.stream.call("rename", path=guest_path(path), to=guest_path(to))


def _mode(mode: int | None) -> int:
    return -1 if mode is None else mode & 0o7777


def _local_mode(source: Path) -> int:
    try:
        return os.stat(source).st_mode & 0o777
    except OSError as error:
        raise StorageError(f"cannot read {source}: {error.strerror}; check the path") from error


async def _local_pieces(source: Path) -> AsyncIterator[bytes]:
    try:
        with await asyncio.to_thread(open, source, "rb") as file:
            while piece := await asyncio.to_thread(file.read, _LOCAL_BYTES):
                yield piece
    except OSError as error:
        raise StorageError(f"cannot read {source}: {error.strerror or error}; check the path") from error
