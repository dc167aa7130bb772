"""`/filesystem.Filesystem/*`: directories and metadata of files, and watching them."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from moonlet.errors import GuestFileError
from moonlet.sandbox.api import FileEvent, FileInfo
from moonlet.sandbox.server.connect import ConnectError, StreamResponse, read_request, read_unary, timeout_s
from moonlet.sandbox.server.schema import rfc3339
from moonlet.sandbox.server.service import service_of
from moonlet.sandbox.server.traffic import followed, guest_of, note, sandbox_id_of, sandbox_of
from moonlet.sandbox.server.watchers import GuestWatch

router = APIRouter(prefix="/filesystem.Filesystem")

_KINDS = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}


def guest_path(path: object) -> str:
    """A path as the guest takes it: absolute or below its home, for which `~` stands."""
    if not isinstance(path, str) or not path:
        raise ConnectError("invalid_argument", "path must be a string that is not empty")
    if "\0" in path:
        raise ConnectError("invalid_argument", "a path cannot hold a NUL byte")
    if path == "~" or path.startswith("~/"):
        return path[2:].lstrip("/") or "."
    return path


def entry_body(info: FileInfo) -> dict[str, Any]:
    """One `EntryInfo`. A name that is not UTF-8 is shown with U+FFFD and given exactly, in base64, as `rawPath`."""
    raw = os.fsencode(info.path)
    path = raw.decode(errors="replace")
    body: dict[str, Any] = {
        "name": path.rstrip("/").rsplit("/", 1)[-1],
        "path": path,
        "type": _KINDS.get(info.kind, "FILE_TYPE_UNSPECIFIED"),
        "size": str(info.size),
        "mode": stat.S_IMODE(info.mode),
        "permissions": stat.filemode(info.mode)[1:],
        "owner": _account(info.owner),
        "group": _account(info.group),
        "modifiedTime": rfc3339(info.mtime),
    }
    if info.kind == "symlink":
        body |= {"symlinkTarget": os.fsencode(info.link_target).decode(errors="replace"), "isSymlink": True}
    if info.kind == "other":
        body["fullMode"] = info.mode
    if path != info.path:
        body["rawPath"] = base64.b64encode(raw).decode()
    return body


def _account(number: int) -> str:
    return "root" if number == 0 else str(number)


async def _read(request: Request) -> dict[str, Any]:
    return await read_unary(request, service_of(request).config.bounds.message_bytes)


@router.post("/Stat", response_model=None)
async def stat_entry(request: Request) -> Response:
    path = guest_path((await _read(request)).get("path"))
    async with guest_of(request) as guest:
        info = await guest.stat(path)
    return JSONResponse({"entry": entry_body(info)})


@router.post("/MakeDir", response_model=None)
async def make_dir(request: Request) -> Response:
    """An existing directory is an error to E2B's clients, which turn it into "False, nothing was made"."""
    path = guest_path((await _read(request)).get("path"))
    async with guest_of(request) as guest:
        if not await guest.make_dir(path):
            raise ConnectError("already_exists", f"{path} is already a directory")
        info = await guest.stat(path)
    note(request, "make_dir", path=path)
    return JSONResponse({"entry": entry_body(info)})


@router.post("/ListDir", response_model=None)
async def list_dir(request: Request) -> Response:
    body = await _read(request)
    depth, path = body.get("depth", 1), guest_path(body.get("path"))
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 64:
        raise ConnectError("invalid_argument", "depth must be a number from 1 to 64")
    limit = service_of(request).config.bounds.entries
    entries: list[dict[str, Any]] = []
    async with guest_of(request) as guest:
        async for info in guest.iter_files(path, depth=depth or 1):
            entries.append(entry_body(info))
            if len(entries) > limit:
                raise ConnectError("resource_exhausted", f"more than {limit} entries; list one directory at a time")
    return JSONResponse({"entries": entries})


@router.post("/Move", response_model=None)
async def move(request: Request) -> Response:
    body = await _read(request)
    source, target = guest_path(body.get("source")), guest_path(body.get("destination"))
    async with guest_of(request) as guest:
        await guest.stat(source)  # so that "not found" below can only mean the directory to move into
        try:
            await guest.rename(source, target)
        except GuestFileError as error:
            if error.code != "ENOENT":
                raise
            await guest.make_dir(os.path.dirname(target) or ".")
            await guest.rename(source, target)
        info = await guest.stat(target)
    note(request, "move", path=source, to=target)
    return JSONResponse({"entry": entry_body(info)})


@router.post("/Remove", response_model=None)
async def remove(request: Request) -> Response:
    """Removing what is not there succeeds, as with E2B."""
    path = guest_path((await _read(request)).get("path"))
    async with guest_of(request) as guest:
        try:
            await guest.remove(path)
        except GuestFileError as error:
            if error.code != "ENOENT":
                raise
    note(request, "remove", path=path)
    return JSONResponse({})


# -- watching ---------------------------------------------------------------------------------------------------------
def _event_body(event: FileEvent) -> dict[str, Any]:
    return {"name": os.fsencode(event.path).decode(errors="replace"), "type": f"EVENT_TYPE_{event.kind.upper()}"}


async def _open_watch(request: Request, body: dict[str, Any]) -> GuestWatch:
    watch = GuestWatch(sandbox_of(request), guest_path(body.get("path")), bool(body.get("recursive", False)))
    async with guest_of(request) as guest:
        await watch.open(guest)
    return watch


@router.post("/WatchDir", response_model=None)
async def watch_dir(request: Request) -> Response:
    body = await read_request(request, service_of(request).config.bounds.message_bytes)

    async def messages() -> AsyncGenerator[dict[str, Any]]:
        watch = await _open_watch(request, body)
        yield {"start": {}}
        async with aclosing(followed(request, watch.events())) as events:
            async for event in events:
                yield {"keepalive": {}} if event is None else {"filesystem": _event_body(event)}

    return StreamResponse(messages(), timeout_s(request))


@router.post("/CreateWatcher", response_model=None)
async def create_watcher(request: Request) -> Response:
    body = await _read(request)
    watchers, sandbox_id = service_of(request).watchers, sandbox_id_of(request)
    watchers.admit(sandbox_id)
    watch = await _open_watch(request, body)
    return JSONResponse({"watcherId": watchers.add(sandbox_id, watch.events())})


@router.post("/GetWatcherEvents", response_model=None)
async def get_watcher_events(request: Request) -> Response:
    body = await _read(request)
    events = service_of(request).watchers.take(sandbox_id_of(request), _watcher_id(body))
    return JSONResponse({"events": [_event_body(event) for event in events]})


@router.post("/RemoveWatcher", response_model=None)
async def remove_watcher(request: Request) -> Response:
    body = await _read(request)
    service_of(request).watchers.remove(sandbox_id_of(request), _watcher_id(body))
    return JSONResponse({})


def _watcher_id(body: dict[str, Any]) -> object:
    return body.get("watcherId", body.get("watcher_id"))
