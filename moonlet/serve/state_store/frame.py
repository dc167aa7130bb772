"""A value as every tier keeps it: with its length and a checksum that also covers its key.

    magic (4 bytes) | length of the value (8) | sha256 of key and value (32) | value

So one changed byte, a cut, and a value that lies under another's key are all found on reading.
"""

from __future__ import annotations

import hashlib

HEADER_BYTES = 44
_MAGIC = b"MSF1"


def seal(key: bytes, value: bytes) -> bytes:
    """The frame of a value."""
    return b"".join((_MAGIC, len(value).to_bytes(8, "little"), _digest(key, value), value))


def is_whole(key: bytes, frame: bytes) -> bool:
    """Whether `frame` is, byte for byte, the frame of a value that was put under `key`."""
    if len(frame) < HEADER_BYTES or frame[:4] != _MAGIC:
        return False
    if int.from_bytes(frame[4:12], "little") != len(frame) - HEADER_BYTES:
        return False
    return frame[12:HEADER_BYTES] == _digest(key, memoryview(frame)[HEADER_BYTES:])


def value_of(frame: bytes) -> bytes:
    """The value in a whole frame."""
    return frame[HEADER_BYTES:]


def _digest(key: bytes, value: bytes | memoryview) -> bytes:
    hashed = hashlib.sha256(bytes((len(key),)) + key)
    hashed.update(value)
    return hashed.digest()
