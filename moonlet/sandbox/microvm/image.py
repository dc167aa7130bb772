"""Disks of guests: one ext4 image per template, and qcow2 layers upon it that hold what guests have written.

A machine's folder holds all its layers, `disk-0` the image and the last `disk-N` the one that is written to; each names the
one below by its bare file name. Folders share layers by hard links, so that each is whole by itself: deleting one takes
nothing from another.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from moonlet.errors import BackendUnavailableError, StorageError, TemplateError

COPY_LIMIT_BYTES = 64 << 20  # a smaller top layer is copied where it must not change, a larger one gets a layer upon it
MAX_LAYERS = 12  # then those above the template's are made into one
TOOL_TIMEOUT_S = 600
_FICLONE = 0x40049409
_CANNOT_SHARE = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}
_CANNOT_CLONE = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}


def make_disk(rootfs: Path, target: Path, free_bytes: int) -> None:
    """Write an ext4 image with the files of `rootfs` and `free_bytes` of room to `target`; sparse, no root needed.

    Without a journal: a guest whose kernel has crashed is never started again from its live disk.
    Raises StorageError for a full disk, TemplateError.
    """
    size = _tree_bytes(rootfs) + free_bytes
    size += size // 24 + (16 << 20)  # inode tables and bitmaps
    features = "^has_journal,^resize_inode,^metadata_csum,extent,flex_bg,dir_index"
    options = "lazy_itable_init=0,nodiscard" + ("" if os.geteuid() == 0 else ",root_owner=0:0")
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", features, "-E", options, "-m", "0", "-L", "moonlet"]
    command += ["-d", str(rootfs), str(target), f"{size // 4096 * 4}k"]
    if os.geteuid() != 0 and can_map_to_root():
        command = ["unshare", "--user", "--map-root-user", *command]  # or all files would belong to an unknown user
    run_tool(command, f"the disk of the template in {rootfs}")


def make_layer(folder: Path, number: int) -> Path:
    """An empty layer `disk-number` upon the one below, which is not opened: a machine may be writing to it."""
    below, top = f"disk-{number - 1}", f"disk-{number}"
    command = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", layer_format(number - 1)]
    run_tool([*command, top, str((folder / "disk-0").stat().st_size)], "a layer of a disk", folder)
    return folder / top


def add_top_layer(folder: Path, source: Path, number: int, num_kept: int) -> int:
    """Give `folder` the layers of the image in `source`, whose last is `disk-number`, and a private one to write to.

    The first `num_kept` layers are the template's. Returns the number of the new last layer. Raises StorageError.
    """
    top = source / f"disk-{number}"
    for below in range(number):
        share(source / f"disk-{below}", folder / f"disk-{below}")
    private = sum(used_bytes(source / f"disk-{above}") for above in range(num_kept, number + 1))
    # A guest that writes its disk anew between pauses would otherwise take many times what it may.
    must_merge = number > num_kept and (number >= MAX_LAYERS or private > (source / "disk-0").stat().st_size)
    if must_merge or used_bytes(top) <= COPY_LIMIT_BYTES:
        copy_file(top, folder / top.name)
        return _merged(folder, number, num_kept) if must_merge else number
    share(top, folder / top.name)
    make_layer(folder, number + 1)
    return number + 1


def _merged(folder: Path, number: int, num_kept: int) -> int:
    """Make the layers above the template's into one."""
    below = f"disk-{num_kept - 1}"
    command = ["qemu-img", "rebase", "-f", "qcow2", "-b", below, "-F", layer_format(num_kept - 1), f"disk-{number}"]
    run_tool(command, "the merged layers of a disk", folder)
    for between in range(num_kept, number):
        (folder / f"disk-{between}").unlink()
    os.replace(folder / f"disk-{number}", folder / f"disk-{num_kept}")
    return num_kept


def used_bytes(path: Path) -> int:
    """On the disk, without holes."""
    return path.stat().st_blocks * 512


def layer_format(number: int) -> str:
    return "raw" if number == 0 else "qcow2"


def share(source: Path, target: Path) -> None:
    """A hard link, or a copy where the two are on different file systems."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_SHARE:
            raise
        copy_file(source, target)


def copy_file(source: Path, target: Path) -> None:
    """A copy that shares blocks where the file system can, and keeps holes where it cannot."""
    with source.open("rb") as reader, target.open("xb") as writer:
        os.fchmod(writer.fileno(), 0o600)
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        size = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size)
        end = 0
        while (start := _next_data(reader.fileno(), end)) < size:
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            _copy_range(reader.fileno(), writer.fileno(), start, end)


def _next_data(descriptor: int, at: int) -> int:
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no data after `at`
            raise
        return os.fstat(descriptor).st_size


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    os.lseek(reader, start, os.SEEK_SET)
    os.lseek(writer, start, os.SEEK_SET)
    while start < end:
        count = os.sendfile(writer, reader, start, end - start)
        if not count:
            raise StorageError("a file became shorter while it was copied: try again")
        start += count


def can_map_to_root() -> bool:
    """Whether this user may be root in a user namespace of its own."""
    if not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False).returncode
        == 0
    )


def run_tool(command: list[str], what: str, folder: Path | None = None) -> None:
    """Run a tool that makes `what`. Raises StorageError, TemplateError, BackendUnavailableError."""
    env = {**os.environ, "LC_ALL": "C"}  # its complaints are read
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False, env=env
        )
    except FileNotFoundError as error:
        raise BackendUnavailableError(f"no program '{command[0]}': install qemu-utils and e2fsprogs") from error
    except subprocess.TimeoutExpired as error:
        raise TemplateError(
            f"{what} was not made in {TOOL_TIMEOUT_S} s: is the disk of this machine overloaded?"
        ) from error
    if done.returncode:
        message = done.stderr.strip()[-500:]
        if "No space left" in message:
            raise StorageError(f"the disk is full, so there is no {what}: make room and try again ({message})")
        raise TemplateError(f"{what} cannot be made: {message}")


def _tree_bytes(root: Path) -> int:
    """What the files take in blocks of 4 KiB, plus an inode each."""
    total = 0
    for at, folders, names in os.walk(root):
        total += 4352 * (len(folders) + len(names))
        for name in names:
            total += os.lstat(os.path.join(at, name)).st_size
    return total
