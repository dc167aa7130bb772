"""Envelopes of the Connect protocol: one byte of flags, the length as a big-endian 32-bit number, so many bytes of JSON.

The last envelope of a stream has flag 2 and holds `{}` or `{"error": {"code", "message"}}`. https://connectrpc.com/docs/protocol
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct(">BI")
COMPRESSED, END = 1, 2


class EnvelopeError(Exception):
    """What came is no envelope that we read; `code` is the protocol's word for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(flags, len(data)) + data


def parse_message(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise EnvelopeError("invalid_argument", "the message is not valid JSON") from None
    if not isinstance(message, dict):
        raise EnvelopeError("invalid_argument", "the message is not a JSON object")
    return message


class EnvelopeReader:
    """Cuts a byte stream into messages of at most `limit` bytes each."""

    def __init__(self, limit: int) -> None:
        self._buffer, self._limit = bytearray(), limit

    def feed(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Flags and message of every envelope that is complete now."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                flags, length = HEADER.unpack_from(self._buffer, start)
                if flags & ~END:
                    raise EnvelopeError("unimplemented", "compressed messages are not accepted")
                if length > self._limit:
                    raise EnvelopeError(
                        "resource_exhausted", f"a message of {length} bytes, the limit is {self._limit}"
                    )
                end = start + HEADER.size + length
                if len(self._buffer) < end:
                    break
                message = parse_message(bytes(self._buffer[start + HEADER.size : end]))
                start = end
                yield flags, message
        finally:
            del self._buffer[:start]

    @property
    def is_between_messages(self) -> bool:
        return not self._buffer
