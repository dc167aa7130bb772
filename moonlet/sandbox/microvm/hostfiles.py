"""A root file system out of the host's own essential programs, for the template `host`.

A virtual machine cannot bind the host's directories. So a shell, the core utilities and Python with its standard library
are copied with the shared libraries that they load: some tens of megabytes, offline. Of the host's `/etc` only what
`write_minimal_etc` lets through, and nothing of its `/home`, `/var`, `/srv` or `/opt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

from moonlet.errors import TemplateError
from moonlet.sandbox.hostview import host_dirs, write_minimal_etc

SEARCH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
PROGRAMS = """
sh bash dash ls cat cp mv rm ln mkdir rmdir mktemp touch chmod chown stat readlink realpath basename dirname pwd echo printf
test [ true false env printenv id whoami uname hostname date sleep timeout nohup nice kill seq expr yes tee head tail wc
sort uniq cut tr paste join comm split csplit fold fmt nl od dd truncate shred du df sync md5sum sha1sum sha256sum sha512sum
base64 base32 cksum tac shuf factor numfmt mknod mkfifo install link unlink nproc arch tty stty
grep egrep fgrep sed awk mawk gawk find xargs tar gzip gunzip zcat bzip2 xz zstd diff cmp less more file
ps pgrep pkill top free uptime mount umount setsid flock getopt hexdump column rev script ip which tput clear
python3 python
"""
NEEDED = ("sh", "cat", "ls", "true")
LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "dist-packages"}
EMPTY_FOLDERS = ("dev", "proc", "sys", "run", "tmp", "root", "var/tmp", "workspace", "mnt")


class HostFiles:
    """What to copy: real paths of files, and symbolic links, both as the host has them."""

    def __init__(self) -> None:
        self._files: dict[str, os.stat_result] = {}
        self._links: dict[str, str] = {item.path: item.link_target for item in host_dirs() if item.link_target}
        self._add_programs()
        self._add_python()
        self._add_libraries()

    @property
    def num_bytes(self) -> int:
        return sum(info.st_size for info in self._files.values())

    @property
    def digest(self) -> str:
        """Of names, sizes and dates: reading all contents at every start would take longer than a launch."""
        files = [(path, info.st_size, info.st_mtime_ns, info.st_mode) for path, info in sorted(self._files.items())]
        return hashlib.sha256(json.dumps([files, sorted(self._links.items())]).encode()).hexdigest()[:16]

    def copy(self, root: Path) -> None:
        """Make the file system in the empty folder `root`."""
        for name in EMPTY_FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("tmp", "var/tmp"):
            (root / name).chmod(0o1777)
        write_minimal_etc(root / "etc")
        for path, info in self._files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(info.st_mode & 0o755)
            os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))  # Python's compiled files are checked against it
        for path, text in self._links.items():
            target = root / path.lstrip("/")
            if not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(text)

    def _add_programs(self) -> None:
        missing = [name for name in NEEDED if not _program(name)]
        if missing:
            raise TemplateError(
                f"the host has no program '{missing[0]}': build a template and use it instead of 'host'"
            )
        for name in PROGRAMS.split():
            path = _program(name)
            if path:
                self._add(path)

    def _add_python(self) -> None:
        path = _program("python3")
        if not path:
            return
        code = "import sysconfig as s; p = s.get_paths(); print(p['stdlib']); print(p['platstdlib'])"
        printed = _output([path, "-I", "-S", "-c", code]).split("\n")
        for folder in {line for line in printed if line.startswith("/")}:
            for at, folders, names in os.walk(folder):
                folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
                for name in names:
                    if not name.endswith((".a", ".opt-1.pyc", ".opt-2.pyc")):
                        self._add(os.path.join(at, name))

    def _add_libraries(self) -> None:
        programs = [path for path in self._files if _is_elf(path)]
        text = _output(["ldd", *programs])
        for path in sorted(set(re.findall(r"(?:=>\s+|^\s+)(/\S+) \(0x", text, re.MULTILINE))):
            self._add(path)

    def _add(self, path: str) -> None:
        """A file, or a link with all that it leads to; what cannot be read stays out."""
        for _ in range(40):
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if not os.path.islink(path):
                break
            self._links[path] = os.readlink(path)
            path = os.path.join(os.path.dirname(path), self._links[path])
        if os.path.isfile(path) and os.access(path, os.R_OK):
            info = os.stat(path)
            if stat.S_ISREG(info.st_mode):
                self._files[path] = info


def _program(name: str) -> str | None:
    return shutil.which(name, path=":".join(SEARCH))


def _is_elf(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _output(command: Iterable[str]) -> str:
    """What a command of the host prints; ldd complains about static programs, which is none of our concern."""
    clean = {"PATH": ":".join(SEARCH), "LC_ALL": "C"}
    return subprocess.run([*command], capture_output=True, text=True, env=clean, check=False, timeout=120).stdout
