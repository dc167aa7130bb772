"""The ELF file inside of a compressed kernel image, which Firecracker boots.

The image's header says where the compressed part lies (the kernel's x86 boot protocol, 2.08); its first bytes say how it
was compressed. Debian's cloud kernel uses the legacy frames of LZ4, for which the standard library has no decoder.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
import subprocess
import zlib
from pathlib import Path

from moonlet.errors import BackendUnavailableError

_SETUP_SECTORS, _SIGNATURE, _PAYLOAD = 0x1F1, 0x202, 0x248
_LZ4_LEGACY = b"\x02\x21\x4c\x18"


def unpack_kernel(image: Path, target: Path) -> None:
    """Write the ELF file of `image` to `target`. Raises BackendUnavailableError for an image of another kind."""
    data = image.read_bytes()
    elf = data if data.startswith(b"\x7fELF") else _decompressed(_payload(data, image), image)
    if not elf.startswith(b"\x7fELF"):
        raise BackendUnavailableError(f"{image} holds no ELF kernel: Firecracker cannot boot it")
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(elf)
    os.replace(unfinished, target)


def _payload(data: bytes, image: Path) -> bytes:
    if data[_SIGNATURE : _SIGNATURE + 4] != b"HdrS":
        raise BackendUnavailableError(f"{image} is no kernel image for x86")
    start = (data[_SETUP_SECTORS] + 1) * 512
    offset, length = struct.unpack_from("<II", data, _PAYLOAD)
    return data[start + offset : start + offset + length]


def _decompressed(payload: bytes, image: Path) -> bytes:
    """The payload without its last four bytes, which say how long it is when unpacked."""
    try:
        if payload.startswith(_LZ4_LEGACY):
            return _lz4_legacy(payload[4:-4])
        if payload.startswith(b"\x1f\x8b"):
            return gzip.decompress(payload)
        if payload.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
            return lzma.LZMADecompressor().decompress(payload)
        if payload.startswith(b"BZh"):
            return bz2.BZ2Decompressor().decompress(payload)
        if payload.startswith(b"\x28\xb5\x2f\xfd"):
            return subprocess.run(["zstd", "-dcq"], input=payload[:-4], capture_output=True, check=True).stdout
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, subprocess.CalledProcessError) as error:
        raise BackendUnavailableError(f"{image} cannot be unpacked: {error}") from error
    raise BackendUnavailableError(f"{image} is compressed in an unknown way ({payload[:4].hex()})")


def _lz4_legacy(data: bytes) -> bytes:
    """Blocks, each after its length."""
    parts, at = [], 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        parts.append(_lz4_block(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return b"".join(parts)


def _lz4_block(data: bytes) -> bytes:
    """Literals and copies of what was written before, in turn; raises ValueError for a damaged block."""
    out, at, end = bytearray(), 0, len(data)

    def long_length(length: int, at: int) -> tuple[int, int]:
        if length == 15:
            while data[at] == 255:
                length, at = length + 255, at + 1
            length, at = length + data[at], at + 1
        return length, at

    try:
        while at < end:
            token = data[at]
            literals, at = long_length(token >> 4, at + 1)
            out += data[at : at + literals]
            at += literals
            if at >= end:
                break
            distance = data[at] | data[at + 1] << 8
            length, at = long_length(token & 15, at + 2)
            start, length = len(out) - distance, length + 4
            if start < 0 or not distance:
                raise ValueError("damaged LZ4 data")
            while length > 0:  # a copy may reach into what it writes
                piece = out[start : start + length]
                out += piece
                length -= len(piece)
    except IndexError as error:
        raise ValueError("damaged LZ4 data") from error
    return bytes(out)
