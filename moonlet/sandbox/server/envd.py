"""What E2B's daemon in the sandbox answers: `/files`, `/health`, `/metrics`, `/envs`; its calls are in their own modules."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from moonlet.errors import GuestFileError
from moonlet.sandbox.envelope import parse_message
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import Reply
from moonlet.sandbox.server.connect import ConnectError, read_body
from moonlet.sandbox.server.filesystem import guest_path
from moonlet.sandbox.server.service import service_of
from moonlet.sandbox.server.traffic import guest_of, note, sandbox_id_of, sandbox_of
from moonlet.sandbox.server.uploads import PIECE_BYTES, MultipartBody, read_stream

READ_S = 60.0

router = APIRouter()


def query_of(request: Request) -> dict[str, str]:
    """The query with names of files that need not be UTF-8."""
    text = request.scope["query_string"].decode("latin-1")
    return dict(parse_qsl(text, keep_blank_values=True, errors="surrogateescape"))


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    return Response(status_code=204)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    manager, sandbox_id = service_of(request).manager, sandbox_id_of(request)
    info, usage = await manager.info(sandbox_id), await manager.usage(sandbox_id)
    return JSONResponse(
        {
            "ts": int(time.time()),
            "cpu_count": max(1, round(info.limits.cpus)),
            "cpu_used_pct": 0.0,
            "mem_total": info.limits.memory_bytes,
            "mem_used": usage.memory_bytes,
            "disk_total": info.limits.disk_bytes,
            "disk_used": usage.disk_bytes,
        }
    )


@router.get("/envs", response_model=None)
async def envs(request: Request) -> Response:
    """The variables that every command of this sandbox is given."""
    return JSONResponse(service_of(request).manager.env(sandbox_id_of(request)))


@router.post("/init", response_model=None)
async def init(request: Request) -> Response:
    """E2B's orchestrator sets up a machine with this; ours are set up when they run."""
    body = await read_body(request, service_of(request).config.bounds.json_bytes)
    if body and parse_message(body).get("envVars"):
        raise ConnectError("unimplemented", "set variables when the sandbox is created, or per command")
    return Response(status_code=204)


# -- files ------------------------------------------------------------------------------------------------------------
@router.get("/files", response_model=None)
async def download(request: Request) -> Response:
    """A file of any size or one range of it, read piece by piece as the client takes them."""
    path = guest_path(query_of(request).get("path"))
    first, size = await _read_piece(request, path, 0)
    name = posixpath.basename(path).encode("ascii", "replace").decode()
    name = "".join(character if character.isprintable() and character not in '"\\' else "?" for character in name)
    headers = {"Content-Disposition": f'inline; filename="{name}"', "Accept-Ranges": "bytes"}
    if len(first) > size:  # a file of /proc says 0 and yet has content; its end is found by reading
        return StreamingResponse(_all_pieces(request, path, first), 200, headers, "application/octet-stream")
    start, end = _range(request.headers.get("range"), size)
    headers["Content-Length"] = str(end - start)
    status = 200
    if (start, end) != (0, size):
        status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
    pieces = _pieces(request, path, start, end, first if start == 0 else b"")
    return StreamingResponse(pieces, status, headers, "application/octet-stream")


def _range(text: str | None, size: int) -> tuple[int, int]:
    """First byte and the one after the last that are asked for; several ranges, or units other than bytes, are the whole."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", text or "")
    if match is None or not (match[1] or match[2]):
        return 0, size
    if not match[1]:
        return max(0, size - int(match[2])), size
    start, end = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    if start >= end:
        raise RangeError(size)
    return start, end


class RangeError(Exception):
    """The range that is asked for is not in the file, which has `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size} bytes")
        self.size = size


async def _read_piece(request: Request, path: str, offset: int) -> tuple[bytes, int]:
    """The piece at `offset`, and the size of the file. While the sandbox is paused it waits."""

    async def read(guest: Guest) -> Reply:
        return await guest.stream.call("read", path=path, offset=offset, length=PIECE_BYTES, timeout_s=READ_S)

    reply = await sandbox_of(request).long_call(read)
    return reply.body, reply.number("size")


async def _all_pieces(request: Request, path: str, piece: bytes) -> AsyncIterator[bytes]:
    offset = 0
    while piece:
        offset += len(piece)
        yield piece
        piece, _ = await _read_piece(request, path, offset)


async def _pieces(request: Request, path: str, offset: int, end: int, piece: bytes) -> AsyncIterator[bytes]:
    """The guest is asked for the next piece only when the last one is on its way, so a slow reader fills no memory."""
    while offset < end:
        piece = piece or (await _read_piece(request, path, offset))[0]
        if not piece:
            raise GuestFileError(f"{path} shrank while it was read", "EIO")
        piece = piece[: end - offset]
        offset += len(piece)
        yield piece
        piece = b""


@router.post("/files", response_model=None)
async def upload(request: Request) -> Response:
    """One file as an octet stream, or several as multipart; each is whole or not there."""
    query = query_of(request)
    is_multipart = request.headers.get("content-type", "").lower().startswith("multipart/")
    mode = _mode(query.get("mode"))
    if is_multipart:
        entries = await _upload_parts(request, query.get("path"), mode)
    else:
        entries = [await _upload_one(request, guest_path(query.get("path")), read_stream(request), mode)]
    return JSONResponse(entries)


async def _upload_parts(request: Request, path: str | None, mode: int | None) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = []
    async for part in MultipartBody(request, service_of(request).config.bounds.upload_parts).parts():
        if part.name != "file":
            continue
        if path is not None and entries:
            raise ConnectError("invalid_argument", "several files came for one path; leave out the path")
        entries.append(await _upload_one(request, guest_path(path or part.filename), part.data(), mode))
    if not entries:
        raise ConnectError("invalid_argument", "the upload holds no field named 'file'")
    return entries


def _mode(text: str | None) -> int | None:
    """Permissions in octal, which clients of ours send with a file."""
    if text is None:
        return None
    if not (1 <= len(text) <= 4 and set(text) <= set("01234567")):
        raise ConnectError("invalid_argument", "mode must be octal, such as 644")
    return int(text, 8)


async def _upload_one(request: Request, path: str, data: AsyncIterator[bytes], mode: int | None) -> dict[str, str]:
    async with guest_of(request) as guest:
        await guest.upload(data, path, mode=mode)
        path = (await guest.stat(path)).path
    note(request, "upload", path=path)
    shown = os.fsencode(path).decode(errors="replace")
    return {"path": shown, "name": posixpath.basename(shown), "type": "file"}
