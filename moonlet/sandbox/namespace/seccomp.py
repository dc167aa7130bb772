"""The filter that every process of a sandbox runs under, as classic BPF (linux/filter.h, linux/seccomp.h).

A list of what is refused, not of what is allowed: an agent may run any program, and namespaces without capabilities are
the wall. The filter takes away what has broken such walls before: mounts, new user namespaces, keys, BPF, io_uring,
other processes' memory, handles past the mount table, sockets that no namespace holds back, another ABI's calls.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from functools import cache

from moonlet.sandbox.namespace.syscalls import Architecture

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_CLONE_NEWTIME = 0x80  # for clone() these bits are the exit signal's
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # type into, or paste on, the terminal
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # Linux, 32 bits, uname 2.6, both, "which is it?"
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NAMESPACED_FAMILIES = (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)  # AF_VSOCK would reach the hypervisor

_REFUSED = """
mount umount2 pivot_root chroot fsopen fsconfig fsmount fspick move_mount open_tree open_tree_attr mount_setattr
open_by_handle_at quotactl quotactl_fd fanotify_init swapon swapoff

ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp move_pages setns

bpf userfaultfd io_uring_setup io_uring_enter io_uring_register perf_event_open add_key request_key keyctl
init_module finit_module delete_module kexec_load kexec_file_load reboot syslog acct lookup_dcookie nfsservctl
iopl ioperm modify_ldt uselib vhangup

sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime
"""  # the view of the file system; other processes and namespaces; the kernel itself; what all machines share


@cache
def build_filter(
    architecture: Architecture, families: tuple[int, ...] = NAMESPACED_FAMILIES, also: tuple[str, ...] = ()
) -> bytes:
    """The program, an array of `struct sock_filter`. Refused are sockets of other address families, and the calls `also`."""
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if architecture.name == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    for name in (*_REFUSED.split(), *also):
        number = architecture.number(name)
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), refuse]
    # clone3 hides its flags behind a pointer. ENOSYS makes C libraries fall back to clone.
    program += _call(architecture, "clone3", [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
    program += _call(architecture, "clone", _refuse_bits(0, _NEW_NAMESPACES))
    program += _call(architecture, "unshare", _refuse_bits(0, _NEW_NAMESPACES | _CLONE_NEWTIME))
    program += _call(architecture, "ioctl", _refuse_values(1, (_TIOCSTI, _TIOCLINUX)))
    program += _call(architecture, "personality", _refuse_others(0, _PERSONALITIES))
    program += _call(architecture, "socket", _refuse_others(0, families))
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instruction = tuple[int, int, int, int]


def _call(architecture: Architecture, name: str, body: list[_Instruction]) -> list[_Instruction]:
    """`body` for one system call. It must end in a return; whatever else comes jumps over it."""
    number = architecture.number(name)
    return [] if number is None else [(_JUMP_EQUAL, 0, len(body), number), *body]


def _argument(index: int) -> _Instruction:
    # The low half alone: the kernel takes these arguments as 32 bits, so that comparing 64 could be tricked.
    return (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * index)


def _refuse_bits(index: int, mask: int) -> list[_Instruction]:
    return [
        _argument(index),
        (_JUMP_ANY_BIT, 0, 1, mask),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse_values(index: int, values: Sequence[int]) -> list[_Instruction]:
    body = [_argument(index)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return [*body, (_RETURN, 0, 0, _ALLOW)]


def _refuse_others(index: int, values: Sequence[int]) -> list[_Instruction]:
    body = [_argument(index)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*body, (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
