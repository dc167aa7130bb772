"""The files of a machine on the host: what it may write, copies, sizes.

    live/upper   what the guest has written: its folders, or its overlay       live/work   the overlay's own

A guest decides what lies in `upper`. Programs that never follow links do the copying; as an ordinary user they run in a
user namespace of their own, where what a guest has locked away (mode 000) can still be read.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
from pathlib import Path

from moonlet.errors import SandboxError, StorageError
from moonlet.sandbox.api import GUEST_HOME

# Template `host`: what a guest may write, by its name in `upper`. All else of its root is in memory and read-only.
WRITABLE = {"workspace": GUEST_HOME, "tmp": "/tmp"}  # `/var/tmp` leads to `/tmp`
_SHARED_DIRS = ("tmp", "var/tmp", "run")
_MOUNT_POINTS = ("proc", "dev", GUEST_HOME[1:])
_DISK_ERRORS = ("No space left on device", "Disk quota exceeded", "Input/output error", "Read-only file system")


def make_writable_dirs(upper: Path, owner: int) -> None:
    """What a guest of the template `host` may write, `owner`'s. So few, because a new folder costs a disk milliseconds."""
    for name, target in WRITABLE.items():
        path = f"{upper}/{name}"
        os.mkdir(path)
        os.chmod(path, 0o755 if target == GUEST_HOME else 0o1777)
        if owner != os.geteuid():
            os.chown(path, owner, owner)


def make_overlay_root(upper: Path, lower: Path, owner: int) -> None:
    """What the overlay of a template holds at first, all of it `owner`'s."""
    upper.chmod(0o755)
    (upper / GUEST_HOME[1:]).mkdir()
    for name in _SHARED_DIRS:
        if not _is_folder(lower / name) and _is_folder((lower / name).parent):
            (upper / name).mkdir(parents=True)
            (upper / name).chmod(0o1777)
    pin_mount_points(upper, lower)
    if owner != os.geteuid():
        for at, _, _ in os.walk(upper):
            os.chown(at, owner, owner)


def pin_mount_points(upper: Path, lower: Path) -> None:
    """Make sure that what is mounted over is a folder, not a link that a guest or a template laid there.

    Only for a machine that does not run: nothing else changes `upper` meanwhile. `lower` is the template's root.
    """
    for name in _MOUNT_POINTS:
        path = upper / name
        if _is_folder(path):
            continue
        if os.path.lexists(path):
            path.unlink()
        elif _is_folder(lower / name):
            continue
        path.mkdir()
        path.chmod(0o755)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _as_owner(command: list[str]) -> list[str]:
    return command if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--", *command]


async def copy_tree(source: Path, target: Path, *, link: bool) -> None:
    """Copy all below `source` into the folder `target`: owners, modes, attributes, links, holes; shared blocks if possible.

    With `link`, files become further names of the same ones. Raises StorageError for a full or broken disk.
    """
    how = ["--link"] if link else ["--reflink=auto", "--sparse=auto"]
    await _run(["cp", "--archive", *how, "--", f"{source}/.", str(target)], f"cannot copy {source}")


async def give_to(user: int, folder: Path) -> None:
    """Make `user` and the group of that number the owner of all of it; modes stay. Nobody may change it meanwhile."""
    what = f"cannot change the owner of {folder}"
    listed = await _run(["find", str(folder), "-type", "f", "-perm", "/6000", "-print0"], what)
    special = {name: os.stat(name).st_mode for name in listed.split(b"\0") if name}
    await _run(["chown", "--recursive", "--no-dereference", f"{user}:{user}", "--", str(folder)], what)
    for name, mode in special.items():  # a new owner clears the bits that give a program its owner's rights
        os.chmod(name, stat.S_IMODE(mode))


async def remove_tree(folder: Path) -> None:
    """However deep it is, and whatever modes it has."""
    await _run(["rm", "--recursive", "--force", "--one-file-system", "--", str(folder)], f"cannot remove {folder}")


async def _run(command: list[str], what: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *_as_owner(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)},
    )
    try:
        output, complaints = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        text = complaints.decode(errors="replace").strip()
        if any(phrase in text for phrase in _DISK_ERRORS):
            raise StorageError(f"{what}: {text.splitlines()[0]}; free some space and try again")
        raise SandboxError(f"{what}: {text[-500:]}")
    return output


def disk_bytes(folder: Path) -> int:
    """Bytes that all below takes on the disk, 0 if it is gone. Blocks for the walk; what vanishes meanwhile is skipped."""
    command = _as_owner(["du", "--summarize", "--block-size=1", "--one-file-system", "--", str(folder)])
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    first = done.stdout.split("\t", 1)[0]
    return int(first) if first.isdigit() else 0
