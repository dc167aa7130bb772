"""Builds the guest agent with the system's C compiler at first use and keeps it in the user's cache.

The cached file is named by a hash of the sources, the flags and the compiler, and is put in place by one rename: two
processes may build at the same time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from moonlet.errors import BackendUnavailableError

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang", "musl-gcc")
BASE_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra")
STATIC_FLAGS = ("-O2", "-static", "-s")
DYNAMIC_FLAGS = ("-O2", "-s")
BUILD_TIMEOUT_S = 120

_log = logging.getLogger("moonlet")


@cache
def guest_binary() -> Path:
    """The agent for this machine's processor; static, so that it runs in an image that holds nothing else.

    Raises BackendUnavailableError without a compiler. Where static linking is impossible (no static C library) the agent
    is dynamic, which is logged: then it runs only in images with the same C library.
    """
    compiler = _find_compiler()
    path = _cached(compiler, STATIC_FLAGS)
    if path.exists():
        return path
    complaint = _compile(compiler, STATIC_FLAGS, path)
    if complaint is None:
        return path
    path = _cached(compiler, DYNAMIC_FLAGS)
    if not path.exists():
        _log.warning(
            "the guest agent is linked dynamically and needs this system's C library in every template: %s", complaint
        )
        complaint = _compile(compiler, DYNAMIC_FLAGS, path)
        if complaint is not None:
            raise BackendUnavailableError(f"{compiler} cannot build the sandbox's guest agent: {complaint}")
    return path


def build_agent(flags: tuple[str, ...]) -> Path:
    """The agent built with other flags (sanitizers); cached alike. Raises BackendUnavailableError if they are refused."""
    compiler = _find_compiler()
    path = _cached(compiler, flags)
    complaint = None if path.exists() else _compile(compiler, flags, path)
    if complaint is not None:
        raise BackendUnavailableError(f"{compiler} {' '.join(flags)}: {complaint}")
    return path


def _find_compiler() -> str:
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise BackendUnavailableError(
        f"sandboxes need a C compiler once ({wanted or ', '.join(COMPILERS)}), to build their guest agent: "
        "install gcc and the C library's development files (Debian: apt-get install gcc libc6-dev)"
    )


def _cached(compiler: str, flags: tuple[str, ...]) -> Path:
    return _cache_folder() / f"guest-{_fingerprint(compiler, flags)}"


@cache
def _cache_folder() -> Path:
    """$XDG_CACHE_HOME/moonlet or ~/.cache/moonlet; a private temporary folder where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonlet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="moonlet-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="moonlet-"))


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_FOLDER.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join((compiler, version, *BASE_FLAGS, *flags, platform.machine())).encode())
    return digest.hexdigest()[:32]


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> str | None:
    """None, or the compiler's complaint."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    command = [compiler, *BASE_FLAGS, *flags, *map(str, sorted(SOURCE_FOLDER.glob("*.c"))), "-o", unfinished, "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-2000:] or f"exit status {result.returncode}"
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return None
