"""Builds the C++ kernels with the system's compiler and keeps the result in the user's cache.

The cached file is named by a hash of the sources, the flags, the compiler and the processor, and is put in place by one
rename: two processes may build at the same time, and a changed machine never loads code for another one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import KernelError

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++", "cc")
BASE_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
# The first set that the compiler accepts is taken: OpenMP may be missing, and not every processor knows -march=native.
FLAG_SETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
BUILD_TIMEOUT_S = 600


@dataclass(frozen=True)
class Build:
    """A built library and how it came about."""

    path: Path
    compiler: str
    flags: tuple[str, ...]


def build(extra_flags: tuple[str, ...] = ()) -> Build:
    """The kernels of this machine, from the cache or newly compiled. Raises KernelError where that cannot be done."""
    compiler = find_compiler()
    complaints = []
    for flag_set in FLAG_SETS:
        flags = (*BASE_FLAGS, *flag_set, *extra_flags)
        path = cache_folder() / f"kernels-{_fingerprint(compiler, flags)}.so"
        if path.exists():
            return Build(path, compiler, flags)
        if not complaints:
            logging.getLogger("moonlet").info("building C++ kernels with %s, once: it takes some seconds", compiler)
        complaint = _compile(compiler, flags, path)
        if complaint is None:
            return Build(path, compiler, flags)
        complaints.append(complaint)
    raise KernelError(f"{compiler} cannot build the kernels; set MOONLET_KERNELS=torch to do without. {complaints[-1]}")


def find_compiler() -> str:
    """$CXX where set, else the first of g++, clang++, c++, cc."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise KernelError(f"no C++ compiler ({wanted or ', '.join(COMPILERS)}): install g++ or clang++")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/moonlet or ~/.cache/moonlet; a private temporary folder where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "moonlet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _private_folder()
    return folder if os.access(folder, os.W_OK) else _private_folder()


_private: Path | None = None


def _private_folder() -> Path:
    global _private
    if _private is None:
        _private = Path(tempfile.mkdtemp(prefix="moonlet-"))
    return _private


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in suffixes)


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in _sources(".cpp", ".h"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join((compiler, version, *flags, processor_name())).encode())
    return digest.hexdigest()[:32]


def processor_name() -> str:
    """Model and instruction sets of the processor: what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + " " + "|".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> str | None:
    """None, or the compiler's complaint."""
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    command = [compiler, *flags, *map(str, _sources(".cpp")), "-o", unfinished, "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-2000:] or f"exit status {result.returncode}"
        ctypes.CDLL(unfinished)  # a compiler may take -fopenmp and leave its symbols to nobody
        os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return None
