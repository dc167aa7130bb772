"""A root file system that is being put together: names are resolved as its own programs would, never out of it.

The folder belongs to one builder alone, so nothing in it changes between a look and a deed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from moonlet.errors import TemplateError
from moonlet.sandbox.template.tarball import Entry

_MAX_HOPS = 40
_MAX_DEPTH = 256
_MAX_LINKS = {errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP}
_BAD_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EILSEQ}


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def hide(self, entry: Entry) -> None:
        """Remove what a whiteout names, or all that is in an opaque directory; nothing there is fine."""
        with _names_are_names(entry):
            if entry.kind == "opaque":
                folder = self._find_folder(entry.path)
                for child in os.listdir(folder) if folder else ():
                    remove(os.path.join(folder or "", child))
                return
            parent, _, name = entry.path.rpartition("/")
            folder = self._find_folder(parent)
            if folder:
                remove(os.path.join(folder, name))

    def put(self, entry: Entry, content: Path | None) -> None:
        """Make what an entry says; what is in its way goes, but a directory stays for a directory.

        Raises TemplateError if it cannot be: a hard link to nothing, a name that the file system does not take.
        """
        if not entry.path:
            return  # the root is there
        with _names_are_names(entry):
            parent, _, name = entry.path.rpartition("/")
            self._put_at(os.path.join(self._make_folder(parent), name), entry, content)

    def _put_at(self, path: str, entry: Entry, content: Path | None) -> None:
        if entry.kind == "dir":
            if not _is_folder(path):
                remove(path)
                os.mkdir(path)
            os.chmod(path, entry.mode | 0o700)
            return
        if entry.kind == "link":
            source = self._find_source(entry)
            if os.path.lexists(path) and os.path.samestat(os.lstat(source), os.lstat(path)):
                return
            aside = f"{self.root}.{uuid.uuid4().hex}"  # the source may be below what goes
            link_or_copy(source, aside)
            remove(path)
            os.rename(aside, path)
            return
        remove(path)
        if entry.kind == "symlink":
            os.symlink(entry.target, path)
        elif content is not None:
            link_or_copy(content, path)

    def _find_source(self, entry: Entry) -> str:
        parent, _, name = entry.target.rpartition("/")
        folder = self._find_folder(parent)
        source = os.path.join(folder, name) if folder and name else ""
        if not source or not os.path.lexists(source) or _is_folder(source):
            raise TemplateError(f"{entry.path!r} is a hard link to {entry.target!r}, which is no file")
        return source

    def _find_folder(self, path: str) -> str | None:
        return self._walk(path, make=False)

    def _make_folder(self, path: str) -> str:
        folder = self._walk(path, make=True)
        assert folder is not None
        return folder

    def _walk(self, path: str, *, make: bool) -> str | None:
        """The directory that `path` leads to, links followed as with the tree as `/`; None if it is not there.

        With `make` what is missing or is no directory becomes one.
        """
        at: list[str] = []
        todo = [part for part in reversed(path.split("/")) if part]
        hops = 0
        while todo:
            part = todo.pop()
            if part in (".", ".."):  # of a link's target
                at = at[:-1] if part == ".." else at
                continue
            here = os.path.join(self.root, *at, part)
            if os.path.islink(here) and hops < _MAX_HOPS:
                hops += 1
                target = os.readlink(here)
                at = [] if target.startswith("/") else at
                todo += [piece for piece in reversed(target.split("/")) if piece]
                continue
            if len(at) >= _MAX_DEPTH:
                raise TemplateError(f"the directories of {path[:200]!r} are more than {_MAX_DEPTH} deep")
            if not _is_folder(here):
                if not make:
                    return None
                remove(here)
                os.mkdir(here)
            at.append(part)
        return os.path.join(self.root, *at)


@contextlib.contextmanager
def _names_are_names(entry: Entry) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _BAD_NAMES:
            raise
        raise TemplateError(f"{entry.path[:200]!r} cannot be a name here: {error.strerror}") from error


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove(path: str) -> None:
    """A file, a link or a whole directory; links are never followed. Nothing there is fine."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return


def link_or_copy(source: Path | str, target: str) -> None:
    """A hard link; a copy where there are too many already or the file system has none. A link is linked, not followed."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _MAX_LINKS:
            raise
        shutil.copy2(source, target, follow_symlinks=False)
