"""Frames between host and guest agent, over any duplex byte stream.

A frame is one JSON object on one line; if it has `"bytes": n`, n raw bytes follow the line feed, and from the host one `.`
after them. A host that comes new first sends more line feeds than a body can be long: they end whatever the host before it
had half written (the missing `.` shows that a body was not its own), and then `hello` with a nonce. It skips all that it
reads until the reply that bears the nonce. Everything that a guest sends is untrusted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonlet.errors import GuestFileError, SandboxDiedError, SandboxError, SandboxNotFoundError, SandboxTimeoutError

MAX_LINE_BYTES = 1 << 20
MAX_BODY_BYTES = 256 << 10
PROTOCOL = 1
_READ_BYTES = 256 << 10
_HIGH_WATER_BYTES = 1 << 20
_BODY_MARK = b"."
_CODE = re.compile(r"E[A-Z0-9]{1,20}")


@dataclass(frozen=True)
class FifoPair:
    """Two named pipes: the host writes `to_guest` and reads `from_guest`, each opened O_RDWR so that neither end sees EOF."""

    to_guest: Path
    from_guest: Path


@dataclass(frozen=True)
class UnixSocket:
    """A listening Unix socket (virtio-serial of QEMU); with `vsock_port` one that leads to that port (Firecracker)."""

    path: Path
    vsock_port: int | None = None


Endpoint = FifoPair | UnixSocket
OnEvent = Callable[[Mapping[str, Any], bytes], None]


@dataclass(frozen=True)
class Reply:
    """What the agent answered. The getters check types: a guest may send anything."""

    fields: Mapping[str, Any]
    body: bytes = b""

    def number(self, name: str) -> int:
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 1 << 63:
            raise SandboxError(f"the guest agent's answer has no number '{name}': it is broken or of another version")
        return value

    def flag(self, name: str) -> bool:
        return self.fields.get(name) is True

    def objects(self, name: str) -> list[dict[str, Any]]:
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise SandboxError(f"the guest agent's answer has no list '{name}': it is broken or of another version")
        return value


def guest_error(fields: Mapping[str, Any]) -> SandboxError:
    """The exception for a reply that is not ok."""
    code = fields.get("error")
    code = code if isinstance(code, str) and _CODE.fullmatch(code) else "EIO"
    text = fields.get("message")
    text = text[:1000].encode("utf-8", "replace").decode() if isinstance(text, str) else "the guest agent refused"
    return SandboxNotFoundError(text) if code == "ESRCH" else GuestFileError(text, code)


class FrameReader:
    """Cuts bytes into frames and skips what is none. Before `nonce` is answered it skips all."""

    def __init__(self, nonce: str) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._nonce: str | None = nonce
        self._head: dict[str, Any] | None = None
        self._need = 0
        self._is_skipping = False

    def feed(self, data: bytes) -> list[Reply]:
        """The frames that end within `data`."""
        self._buffer += data
        frames: list[Reply] = []
        while self._step(frames):
            pass
        return frames

    def _step(self, frames: list[Reply]) -> bool:
        if self._head is not None:
            if len(self._buffer) < self._need:
                return False
            frames.append(Reply(self._head, bytes(self._buffer[: self._need])))
            self._drop(self._need)
            self._head = None
            return True
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                self._drop(self._searched)
                self._is_skipping = True
            return False
        line = bytes(self._buffer[:end])
        self._drop(end + 1)
        if self._is_skipping:
            self._is_skipping = False
        elif line:
            self._take(line, frames)
        return True

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._searched = 0

    def _take(self, line: bytes, frames: list[Reply]) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(fields, dict):
            return
        if self._nonce is not None:
            if fields.get("hello") == self._nonce:
                self._nonce = None
                frames.append(Reply(fields))
            return
        need = fields.get("bytes", 0)
        if not isinstance(need, int) or isinstance(need, bool) or not 0 <= need <= MAX_BODY_BYTES:
            return
        if need:
            self._head, self._need = fields, need
        else:
            frames.append(Reply(fields))


@dataclass
class Request:
    """A call on its way; await it once, or cancel it."""

    id: int
    op: str
    stream: GuestStream
    answer: asyncio.Future[Reply] = field(repr=False)

    async def wait(self, timeout_s: float | None) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.answer
        except TimeoutError:
            raise SandboxTimeoutError(f"the guest agent did not answer '{self.op}' within {timeout_s:g} s") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits any more; a late answer is skipped."""
        self.stream.forget(self.id)
        if not self.answer.done():
            self.answer.cancel()
        elif not self.answer.cancelled():
            self.answer.exception()  # so that asyncio does not report it as never read


