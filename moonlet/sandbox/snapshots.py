"""Snapshots kept outside of the state directory: in a shared directory, or in an S3-compatible store through fsspec.

    objects/ab/abcd...     pieces of files, named by the SHA-256 of their contents, shared by all snapshots
    snapshots/ID           manifest: one line of facts, then the list of files; written last, so that a snapshot is whole
                           or invisible
    uploads/, collectors/  leases: who is adding pieces, who is removing those that no manifest names

Adding and removing exclude each other without locks, which object stores lack: each writes its lease first and looks for
leases of the other kind afterwards. One of two that meet sees the other, whatever the order; an upload then steps back
and waits. Leases of hosts that died run out by the clock of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from moonlet.errors import SandboxNotFoundError, SnapshotError, StorageError
from moonlet.sandbox.file_tree import (
    Entry,
    Extent,
    check_tree,
    data_ranges,
    finish_tree,
    make_tree,
    read_range,
    scan_tree,
    write_range,
)
from moonlet.sandbox.generations import in_thread, storage_errors, whole_folder
from moonlet.sandbox.object_store import ObjectStore, open_store

CHUNK_BYTES = 4 << 20  # small enough that forks of one machine share most pieces of their RAM, large enough for S3
_SMALL_BYTES = CHUNK_BYTES // 4  # smaller files share a piece with their neighbours
_FORMAT = 1
_HEAD_BYTES = 4096
_AT_ONCE = 4  # pieces in flight, each of CHUNK_BYTES twice
_LEASE_S = 900.0
_REFRESH_S = 60.0
_COLLECT_WAIT_S = 10.0  # removal does not wait longer for uploads to end; a later one collects what is left
_COLLECT_LIMIT_S = 300.0  # a collector stops long before its lease runs out
_RAW, _ZLIB = b"\0", b"\1"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot in a repository. `num_bytes` is the size of its files without their holes, before compression."""

    id: str
    created_at: float
    num_bytes: int
    num_files: int


