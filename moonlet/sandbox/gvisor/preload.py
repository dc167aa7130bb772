"""Builds the small library that repairs `statx` in a guest of an old Sentry, and keeps it in the user's cache."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from moonlet.errors import BackendUnavailableError
from moonlet.sandbox.gvisor.host_root import GUEST_FOLDER, cache_folder

_SOURCE = Path(__file__).parent / "statx.c"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-shared", "-fPIC", "-O2", "-nostdlib")


def build_preload() -> dict[str, Path]:
    """The library and the `ld.so.preload` that names it, to be put into the guest's folder; blocking.

    Raises BackendUnavailableError where there is no compiler.
    """
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, platform.machine())).encode()).hexdigest()[:32]
    folder = cache_folder() / f"statx-{key}"
    library, loader = folder / "statx.so", folder / "ld.so.preload"
    if not library.exists() or not loader.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(library)
        _write(loader, f"{GUEST_FOLDER}/{library.name}\n".encode())
    return {file.name: file for file in (library, loader)}


def _compile(target: Path) -> None:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise BackendUnavailableError(
            "this gVisor needs a small library built: install a C compiler (apt-get install gcc)"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        done = subprocess.run([compiler, *_FLAGS, "-o", built, _SOURCE], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise BackendUnavailableError(f"{compiler} cannot build {_SOURCE.name}: {done.stderr.strip()[-500:]}")
        built.chmod(0o644)
        built.rename(target)


def _write(target: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.write_bytes(data)
        made.chmod(0o644)
        made.rename(target)
