"""A template from a directory that holds a root file system."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import TemplateError
from moonlet.sandbox.template.source import Made, Source, Workshop
from moonlet.sandbox.template.tree import link_or_copy


@dataclass(frozen=True)
class DirectorySource(Source):
    path: Path

    def __str__(self) -> str:
        return f"dir:{self.path}"

    def fill(self, workshop: Workshop) -> Made:
        if not self.path.is_dir():
            raise TemplateError(f"there is no directory {self.path}")
        if workshop.rootfs.resolve().is_relative_to(self.path.resolve()):
            raise TemplateError(f"{self.path} holds the store of templates itself: choose a directory beside it")
        workshop.tell(f"copying {self.path}")
        _copy_tree(self.path, workshop)
        return Made()


def _copy_tree(source: Path, workshop: Workshop) -> None:
    """Files, links and directories with their modes and times, owned by us; devices, pipes and sockets stay behind."""
    linked: dict[tuple[int, int], str] = {}
    todo = [(str(source), str(workshop.rootfs))]
    try:
        while todo:
            here, there = todo.pop()
            with os.scandir(here) as entries:
                for entry in entries:
                    workshop.tick()
                    target = os.path.join(there, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        os.mkdir(target)
                        os.chmod(target, stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) | 0o700)
                        todo.append((entry.path, target))
                    else:
                        _copy_file(entry, target, linked)
    except PermissionError as error:
        raise TemplateError(f"{error.filename} may not be read: build as its owner, or change its mode") from error


def _copy_file(entry: os.DirEntry[str], target: str, linked: dict[tuple[int, int], str]) -> None:
    facts = entry.stat(follow_symlinks=False)
    if stat.S_ISLNK(facts.st_mode):
        os.symlink(os.readlink(entry.path), target)
        return
    if not stat.S_ISREG(facts.st_mode):
        return
    key = (facts.st_dev, facts.st_ino)
    if key in linked:
        link_or_copy(linked[key], target)
        return
    shutil.copyfile(entry.path, target, follow_symlinks=False)
    os.chmod(target, stat.S_IMODE(facts.st_mode) | 0o400)
    os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    if facts.st_nlink > 1:
        linked[key] = target
