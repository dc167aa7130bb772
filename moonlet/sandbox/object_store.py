"""Named blobs in a directory or behind any fsspec URL: written whole or not at all, listed with the store's own times."""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.errors import MissingDependencyError, StorageError
from moonlet.sandbox.generations import flush_folder

_UNFINISHED = ".unfinished"  # folder of half-written files, beside the finished ones


@dataclass(frozen=True)
class Blob:
    """A stored blob. `modified_at` is in Unix seconds by the clock of the store, which need not be ours."""

    key: str
    size: int
    modified_at: float


class ObjectStore(ABC):
    """Blobs by key (`a/b/c`). All methods block and may be called from several threads.

    Raises StorageError where the store cannot be reached, read or written, and FileNotFoundError for a key that is absent.
    """

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Put a whole blob; readers see the old one, or nothing, until all of it is there."""

    @abstractmethod
    def read(self, key: str, num_bytes: int | None = None) -> bytes:
        """The whole blob, or its first `num_bytes`."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a blob; it is no error if it is absent."""

    @abstractmethod
    def list(self, prefix: str) -> list[Blob]:
        """All blobs below the folder `prefix`."""

    def remove_unfinished(self, age_s: float) -> int:
        """Remove what writers that died more than `age_s` ago left; returns how many files."""
        return 0


def open_store(url: str | Path, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at a directory or at a URL that fsspec knows, such as `s3://bucket/prefix`.

    `options` go to the file system of fsspec. Without them s3 takes credentials and endpoint from the environment
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) and from the files that every S3 client reads.
    """
    text = str(url)
    if text.startswith("file://"):
        return DirectoryStore(Path(text.removeprefix("file://")))
    return FsspecStore(text, options or {}) if "://" in text else DirectoryStore(Path(text))


class DirectoryStore(ObjectStore):
    """Blobs as files of a directory, which several hosts may share. What it makes is for the owner only (0700, 0600)."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    def write(self, key: str, data: bytes) -> None:
        target = self.root / key
        with _storage_errors(f"cannot write {target}", is_write=True):
            unfinished = self.root / _UNFINISHED
            for folder in (unfinished, target.parent):
                _make_private_dirs(folder)
            handle, name = tempfile.mkstemp(dir=unfinished)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            flush_folder(target.parent)

    def read(self, key: str, num_bytes: int | None = None) -> bytes:
        with _storage_errors(f"cannot read {self.root / key}"), open(self.root / key, "rb") as file:
            return file.read() if num_bytes is None else file.read(num_bytes)

    def exists(self, key: str) -> bool:
        return (self.root / key).is_file()

    def remove(self, key: str) -> None:
        with _storage_errors(f"cannot remove {self.root / key}"), contextlib.suppress(FileNotFoundError):
            (self.root / key).unlink()

    def list(self, prefix: str) -> list[Blob]:
        found = []
        with _storage_errors(f"cannot list {self.root / prefix}"):
            for folder, _, names in os.walk(self.root / prefix):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):  # removed by another host in this moment
                        stat = path.stat()
                        found.append(Blob(path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime))
        return found

    def remove_unfinished(self, age_s: float) -> int:
        blobs = self.list(_UNFINISHED)
        with tempfile.TemporaryFile(dir=self.root) as file:
            now = os.fstat(file.fileno()).st_mtime  # by the clock of the server that holds the directory
        old = [blob for blob in blobs if now - blob.modified_at > age_s]
        for blob in old:
            self.remove(blob.key)
        return len(old)


class FsspecStore(ObjectStore):
    """Blobs behind a URL of fsspec. The store itself must put a blob whole or not at all, as S3 does."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            import fsspec

            file_system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            package = error.name or "fsspec"
            raise MissingDependencyError(package, "store", f"the snapshot store {url}") from None
        except ValueError as error:
            raise StorageError(
                f"{url} is no place for snapshots: {error}; give a directory or s3://BUCKET/PREFIX"
            ) from error
        self.url, self._root = url.rstrip("/"), root.rstrip("/")
        self._fs = file_system

    def write(self, key: str, data: bytes) -> None:
        with _storage_errors(f"cannot write {self.url}/{key}", is_write=True):
            self._fs.pipe_file(f"{self._root}/{key}", data)

    def read(self, key: str, num_bytes: int | None = None) -> bytes:
        with _storage_errors(f"cannot read {self.url}/{key}"):
            return self._fs.cat_file(f"{self._root}/{key}", start=None if num_bytes is None else 0, end=num_bytes)

    def exists(self, key: str) -> bool:
        with _storage_errors(f"cannot look for {self.url}/{key}"):
            return self._fs.exists(f"{self._root}/{key}")

    def remove(self, key: str) -> None:
        with _storage_errors(f"cannot remove {self.url}/{key}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{key}")

    def list(self, prefix: str) -> list[Blob]:
        with _storage_errors(f"cannot list {self.url}/{prefix}"):
            found = self._fs.find(f"{self._root}/{prefix}", detail=True)
        return [
            Blob(name.removeprefix(f"{self._root}/"), int(entry.get("size") or 0), _modified_at(entry))
            for name, entry in found.items()
        ]


def _modified_at(entry: Mapping[str, Any]) -> float:
    """Time of the last change; file systems of fsspec name and type it as they like."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = entry.get(name)
        if value is not None:
            return value.timestamp() if hasattr(value, "timestamp") else float(value)
    return 0.0


@contextlib.contextmanager
def _storage_errors(what: str, *, is_write: bool = False) -> Iterator[None]:
    """Turn what a file system raises into StorageError. A write never ends in 'not found': its bucket or disk is absent."""
    try:
        yield
    except FileNotFoundError as error:
        if not is_write:
            raise
        raise StorageError(f"{what}: {error}; make the bucket or directory first") from error
    except (OSError, TimeoutError) as error:
        raise StorageError(f"{what}: {error}") from error
    except Exception as error:
        # Clients of object stores have error trees of their own, which we cannot name without importing them.
        if type(error).__module__.split(".")[0] not in ("botocore", "aiobotocore", "aiohttp", "s3fs", "fsspec"):
            raise
        raise StorageError(f"{what}: {error}") from error


def _make_private_dirs(folder: Path) -> None:
    """Missing folders for the owner only; those that exist keep the mode that somebody gave them."""
    if not folder.is_dir():
        _make_private_dirs(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
