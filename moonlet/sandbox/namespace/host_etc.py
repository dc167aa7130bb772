"""The `/etc` that all machines of the template `host` share, read-only, made once for each state of the host."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from functools import cache
from pathlib import Path

from moonlet.sandbox.hostview import write_minimal_etc
from moonlet.sandbox.namespace.bwrap import MARK_FOLDER

OWN_FILES = ("hostname", "hosts", "machine-id")  # links to what each machine has of its own


def own_files(hostname: str) -> dict[str, str]:
    """Contents of `OWN_FILES` for a machine that starts now."""
    return {
        "hostname": f"{hostname}\n",
        "hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost ip6-loopback\n",
        "machine-id": f"{uuid.uuid4().hex}\n",
    }


def shared_etc() -> Path:
    """Its folder, named by its content: machines that run keep theirs when the host's files change. Raises OSError."""
    found = _made()
    if not found.is_dir():  # somebody emptied the cache
        _made.cache_clear()
        found = _made()
    return found


@cache
def _made() -> Path:
    root = _folder()
    unfinished = Path(tempfile.mkdtemp(prefix=".etc-", dir=root))
    try:
        write_minimal_etc(unfinished / "etc")
        for name in OWN_FILES:
            (unfinished / "etc" / name).unlink(missing_ok=True)
            (unfinished / "etc" / name).symlink_to(f"{MARK_FOLDER}/{name}")
        (unfinished / "etc").chmod(0o755)
        final = root / f"etc-{_digest(unfinished / 'etc')}"
        if not final.exists():
            try:
                os.rename(unfinished / "etc", final)
            except OSError:
                if not final.exists():  # another process was quicker
                    raise
        return final
    finally:
        shutil.rmtree(unfinished)


@cache
def _folder() -> Path:
    """Below $XDG_CACHE_HOME/moonlet or ~/.cache/moonlet; a temporary folder where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonlet" / "sandbox"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="moonlet-etc-"))
    return root if os.access(root, os.W_OK) else Path(tempfile.mkdtemp(prefix="moonlet-etc-"))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