class SnapshotRepository:
    """Folders by snapshot id. Safe for several services that share one repository.

    `url` is a directory or a URL of fsspec (`s3://bucket/prefix`); `options` are those of its file system. Raises
    StorageError where the store cannot be used, MissingDependencyError without the extra `store`.
    """

    def __init__(self, url: str | Path, options: Mapping[str, Any] | None = None) -> None:
        self.url = str(url)
        self._store: ObjectStore = open_store(url, options)
        self._fetching: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def put(self, snapshot_id: str, folder: Path) -> StoredSnapshot:
        """Store all of `folder`, which must not change meanwhile; only pieces that are not there yet are sent.

        Raises SnapshotError for contents that cannot be kept. After an error or a crash no snapshot is visible.
        """
        key = _manifest_key(snapshot_id)
        entries = await in_thread(scan_tree, folder)
        async with self._upload_lease() as confirm:
            num_bytes = await self._put_pieces(folder, entries)
            files = sum(entry.kind == "file" for entry in entries)
            stored = StoredSnapshot(snapshot_id, time.time(), num_bytes, files)
            await confirm()
            await in_thread(self._store.write, key, _manifest(stored, entries))
            try:
                await confirm()
            except StorageError:
                await in_thread(self._store.remove, key)
                raise
        return stored

    async def fetch(self, snapshot_id: str, folder: Path) -> None:
        """Make `folder` with what was put; all or nothing, readable by the owner only. A folder that is there is kept.

        Raises SandboxNotFoundError, and SnapshotError if a piece is missing or is not what was stored.
        """
        _, entries = await in_thread(self._read_manifest, snapshot_id)
        async with self._fetching.setdefault(folder, asyncio.Lock()):  # two that want the same share one download
            if not folder.exists():
                with storage_errors(f"cannot write snapshot {snapshot_id} into {folder.parent}"):
                    async with whole_folder(folder) as unfinished:
                        await in_thread(make_tree, unfinished, entries)
                        await self._fetch_pieces(snapshot_id, unfinished, entries)
                        await in_thread(finish_tree, unfinished, entries)
                        unfinished.chmod(0o700)

    async def remove(self, snapshot_id: str) -> None:
        """Remove a snapshot, and all pieces that no snapshot needs unless an upload is going on; idempotent."""
        await in_thread(self._store.remove, _manifest_key(snapshot_id))
        try:
            await self._collect()
        except SnapshotError as error:
            log.warning("snapshots in %s: nothing can be freed: %s", self.url, error)

    async def list(self) -> list[StoredSnapshot]:
        """All whole snapshots, oldest first; damaged ones are left out with a warning."""
        blobs = await in_thread(self._store.list, "snapshots")
        found = []
        for blob in blobs:
            try:
                head = await in_thread(self._store.read, blob.key, _HEAD_BYTES)
                found.append(_stored(_head(head, blob.key.removeprefix("snapshots/"))))
            except FileNotFoundError:
                continue
            except SnapshotError as error:
                log.warning("snapshots in %s: %s", self.url, error)
        return sorted(found, key=lambda snapshot: (snapshot.created_at, snapshot.id))

    async def sweep(self) -> int:
        """Remove what uploads that died have left; returns how many pieces and files went.

        Raises SnapshotError if a manifest is damaged, since then nobody knows which pieces it needs.
        """
        unfinished = await in_thread(self._store.remove_unfinished, _LEASE_S)
        return unfinished + await self._collect()

    # -- pieces -------------------------------------------------------------------------------------------------------
    async def _put_pieces(self, folder: Path, entries: Iterable[Entry]) -> int:
        """Store contents and note in `entries` where they are; returns their number of bytes."""
        known: set[str] = set()
        num_bytes = 0

        async def put(piece: _Piece) -> None:
            nonlocal num_bytes
            data, name = await in_thread(piece.read, folder)
            if name is None:
                return
            num_bytes += len(data)
            piece.note(name)
            if name not in known:
                known.add(name)
                await in_thread(self._put_piece, name, data)

        await _for_each(put, await in_thread(_cut, folder, entries))
        for entry in entries:
            entry.extents.sort(key=lambda extent: extent.offset)
        return num_bytes

    def _put_piece(self, name: str, data: bytes) -> None:
        key = _piece_key(name)
        if self._store.exists(key):
            return
        packed = zlib.compress(data, 1)
        self._store.write(key, _ZLIB + packed if len(packed) < len(data) else _RAW + data)

    async def _fetch_pieces(self, snapshot_id: str, folder: Path, entries: Iterable[Entry]) -> None:
        users: dict[str, list[tuple[str, Extent]]] = {}
        for entry in entries:
            for extent in entry.extents:
                users.setdefault(extent.chunk, []).append((entry.path, extent))

        def fetch(name: str) -> None:
            data = self._read_piece(name, snapshot_id)
            for path, extent in users[name]:
                if extent.at + extent.length > len(data):
                    raise SnapshotError(f"snapshot {snapshot_id} of {self.url}: piece {name} is too short")
                write_range(folder / path, extent.offset, data[extent.at : extent.at + extent.length])

        await _for_each(lambda name: in_thread(fetch, name), users)

    def _read_piece(self, name: str, snapshot_id: str) -> bytes:
        damage = f"snapshot {snapshot_id} of {self.url} is damaged"
        try:
            stored = self._store.read(_piece_key(name))
        except FileNotFoundError:
            raise SnapshotError(f"{damage}: its piece {name} is missing; remove the snapshot") from None
        try:
            data = stored[1:]
            if stored[:1] == _ZLIB:
                unpacker = zlib.decompressobj()
                data = unpacker.decompress(data, CHUNK_BYTES)
        except zlib.error:
            data = b""
        if hashlib.sha256(data).hexdigest() != name:
            raise SnapshotError(f"{damage}: its piece {name} is not what was stored; remove the snapshot")
        return data

    def _read_manifest(self, snapshot_id: str) -> tuple[dict[str, Any], list[Entry]]:
        try:
            data = self._store.read(_manifest_key(snapshot_id))
        except FileNotFoundError:
            raise SandboxNotFoundError(f"there is no snapshot {snapshot_id} in {self.url}") from None
        head = _head(data, snapshot_id)
        body = data[data.index(b"\n") + 1 :]
        if hashlib.sha256(body).hexdigest() != head.get("sha256"):
            raise SnapshotError(f"the manifest of snapshot {snapshot_id} in {self.url} is damaged; remove the snapshot")
        try:
            entries = [Entry.from_json(record) for record in json.loads(zlib.decompress(body))]
            check_tree(entries)
        except (TypeError, ValueError, zlib.error) as error:
            raise SnapshotError(f"the manifest of snapshot {snapshot_id} in {self.url} is not one: {error}") from error
        return head, entries

    # -- leases -------------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _upload_lease(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Keeps pieces from being removed; yields a check that the lease was never taken for one of a dead host."""
        key = f"uploads/{secrets.token_hex(8)}"
        await self._take_upload_lease(key)
        refresher = asyncio.create_task(self._refresh(key))

        async def confirm() -> None:
            if not await in_thread(self._store.exists, key):
                raise StorageError(
                    f"the upload to {self.url} stood still for so long that it was given up; put it again"
                )

        try:
            yield confirm
        finally:
            refresher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refresher
            await asyncio.shield(in_thread(self._store.remove, key))

    async def _take_upload_lease(self, key: str) -> None:
        while True:
            await in_thread(self._store.write, key, _owner())
            if not await self._others(key, "collectors"):
                return
            await in_thread(self._store.remove, key)
            await asyncio.sleep(0.2)

    async def _refresh(self, key: str) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            if not await in_thread(self._store.exists, key):
                return  # given up by a collector: writing it again would hide that from `confirm`
            with contextlib.suppress(StorageError):
                await in_thread(self._store.write, key, _owner())

    async def _others(self, own: str, kind: str) -> list[str]:
        """Living leases of `kind` by the store's clock, which wrote our own as well; dead ones are removed."""
        mine = [blob for blob in await in_thread(self._store.list, own.split("/")[0]) if blob.key == own]
        now = mine[0].modified_at if mine else 0.0
        living = []
        for blob in await in_thread(self._store.list, kind):
            if now - blob.modified_at > _LEASE_S:
                await in_thread(self._store.remove, blob.key)
            else:
                living.append(blob.key)
        return living

    async def _collect(self) -> int:
        """Remove the pieces that no manifest names; returns how many. Leaves them if an upload goes on for too long."""
        key = f"collectors/{secrets.token_hex(8)}"
        start = time.monotonic()
        await in_thread(self._store.write, key, _owner())
        try:
            while await self._others(key, "uploads"):
                if time.monotonic() - start > _COLLECT_WAIT_S:
                    return 0
                await asyncio.sleep(0.2)
            return await in_thread(self._remove_unused, start + _COLLECT_LIMIT_S)
        finally:
            await asyncio.shield(in_thread(self._store.remove, key))

    def _remove_unused(self, deadline: float) -> int:
        needed: set[str] = set()
        for blob in self._store.list("snapshots"):
            with contextlib.suppress(SandboxNotFoundError):
                _, entries = self._read_manifest(blob.key.removeprefix("snapshots/"))
                needed.update(_piece_key(extent.chunk) for entry in entries for extent in entry.extents)
        removed = 0
        for blob in self._store.list("objects"):
            if time.monotonic() > deadline:
                break
            if blob.key not in needed:
                self._store.remove(blob.key)
                removed += 1
        return removed