class GuestStream:
    """The host's end of a stream. Any number of calls may be under way at once; all from one event loop."""

    def __init__(self, to_guest: int, from_guest: int, *, on_event: OnEvent | None = None) -> None:
        self.on_event = on_event
        self.epoch = ""  # names this life of the agent
        self.guest_time = 0.0  # its clock at the hello, Unix seconds
        self._fds = (to_guest, from_guest)
        self._loop = asyncio.get_running_loop()
        self._nonce = secrets.token_hex(16)
        self._frames = FrameReader(self._nonce)
        self._greeting: asyncio.Future[Reply] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._ids = itertools.count(1)
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: SandboxError | None = None

    @classmethod
    async def open(
        cls, endpoint: Endpoint, *, timeout_s: float = 30.0, is_fresh: bool = False, on_event: OnEvent | None = None
    ) -> GuestStream:
        """Connect and greet. `is_fresh` (nobody spoke with this agent before) spares the line feeds.

        Raises SandboxTimeoutError if no agent answers, SandboxDiedError if the stream ends.
        """
        try:
            async with asyncio.timeout(timeout_s):
                stream = cls(*await _connect(endpoint), on_event=on_event)
                try:
                    await stream._greet(is_fresh)
                except BaseException:
                    stream.close()
                    raise
                return stream
        except TimeoutError:
            raise SandboxTimeoutError(f"the guest agent did not answer within {timeout_s:g} s") from None

    async def _greet(self, is_fresh: bool) -> None:
        self._loop.add_reader(self._fds[1], self._read)
        self._write(b"\n" * (1 if is_fresh else MAX_BODY_BYTES + 2))
        self._write(json.dumps({"op": "hello", "nonce": self._nonce}).encode() + b"\n")
        hello = await self._greeting
        if hello.fields.get("protocol") != PROTOCOL:
            raise SandboxError(f"the guest agent speaks protocol {hello.fields.get('protocol')}, not {PROTOCOL}")
        epoch, time = hello.fields.get("epoch"), hello.fields.get("time")
        self.epoch = epoch if isinstance(epoch, str) else ""
        self.guest_time = float(time) if isinstance(time, int | float) else 0.0

    # -- calls --------------------------------------------------------------------------------------------------------
    async def call(self, op: str, *, body: bytes = b"", timeout_s: float | None = 30.0, **fields: Any) -> Reply:
        """Ask the agent.

        Raises GuestFileError (`code` is an errno's name), SandboxNotFoundError (no such command), SandboxTimeoutError,
        SandboxDiedError (the stream is closed).
        """
        await self._has_room.wait()
        return await self.request(op, body=body, **fields).wait(timeout_s)

    def request(self, op: str, *, body: bytes = b"", **fields: Any) -> Request:
        """Send now, wait later: several requests travel together. Does not mind how much is queued; `call` does."""
        number = next(self._ids)
        answer = self._loop.create_future()
        self._calls[number] = answer
        try:
            self._send({"id": number, "op": op, **fields}, body)
        except BaseException:
            del self._calls[number]
            raise
        return Request(number, op, self, answer)

    def post(self, op: str, *, body: bytes = b"", **fields: Any) -> None:
        """Send what nobody waits for; silent if the stream is closed."""
        if self._error is None:
            self._send({"op": op, **fields}, body)

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def _send(self, fields: dict[str, Any], body: bytes) -> None:
        if self._error is not None:
            raise self._error
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        if body:
            fields["bytes"] = len(body)
        line = json.dumps(fields, separators=(",", ":")).encode()
        if len(line) > MAX_LINE_BYTES:
            raise GuestFileError(f"a request of {len(line)} bytes is too long for the guest agent", "E2BIG")
        self._write(b"".join((line, b"\n", body, _BODY_MARK)) if body else line + b"\n")

    # -- bytes --------------------------------------------------------------------------------------------------------
    def _write(self, data: bytes) -> None:
        self._out.append(memoryview(data))
        self._out_bytes += len(data)
        if len(self._out) == 1:
            self._flush()
        if self._out and self._out_bytes > _HIGH_WATER_BYTES:
            self._has_room.clear()

    def _flush(self) -> None:
        while self._out:
            try:
                count = os.write(self._fds[0], self._out[0])
            except BlockingIOError:
                self._loop.add_writer(self._fds[0], self._flush)
                return
            except OSError as error:
                self.close(SandboxDiedError(f"the guest agent's stream broke: {error}"))
                return
            self._out_bytes -= count
            rest = self._out.popleft()[count:]
            if rest:
                self._out.appendleft(rest)
        self._loop.remove_writer(self._fds[0])
        self._has_room.set()

    def _read(self) -> None:
        try:
            data = os.read(self._fds[1], _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(SandboxDiedError(f"the guest agent's stream broke: {error}"))
            return
        if not data:
            self.close(SandboxDiedError("the guest agent's stream ended: its machine is gone"))
            return
        for frame in self._frames.feed(data):
            self._take(frame)

    def _take(self, frame: Reply) -> None:
        if not self._greeting.done():
            self._greeting.set_result(frame)
            return
        number = frame.fields.get("id")
        answer = self._calls.pop(number, None) if isinstance(number, int) else None
        if answer is not None:
            if answer.done():
                return
            if frame.fields.get("ok") is True:
                answer.set_result(frame)
            else:
                answer.set_exception(guest_error(frame.fields))
        elif frame.fields.get("event") == "junk":
            self.close(SandboxDiedError("the guest agent could not read what it was sent; open the stream again"))
        elif self.on_event is not None and isinstance(frame.fields.get("event"), str):
            self.on_event(frame.fields, frame.body)

    @property
    def is_closed(self) -> bool:
        return self._error is not None

    def close(self, error: SandboxError | None = None) -> None:
        """Let go of the stream; calls under way raise `error`. Idempotent. The agent and its commands go on."""
        if self._error is not None:
            return
        self._error = error or SandboxDiedError("the stream to the guest agent was closed", "lost")
        self._loop.remove_reader(self._fds[1])
        self._loop.remove_writer(self._fds[0])
        for fd in set(self._fds):
            os.close(fd)
        self._out.clear()
        self._has_room.set()
        if not self._greeting.done():
            self._greeting.set_exception(self._error)
            self._greeting.exception()
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(self._error)
                answer.exception()


async def _connect(endpoint: Endpoint) -> tuple[int, int]:
    if isinstance(endpoint, FifoPair):
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        to_guest = os.open(endpoint.to_guest, flags)
        try:
            return to_guest, os.open(endpoint.from_guest, flags)
        except OSError:
            os.close(to_guest)
            raise
    while True:  # the machine may not listen yet; the caller's timeout ends this
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(peer, str(endpoint.path))
            if endpoint.vsock_port is None or await _enter_vsock(peer, endpoint.vsock_port):
                number = peer.detach()
                return number, number
            await asyncio.sleep(0.01)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            await asyncio.sleep(0.01)
        finally:
            peer.close()


async def _enter_vsock(peer: socket.socket, port: int) -> bool:
    """Have a monitor connect us to a port of its guest; False while nothing listens there."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, b"CONNECT %d\n" % port)
    line = b""
    while not line.endswith(b"\n") and len(line) < 64:
        byte = await loop.sock_recv(peer, 1)  # what follows the line is the guest's
        if not byte:
            return False
        line += byte
    return line.startswith(b"OK ")
