"""As root: a private mount namespace in which a machine's files lie where its own, unprivileged user can reach them.

A machine that root starts runs under a user number of its own. In the state directory, closed to others, that user could
not even find the machine's folder; and the files of a template belong to root. So the thread that starts bubblewrap makes
itself a mount namespace, binds the folders at a place of its own in it, shifts the template's owners (an id-mapped mount)
and becomes that user. The namespace goes when the machine does.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import subprocess
from pathlib import Path

from moonlet.sandbox.namespace import linux
from moonlet.sandbox.namespace.bwrap import can_be_reached_by_all

# Beyond the ranges that useradd, /etc/subuid and systemd give away (1879048192 = 0x70000000).
_FIRST_USER, _NUM_USERS = 0x70000000, 0x0F000000
_OTHERS_FIRST = 0x60000000  # where the owners of a template's files other than root go
_NO_MAPPED_MOUNTS = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)  # an old kernel or file system
_PLACES = ("/mnt", "/media", "/srv", "/run")

log = logging.getLogger(__name__)


def machine_user(label: str, machine_id: str) -> int:
    """The user and group number that a machine started by root runs under."""
    digest = hashlib.sha256(f"{label}/{machine_id}".encode()).digest()
    return _FIRST_USER + int.from_bytes(digest[:8], "little") % _NUM_USERS


def can_be_another_user() -> bool:
    """Whether this process is root with all that it takes to start machines under other users."""
    if os.geteuid() != 0:
        return False
    try:
        linux.private_mounts()
        linux.become(machine_user("", ""))
    except OSError:
        return False
    return True


class Stage:
    """Made in, and only good for, the calling thread. Raises OSError where root lacks CAP_SYS_ADMIN."""

    def __init__(self) -> None:
        linux.private_mounts()
        self._count = 0
        self._at = next(Path(place) for place in _PLACES if os.path.isdir(place))
        linux.mount("moonlet", self._at, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")

    def bind(self, source: Path) -> Path:
        """`source`, a file or a folder, bound where everyone can go."""
        self._count += 1
        target = self._at / str(self._count)
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        linux.mount(str(source), target, None, linux.MS_BIND | linux.MS_REC)
        return target

    def program(self, path: Path) -> Path:
        """A program; with its package if that lies where others may not go, for the libraries beside it."""
        if can_be_reached_by_all(path):
            return path
        package = path.resolve().parents[2] if path.parent.name == "_bin" else path.resolve().parent
        return self.bind(package) / path.resolve().relative_to(package)

    def overlay(self, lower: Path, live: Path, user: int) -> Path:
        """An overlay of `live`/upper on `lower`, whose files belong to `user` where they belong to root."""
        below, folders, merged = self._at / "lower", self.bind(live), self._at / "root"
        below.mkdir()
        merged.mkdir()
        namespace = _user_namespace(user)
        try:
            linux.bind_mapped(lower, below, namespace)
        except OSError as error:
            if error.errno not in _NO_MAPPED_MOUNTS:
                raise
            log.warning("%s: the guest cannot change the template's files (Linux 5.19 or newer is needed)", error)
            linux.mount(str(lower), below, None, linux.MS_BIND)
        finally:
            os.close(namespace)
        options = f"lowerdir={below},upperdir={folders}/upper,workdir={folders}/work"
        linux.mount("overlay", merged, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
        return merged


def _user_namespace(user: int) -> int:
    """A descriptor of a user namespace in which 0 is `user`; other owners are put out of everyone's reach."""
    command = ["unshare", "--user", "--", "/bin/sh", "-c", "echo; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()  # it has its namespace by now
        mapping = f"0 {user} 1\n1 {_OTHERS_FIRST} 65534\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{holder.pid}/{name}").write_text(mapping)
        return os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
