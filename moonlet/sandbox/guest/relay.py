"""Connections that guest programs made to a port of their own loopback, as channels on the host.

Each direction has a window: no more than WINDOW_BYTES are under way that the other side has not confirmed. A guest that
does not keep to it loses the channel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from moonlet.errors import SandboxDiedError
from moonlet.sandbox.guest.stream import MAX_BODY_BYTES, GuestStream

WINDOW_BYTES = 256 << 10
MAX_CHANNELS = 256
_PIECE_BYTES = 64 << 10


class Channel:
    """One connection. `read` and `write` as of a socket; closing is never an error."""

    def __init__(self, stream: GuestStream, number: int) -> None:
        self.number = number
        self._stream = stream
        self._arrived: deque[bytes] = deque()
        self._unread = 0
        self._room = WINDOW_BYTES
        self._changed = asyncio.Event()
        self._at_end = False
        self.is_closed = False

    async def read(self) -> bytes:
        """Some bytes; empty at the end."""
        while not self._arrived:
            if self._at_end:
                return b""
            await self._wait()
        data = self._arrived.popleft()
        self._unread -= len(data)
        self._stream.post("net.ack", channel=self.number, count=len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Waits for the program to read. Raises ConnectionResetError once the channel is closed."""
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            while self._room < len(piece) and not self.is_closed:
                await self._wait()
            if self.is_closed:
                raise ConnectionResetError("the program in the sandbox closed its connection")
            self._room -= len(piece)
            self._stream.post("net.send", body=piece, channel=self.number)

    def end(self) -> None:
        """Nothing more will be written."""
        if not self.is_closed:
            self._stream.post("net.end", channel=self.number)

    def close(self) -> None:
        if not self.is_closed:
            self._stream.post("net.close", channel=self.number)
            self._arrived.clear()
            self.take_close()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # -- what the guest says ------------------------------------------------------------------------------------------
    def take(self, data: bytes) -> None:
        if self.is_closed or self._at_end or not data:
            return
        if self._unread + len(data) > WINDOW_BYTES:
            self.close()
            return
        self._unread += len(data)
        self._arrived.append(data)
        self._changed.set()

    def take_ack(self, count: int) -> None:
        self._room = min(WINDOW_BYTES, self._room + max(count, 0))
        self._changed.set()

    def take_end(self) -> None:
        self._at_end = True
        self._changed.set()

    def take_close(self) -> None:
        self.is_closed = self._at_end = True  # what has arrived can still be read
        self._changed.set()


Serve = Callable[[Channel], Awaitable[None]]


class Relay:
    """All channels of one guest; `serve` is called for each and the channel is closed when it returns."""

    def __init__(self, stream: GuestStream, serve: Serve) -> None:
        self._stream = stream
        self._serve = serve
        self._channels: dict[int, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> int:
        """Have the guest listen on a port of its loopback (0: any); idempotent for one port. Returns the port.

        Raises GuestFileError if a program of the guest has it.
        """
        assert WINDOW_BYTES <= MAX_BODY_BYTES
        self._stream.on_event = self._take
        return (await self._stream.call("relay", port=port)).number("port")

    async def close(self) -> None:
        """Close all channels; the guest goes on listening for the host that comes next."""
        self._stream.on_event = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, fields: Mapping[str, Any], body: bytes) -> None:
        event, number = fields.get("event"), fields.get("channel")
        if not isinstance(number, int) or isinstance(number, bool):
            return
        if event == "net.open":
            self._open(number)
            return
        channel = self._channels.get(number)
        if channel is None:
            return
        count = fields.get("count")
        if event == "net.data":
            channel.take(body)
        elif event == "net.ack" and isinstance(count, int):
            channel.take_ack(count)
        elif event == "net.end":
            channel.take_end()
        elif event == "net.close":
            channel.take_close()

    def _open(self, number: int) -> None:
        if number in self._channels or len(self._channels) >= MAX_CHANNELS:
            return
        channel = self._channels[number] = Channel(self._stream, number)
        task = asyncio.ensure_future(self._run(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, channel: Channel) -> None:
        try:
            await self._serve(channel)
        except (OSError, SandboxDiedError):
            pass  # one of the two sides is gone: so is the channel
        finally:
            channel.close()
            self._channels.pop(channel.number, None)
