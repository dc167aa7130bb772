"""What a guest of the template `host` sees of this machine: its programs, read-only, beside an `/etc` made here.

Nothing of the host's own `/etc` that could hold a secret or a name goes in: only lists of roots of trust, the loader's
cache, the time zone and the settings of a few language runtimes, and of those only what everyone may read.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

HOST_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

PASSWD = """root:x:0:0:root:/workspace:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
GROUP = "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nnogroup:x:65534:\n"
HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
_NSSWITCH = (
    "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n"
)
_COPIED_FILES = (
    "ca-certificates.conf",
    "debian_version",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "mime.types",
    "os-release",
    "protocols",
    "services",
    "ssl/openssl.cnf",
    "timezone",
)
_COPIED_TREES = ("alternatives", "fonts", "ld.so.conf.d", "perl", "pki/tls/certs", "ssl/certs", "terminfo")
_COPIED_PATTERNS = ("java-*", "python3*")
_MAX_FILE_BYTES = 8 << 20


@dataclass(frozen=True)
class HostDir:
    """A top-level directory of the host; with `link_target` it is a symbolic link (`/bin` -> `usr/bin`)."""

    path: str
    link_target: str = ""


def host_dirs() -> list[HostDir]:
    """Those of `HOST_DIRS` that this host has: directories to bind read-only, links to make anew."""
    found = []
    for path in HOST_DIRS:
        if os.path.islink(path):
            found.append(HostDir(path, os.readlink(path)))
        elif os.path.isdir(path):
            found.append(HostDir(path))
    return found


def write_minimal_etc(folder: Path) -> None:
    """Fill the empty `folder` (made if missing) with an `/etc` for a guest that runs the host's programs.

    The only account that can be used is root, with `/workspace` as its home. Takes some milliseconds; raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "passwd": PASSWD,
        "group": GROUP,
        "shadow": "root:*:19000:0:99999:7:::\n",
        "hosts": HOSTS,
        "nsswitch.conf": _NSSWITCH,
        "hostname": "sandbox\n",
        "machine-id": f"{uuid.uuid4().hex}\n",
        "resolv.conf": "",
        "shells": "/bin/sh\n/bin/bash\n",
        "profile": "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
    }
    for name, text in written.items():
        (folder / name).write_text(text)
    (folder / "shadow").chmod(0o600)
    (folder / "mtab").symlink_to("/proc/mounts")
    host = Path("/etc")
    for name in _COPIED_FILES:
        _copy(host / name, folder / name)
    trees = [host / name for name in _COPIED_TREES]
    trees += [path for pattern in _COPIED_PATTERNS for path in sorted(host.glob(pattern))]
    for tree in trees:
        _copy_tree(tree, folder / tree.relative_to(host))
    _copy_time_zone(folder / "localtime")


def _copy_tree(source: Path, target: Path) -> None:
    if not source.is_dir():
        return
    for at, _, names in os.walk(source):
        for name in names:
            path = Path(at) / name
            _copy(path, target / path.relative_to(source))


def _copy(source: Path, target: Path) -> None:
    """Copy a file that everyone may read, or a link that leads to one; anything else stays out."""
    try:
        real = source.stat()
        if not stat.S_ISREG(real.st_mode) or not real.st_mode & stat.S_IROTH or real.st_size > _MAX_FILE_BYTES:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() and _is_visible(source):
            target.symlink_to(os.readlink(source))
        else:
            shutil.copyfile(source, target)
            target.chmod(real.st_mode & 0o755)
    except FileNotFoundError:
        return  # a dangling link
    except PermissionError:
        return


def _is_visible(link: Path) -> bool:
    """Whether the guest can follow this link: within its own directory, or into what is bound from the host."""
    target = os.readlink(link)
    if "/" not in target:
        return True
    reached = os.path.normpath(link.parent / target)
    return any(reached.startswith(f"{root}/") for root in HOST_DIRS)


def _copy_time_zone(target: Path) -> None:
    zone = Path("/etc/localtime")
    if zone.exists():
        shutil.copyfile(zone.resolve(), target)
