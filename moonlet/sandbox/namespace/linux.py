"""Kernel calls that Python does not wrap. Each acts on the calling thread alone, so use threads that end afterwards.

Raises OSError with what was tried; the numbers are those of linux/mount.h, linux/prctl.h and linux/sched.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from moonlet.sandbox.namespace.syscalls import this_architecture

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x1000, 0x4000, 0x40000
_CLONE_NEWNS = 0x20000
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 0x4, 0x100000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 38, 22
_SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(name: str, *arguments: int | bytes | None, what: str = "") -> int:
    """A raw system call. Raises OSError, ENOSYS where the processor is unknown."""
    architecture = this_architecture()
    number = architecture.number(name) if architecture else None
    if number is None:
        raise OSError(38, f"{name} is not known for this processor")
    converted = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        _fail(what or name)
    return result


def _fail(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: Path, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(options) if options else None,
    )
    if result < 0:
        _fail(f"mount {target}")


def private_mounts() -> None:
    """Give this thread a mount namespace of its own; nothing mounted in it is seen elsewhere. Needs CAP_SYS_ADMIN."""
    if _libc.unshare(_CLONE_NEWNS) < 0:
        _fail("unshare")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)


def bind_mapped(source: Path, target: Path, user_namespace: int) -> None:
    """Bind `source` on `target` with its owners shifted as the user namespace (a descriptor) maps them; Linux >= 5.12."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    tree = system_call("open_tree", _AT_FDCWD, os.fsencode(source), flags, what=f"open_tree {source}")
    try:
        attributes = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
        what = f"mapping the owners of {source}"
        system_call("mount_setattr", tree, b"", _AT_EMPTY_PATH, attributes, len(attributes), what=what)
        place = os.fsencode(target)
        system_call("move_mount", tree, b"", _AT_FDCWD, place, _MOVE_MOUNT_F_EMPTY_PATH, what=f"move_mount {target}")
    finally:
        os.close(tree)


def become(user: int) -> None:
    """Make this thread alone run as `user`, with a group of the same number and no others. There is no way back."""
    system_call("setgroups", 0, None)
    system_call("setresgid", user, user, user)
    system_call("setresuid", user, user, user)
    # The kernel forbade core dumps and debuggers for the whole process, which is still what it was.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def no_new_privileges() -> None:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        _fail("prctl(PR_SET_NO_NEW_PRIVS)")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def load_filter(program: bytes) -> None:
    """Put this thread, and what it starts, under a seccomp filter; after `no_new_privileges`."""
    loaded = _Program(len(program) // 8, program)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0) < 0:
        _fail("prctl(PR_SET_SECCOMP)")
