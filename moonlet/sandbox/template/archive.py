"""An image as it lies on a disk: a folder, or a tar of one. Files are found by name; nothing is unpacked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from moonlet.errors import TemplateError
from moonlet.sandbox.template.tarball import MAX_ENTRIES, clean_path

_MAX_JSON_BYTES = 16 << 20
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")


class Archive(ABC):
    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Raises TemplateError if there is no such file."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    def load(self, name: str) -> Any:
        with self.open(name) as file:
            return parse_json(file.read(_MAX_JSON_BYTES + 1), name)

    def load_blob(self, descriptor: Any) -> Any:
        """The JSON that an OCI descriptor points to, if its content has the digest."""
        name, algorithm, expected = blob_name(descriptor)
        with self.open(name) as file:
            data = file.read(_MAX_JSON_BYTES + 1)
        if hashlib.new(algorithm, data).hexdigest() != expected:
            raise TemplateError(f"{name} does not have the content that its name says: the image is damaged")
        return parse_json(data, name)


def blob_name(descriptor: Any) -> tuple[str, str, str]:
    """File, algorithm and digest of a descriptor."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise TemplateError(f"the image names a blob by {digest!r}, which is no SHA-256 or SHA-512")
    algorithm, _, value = digest.partition(":")
    return f"blobs/{algorithm}/{value}", algorithm, value


def parse_json(data: bytes, name: str) -> Any:
    if len(data) > _MAX_JSON_BYTES:
        raise TemplateError(f"{name} is larger than {_MAX_JSON_BYTES >> 20} MiB: no image has that")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{name} is no JSON: {error}") from error


class FolderArchive(Archive):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return (self._folder / clean_path(name)).is_file()

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            file = (self._folder / clean_path(name)).open("rb")
        except OSError as error:
            raise TemplateError(f"the image lacks {name}: {error.strerror}") from error
        with file:
            yield file


class TarArchive(Archive):
    """A tar, also a compressed one. Links in it lead to other files in it."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members: dict[str, tarfile.TarInfo] = {}
        while member := tar.next():
            if len(self._members) > MAX_ENTRIES:
                raise TemplateError(f"the tar of an image has more than {MAX_ENTRIES} entries")
            with contextlib.suppress(TemplateError):  # a name that leads out of it is no part of an image
                self._members[clean_path(member.name)] = member

    def has(self, name: str) -> bool:
        return clean_path(name) in self._members

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        member = self._members.get(clean_path(name))
        try:
            file = self._tar.extractfile(member) if member else None
        except (KeyError, RecursionError) as error:
            raise TemplateError(f"{name} is a link to nothing in the tar of the image") from error
        if file is None:
            raise TemplateError(f"the tar of the image lacks {name}")
        with file:
            yield file


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Raises TemplateError where there is neither a folder nor a tar."""
    if path.is_dir():
        yield FolderArchive(path)
        return
    try:
        with tarfile.open(path, "r:*", errors="surrogateescape") as tar:
            yield TarArchive(tar)
    except FileNotFoundError as error:
        raise TemplateError(f"there is no image {path}") from error
    except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
        raise TemplateError(f"{path} is no tar of an image, or is cut short: {error}") from error
