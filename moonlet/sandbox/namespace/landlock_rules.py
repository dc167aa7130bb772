"""Landlock: a process gives up, for good and for all that it starts, what no rule allows (linux/landlock.h)."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moonlet.sandbox.namespace.linux import system_call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version; 16 from 5 on
_ALL_TCP = 0b11  # bind, connect
_ALL_SCOPES = 0b11  # abstract sockets, signals
_GET_VERSION, _PATH_BENEATH = 1, 1

READ, WRITE = _EXECUTE | _READ_FILE | _READ_DIR, (1 << 16) - 1


@dataclass(frozen=True)
class Rule:
    """`path`, and if it is a folder all below, may be used in the ways of `access`."""

    path: Path
    access: int


def landlock_version() -> int:
    """The kernel's version of Landlock, 0 without it."""
    with contextlib.suppress(OSError):
        return system_call("landlock_create_ruleset", None, 0, _GET_VERSION)
    return 0


def restrict_thread(rules: Iterable[Rule]) -> None:
    """Allow the calling thread nothing but this, no TCP, and signals and abstract sockets only among those it starts.

    After `no_new_privileges`. What the kernel's version does not know stays allowed. Raises OSError.
    """
    version = landlock_version()
    handled = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    words = [handled, *([_ALL_TCP] if version >= 4 else []), *([_ALL_SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = system_call("landlock_create_ruleset", attributes, len(attributes), 0, what="landlock_create_ruleset")
    try:
        for rule in rules:
            _add(ruleset, rule, handled)
        system_call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, rule: Rule, handled: int) -> None:
    """A path that is not there needs no rule."""
    try:
        handle = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        access = rule.access & handled
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            access &= _ON_FILES
        entry = struct.pack("=Qi", access, handle)
        system_call("landlock_add_rule", ruleset, _PATH_BENEATH, entry, 0, what=f"Landlock rule for {rule.path}")
    finally:
        os.close(handle)
