"""The end of every build: what a guest needs beside the source's files, and the name of what came out."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moonlet.sandbox.api import GUEST_HOME
from moonlet.sandbox.hostview import GROUP, HOSTS, PASSWD
from moonlet.sandbox.template.tree import remove

# Backends mount here; a link in such a place would lead a mount astray.
_FOLDERS = {"proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "tmp": 0o1777, "etc": 0o755, ".moonlet": 0o755}
_FOLDERS |= {GUEST_HOME[1:]: 0o755}
# Always as here: they would tell of the machine that the files come from, or lead into its network.
_OWN_FILES = {"hostname": "sandbox\n", "machine-id": "", "resolv.conf": "", "hosts": HOSTS, "ld.so.preload": ""}
_MISSING_FILES = {"passwd": PASSWD, "group": GROUP}


def finish_rootfs(root: Path) -> None:
    """Directories that every backend mounts on, and the files in `/etc` that are a guest's own.

    A file is made anew, never written into: it may be a hard link of one in the cache.
    """
    for name, mode in _FOLDERS.items():
        path = root / name
        if path.is_symlink() or not path.is_dir():
            remove(str(path))
            path.mkdir()
        path.chmod(mode)
    for name, text in _OWN_FILES.items():
        _write_anew(root / "etc" / name, text)
    for name, text in _MISSING_FILES.items():
        if not (root / "etc" / name).is_file():
            _write_anew(root / "etc" / name, text)


def _write_anew(path: Path, text: str) -> None:
    remove(str(path))
    path.write_text(text)
    path.chmod(0o644)


@dataclass(frozen=True)
class Measured:
    """What a finished tree is. `own_bytes` are on the disk for it alone, not shared with layers."""

    digest: str
    own_bytes: int
    num_files: int


def measure_rootfs(root: Path, env: Mapping[str, str], tick: Callable[[int], None]) -> Measured:
    """The hash of all names, kinds, modes, contents and the environment; times and owners do not count."""
    whole = hashlib.sha256()
    own_bytes = num_files = 0
    for path, facts in _walk(os.fsencode(root)):
        tick(0)
        num_files += 1
        if facts.st_nlink == 1 or stat.S_ISDIR(facts.st_mode):
            own_bytes += facts.st_blocks * 512
        name = os.path.relpath(path, os.fsencode(root))
        if stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(facts.st_mode):
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        else:
            content = b""
        for part in (name, f"{facts.st_mode:o}".encode(), content):
            whole.update(len(part).to_bytes(8, "big") + part)
    for key, value in sorted(env.items()):
        whole.update(f"\0{key}={value}".encode(errors="surrogateescape"))
    return Measured(whole.hexdigest(), own_bytes, num_files)


def _walk(folder: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Depth first in the order of the names' bytes; without recursion, for trees of any depth."""
    todo = [folder]
    while todo:
        path = todo.pop()
        facts = os.lstat(path)
        if path != folder:
            yield path, facts
        if stat.S_ISDIR(facts.st_mode):
            todo += sorted((os.path.join(path, name) for name in os.listdir(path)), reverse=True)
