"""The root of all machines of the template `host`: empty places to mount on, links, and an `/etc` made of the host's.

One folder in the user's cache for each state of the host, named by its content. Nobody writes to it: machines have it as
a lower layer. A saved machine remembers which one it had, since files that it has open must be the same ones later.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from moonlet.sandbox.api import GUEST_HOME
from moonlet.sandbox.hostview import host_dirs, write_minimal_etc

GUEST_FOLDER = "/.moonlet"  # where the agent is mounted, read-only
_FOLDERS = ("proc", "sys", "dev", "tmp", "run", "var/tmp", "root", "home", "opt", "mnt", "srv", GUEST_HOME[1:])


def host_root() -> Path:
    """Made at the first call (0.2 s), then found. Raises OSError."""
    root = _make()
    if not root.is_dir():  # somebody cleared the cache
        _make.cache_clear()
        root = _make()
    return root


@cache
def _make() -> Path:
    cached = cache_folder()
    unfinished = Path(tempfile.mkdtemp(prefix=".host-", dir=cached))
    try:
        root = unfinished / "root"
        _fill(root)
        final = cached / f"host-{_digest(root)}"
        try:
            root.rename(final)
        except OSError:
            if not final.is_dir():  # else it was there before
                raise
        return final
    finally:
        shutil.rmtree(unfinished)


def find_host_root(name: str) -> Path:
    """The one that a saved machine had, or today's where that is gone."""
    former = cache_folder() / Path(name).name
    return former if name and former.is_dir() else host_root()


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonlet" / "sandbox"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fill(root: Path) -> None:
    for name in (*_FOLDERS, GUEST_FOLDER[1:]):
        (root / name).mkdir(parents=True)
    for host in host_dirs():
        if host.link_target:
            (root / host.path[1:]).symlink_to(host.link_target)
        else:
            (root / host.path[1:]).mkdir()
    write_minimal_etc(root / "etc")
    (root / "etc/machine-id").write_text("")  # the agent gives each machine its own
    (root / "etc/ld.so.preload").write_text("")  # a place to mount on
    for path in root.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    (root / "tmp").chmod(0o1777)
    (root / "root").chmod(0o700)
    root.chmod(0o755)


def _digest(root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        for part in (str(path.relative_to(root)).encode(), content):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:32]
