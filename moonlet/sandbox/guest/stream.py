"""Frames between host and guest agent, over any duplex byte stream.

A frame is one JSON object on one line; if it has `"bytes": n`, n raw bytes follow the line feed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_LINE_BYTES = 1 << 20
MAX_BODY_BYTES = 256 << 10


@dataclass(frozen=True)
class FifoPair:
    """Two named pipes: the host writes `to_guest` and reads `from_guest`, each opened O_RDWR so that neither end sees EOF."""

    to_guest: Path
    from_guest: Path


@dataclass(frozen=True)
class UnixSocket:
    """A listening Unix socket (virtio-serial of QEMU)."""

    path: Path


Endpoint = FifoPair | UnixSocket
