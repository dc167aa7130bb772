"""The guest's kernel and the modules that it needs to find its disk and its serial port.

Where no kernel with modules is installed, Debian's cloud kernel is downloaded and unpacked into the cache: no root needed.
`depmod` has not run in an unpacked package, so the order of loading comes from each module's own `.modinfo` section.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moonlet.errors import BackendUnavailableError

QEMU_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "ext4")
FIRECRACKER_MODULES = ("virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "ext4")
META_PACKAGES = {"x86_64": "linux-image-cloud-amd64"}
DOWNLOAD_TIMEOUT_S = 300
INSTALLED = (Path("/boot"), (Path("/lib/modules"), Path("/usr/lib/modules")))


@dataclass(frozen=True)
class Kernel:
    """A kernel image and the folder of its modules. `version` is the end of the image's file name, as `uname -r`."""

    image: Path
    modules: Path
    version: str

    @cached_property
    def digest(self) -> str:
        """Of the image: a saved machine runs on with the same one only."""
        return hashlib.sha256(self.image.read_bytes()).hexdigest()[:16]


def find_kernel(cache: Path, wanted: Sequence[str] = QEMU_MODULES) -> Kernel:
    """An installed kernel, else a cached one, else a downloaded one. Raises BackendUnavailableError."""
    found = _usable(INSTALLED[0], INSTALLED[1], wanted)
    return found or _cached(cache, wanted) or _downloaded(cache, wanted)


def load_order(kernel: Kernel, wanted: Iterable[str]) -> list[tuple[str, bytes]]:
    """(name, contents) of the modules to load, each after those that it needs; what is built in is left out.

    Raises BackendUnavailableError for a module that this kernel has not.
    """
    files, builtin = _module_files(kernel.modules), _builtin(kernel.modules)
    ordered: dict[str, bytes] = {}

    def visit(name: str, is_needed: bool) -> None:
        if name in builtin or name in ordered:
            return
        if name not in files:
            if is_needed:
                raise BackendUnavailableError(f"kernel {kernel.version} has no module '{name}': install {_advice()}")
            return
        data = _contents(files[name])
        needs, hints = _dependencies(data)
        for other in needs:
            visit(other, True)
        for other in hints:
            visit(other, False)
        ordered[name] = data

    for name in wanted:
        visit(name, True)
    return list(ordered.items())


def _usable(boot: Path, module_roots: Iterable[Path], wanted: Sequence[str]) -> Kernel | None:
    """The newest kernel below `boot` that can be read and has what is wanted; a small cloud kernel before others."""
    images = [path for path in boot.glob("vmlinuz-*") if os.access(path, os.R_OK)] if boot.is_dir() else []
    for image in sorted(images, key=lambda path: ("cloud" in path.name, _version_key(path.name)), reverse=True):
        version = image.name.removeprefix("vmlinuz-")
        for root in module_roots:
            kernel = Kernel(image, root / version, version)
            if kernel.modules.is_dir() and _has(kernel, wanted):
                return kernel
    return None


def _has(kernel: Kernel, wanted: Sequence[str]) -> bool:
    try:
        load_order(kernel, wanted)
    except (BackendUnavailableError, OSError):
        return False
    return True


def _version_key(name: str) -> list[tuple[bool, int | str]]:
    """6.1.0-57 comes after 6.1.0-9."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.findall(r"\d+|\D+", name)]


def _cached(cache: Path, wanted: Sequence[str]) -> Kernel | None:
    for folder in sorted(cache.glob("kernel-*"), key=lambda path: _version_key(path.name), reverse=True):
        kernel = _usable(folder / "boot", (folder / "lib/modules", folder / "usr/lib/modules"), wanted)
        if kernel:
            return kernel
    return None


def _downloaded(cache: Path, wanted: Sequence[str]) -> Kernel:
    missing = [tool for tool in ("apt-get", "apt-cache", "dpkg-deb") if not shutil.which(tool)]
    if missing:
        raise BackendUnavailableError(
            f"no kernel for a guest in /boot, and no {missing[0]} to get one: install {_advice()}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as name:
        folder = Path(name)
        package = _package_name()
        logging.getLogger("moonlet").info("downloading %s for the guests of sandboxes, once", package)
        _run(["apt-get", "download", "-qq", package], folder)
        archive = next(folder.glob("*.deb"))
        _run(["dpkg-deb", "-x", str(archive), "tree"], folder)
        target = cache / f"kernel-{package.removeprefix('linux-image-')}"
        if not target.exists():
            os.replace(folder / "tree", target)
    kernel = _cached(cache, wanted)
    if kernel is None:
        raise BackendUnavailableError(f"{package} lacks one of the modules {', '.join(wanted)}: install {_advice()}")
    return kernel


def _package_name() -> str:
    """The package with today's kernel, which the meta package depends on."""
    meta = _advice()
    for line in _run(["apt-cache", "depends", "--important", meta], Path("/")).splitlines():
        found = re.match(r"\s*Depends: (linux-image-\d\S+)", line)
        if found:
            return found[1]
    raise BackendUnavailableError(f"apt knows no {meta}: run 'apt-get update', or install a kernel with modules")


def _advice() -> str:
    machine = platform.machine()
    if machine not in META_PACKAGES:
        raise BackendUnavailableError(f"no kernel of guests is known for {machine} processors: use another backend")
    return META_PACKAGES[machine]


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailableError(f"'{' '.join(command)}' took more than {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode:
        raise BackendUnavailableError(f"'{' '.join(command)}' failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _module_files(folder: Path) -> dict[str, Path]:
    found = {}
    for path in folder.rglob("*.ko*"):
        if path.suffixes[-1] in (".ko", ".xz", ".gz", ".zst"):
            found[_module_name(path.name)] = path
    return found


def _builtin(folder: Path) -> set[str]:
    listed = folder / "modules.builtin"
    return {_module_name(line.rsplit("/", 1)[-1]) for line in listed.read_text().split()} if listed.exists() else set()


def _module_name(file_name: str) -> str:
    return file_name.split(".ko", 1)[0].replace("-", "_")


def _dependencies(data: bytes) -> tuple[list[str], list[str]]:
    """Modules that one needs, and those that it would like to find loaded before."""
    needs = [name for field in re.findall(rb"\0depends=([^\0]*)\0", data) for name in field.decode().split(",")]
    hints = [name for field in re.findall(rb"\0softdep=pre: ([^\0]*)\0", data) for name in field.decode().split()]
    return [name.replace("-", "_") for name in needs if name], [name.replace("-", "_") for name in hints]


def _contents(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        try:
            return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise BackendUnavailableError(f"{path} cannot be unpacked: install zstd") from error
    return data