# -- cutting into pieces ----------------------------------------------------------------------------------------------
class _Piece:
    """Ranges of files whose contents become one blob."""

    def __init__(self) -> None:
        self.ranges: list[tuple[Entry, int, int]] = []
        self.num_bytes = 0

    def add(self, entry: Entry, offset: int, length: int) -> None:
        self.ranges.append((entry, offset, length))
        self.num_bytes += length

    def read(self, folder: Path) -> tuple[bytes, str | None]:
        """The contents and their name; no name if all of them are zeros, which need not be stored."""
        data = b"".join(read_range(folder / entry.path, offset, length) for entry, offset, length in self.ranges)
        return data, None if data == bytes(len(data)) else hashlib.sha256(data).hexdigest()

    def note(self, name: str) -> None:
        at = 0
        for entry, offset, length in self.ranges:
            entry.extents.append(Extent(offset, length, name, at))
            at += length


def _cut(folder: Path, entries: Iterable[Entry]) -> list[_Piece]:
    """Large files at multiples of CHUNK_BYTES, small ones in order of their paths, many to a piece."""
    pieces, shared = [], _Piece()
    for entry in entries:
        if entry.kind != "file" or not entry.size:
            continue
        if entry.size < _SMALL_BYTES:
            if shared.num_bytes + entry.size > CHUNK_BYTES:
                pieces.append(shared)
                shared = _Piece()
            shared.add(entry, 0, entry.size)
            continue
        for offset, length in data_ranges(folder / entry.path, entry.size, CHUNK_BYTES):
            piece = _Piece()
            piece.add(entry, offset, length)
            pieces.append(piece)
    return [*pieces, shared] if shared.ranges else pieces


async def _for_each(work: Callable[[Any], Awaitable[None]], items: Iterable[Any]) -> None:
    """A few at a time. After the first error or a cancellation no more are begun, and those begun are waited for."""
    waiting = list(reversed(list(items)))

    async def worker() -> None:
        while waiting:
            await work(waiting.pop())

    workers = [asyncio.create_task(worker()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        waiting.clear()
        ends = await asyncio.gather(*workers, return_exceptions=True)
    for error in ends:
        if error is not None:
            raise error


# -- names and manifests ----------------------------------------------------------------------------------------------
def _manifest_key(snapshot_id: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", snapshot_id):
        raise SandboxNotFoundError(f"{snapshot_id!r} is no name of a snapshot: letters, digits, '.', '_' and '-'")
    return f"snapshots/{snapshot_id}"


def _piece_key(name: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise SnapshotError(f"{name!r} is no name of a piece: the manifest is damaged")
    return f"objects/{name[:2]}/{name}"


def _manifest(stored: StoredSnapshot, entries: Iterable[Entry]) -> bytes:
    body = zlib.compress(json.dumps([entry.as_json() for entry in entries]).encode())
    head = {"format": _FORMAT, **vars(stored), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def _head(data: bytes, snapshot_id: str) -> dict[str, Any]:
    try:
        head = json.loads(data[: data.index(b"\n")])
        _stored(head)
    except (ValueError, KeyError, TypeError):
        raise SnapshotError(f"the manifest of snapshot {snapshot_id} is damaged; remove the snapshot") from None
    if head.get("format") != _FORMAT or head["id"] != snapshot_id:
        raise SnapshotError(f"the manifest of snapshot {snapshot_id} is of another version of Moonlet; use that one")
    return head


def _stored(head: Mapping[str, Any]) -> StoredSnapshot:
    return StoredSnapshot(head["id"], head["created_at"], head["num_bytes"], head["num_files"])


def _owner() -> bytes:
    """Who holds a lease, for people who look into the store."""
    return f"{os.uname().nodename} {os.getpid()}".encode()
