"""The end of what a guest's kernel prints, for whoever asks why a machine has died.

It is kept in memory and written when the machine ends: a guest could fill the host's disk through a file.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

KEPT_BYTES = 64 << 10
CONSOLE_LOG = "console.log"


class Console:
    """Reads the serial port of a machine from its socket, as long as both live."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._reading: asyncio.Task[None] | None = None

    def open(self, path: Path) -> None:
        self._reading = asyncio.create_task(self._read(path), name="console")

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()

    async def finish(self, folder: Path) -> None:
        """After the end of the machine: take what is left and write it to `console.log`, if there was anything."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=1.0)
        if self._kept:
            with contextlib.suppress(OSError):
                await asyncio.to_thread((folder / CONSOLE_LOG).write_bytes, bytes(self._kept))

    async def _read(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                while data := await reader.read(4096):
                    self._kept += data
                    del self._kept[:-KEPT_BYTES]
            finally:
                writer.close()
