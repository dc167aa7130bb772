"""Bodies of uploads as they arrive: nothing is kept but the piece that is being handed on."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import AsyncIterator

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from moonlet.sandbox.server.connect import ConnectError, read_chunks

PIECE_BYTES = 256 << 10
MAX_HEADER_BYTES = 4096 + 256  # a path, and what surrounds it
MAX_HEADERS = 16


async def read_stream(request: Request) -> AsyncIterator[bytes]:
    """The body, unpacked if its `Content-Encoding` is gzip."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        async for chunk in read_chunks(request):
            if chunk:
                yield chunk
    elif encoding == "gzip":
        async for chunk in _gunzip(request):
            yield chunk
    else:
        raise ConnectError("unimplemented", f"Content-Encoding {encoding} is not accepted, gzip is")


async def _gunzip(request: Request) -> AsyncIterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        async for chunk in read_chunks(request):
            while chunk:
                if unpacker.eof:  # gzip files may be several in a row
                    unpacker = zlib.decompressobj(wbits=31)
                piece = unpacker.decompress(chunk, PIECE_BYTES)
                chunk = unpacker.unconsumed_tail or unpacker.unused_data
                if piece:
                    yield piece
    except zlib.error:
        raise ConnectError("invalid_argument", "the body is not valid gzip") from None
    rest = unpacker.flush()
    if rest:
        yield rest
    if not unpacker.eof:
        raise ConnectError("invalid_argument", "the gzip body is cut short")


class Part:
    """One file of a multipart body; its data must be read before the next part is asked for."""

    def __init__(self, body: MultipartBody, name: str, filename: str) -> None:
        self.name, self.filename = name, filename
        self._body = body

    async def data(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._body.next_event()
            if event is None or event is _PART_END:
                return
            if isinstance(event, bytes):
                yield event


_PART_END = object()


class MultipartBody:
    """Parses `multipart/form-data` piece by piece, in step with whoever consumes the parts."""

    def __init__(self, request: Request, max_parts: int) -> None:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 256:
            raise ConnectError("invalid_argument", "the body is not multipart/form-data with a boundary")
        callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": lambda data, start, end: self._events.append(bytes(data[start:end])),
            "on_part_end": lambda: self._events.append(_PART_END),
            "on_end": self._finish,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        self._chunks = read_stream(request)
        self._events: deque[object] = deque()
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""
        self._num_parts, self._max_parts = 0, max_parts
        self._is_finished = False

    async def parts(self) -> AsyncIterator[Part]:
        """The parts in order; what is left of one is skipped when the next is asked for."""
        while (event := await self.next_event()) is not None:
            if isinstance(event, tuple):
                yield Part(self, *event)

    async def next_event(self) -> object | None:
        """The next piece of data, start or end of a part; None at the end of the body."""
        while not self._events:
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                if not self._is_finished:
                    raise ConnectError("invalid_argument", "the multipart body is cut short") from None
                return None
            try:
                self._parser.write(chunk)
            except MultipartParseError as error:
                raise ConnectError("invalid_argument", f"the multipart body is malformed: {error}") from None
        return self._events.popleft()

    def _begin(self) -> None:
        self._headers, self._field, self._value = {}, b"", b""
        self._num_parts += 1
        if self._num_parts > self._max_parts:
            raise ConnectError("resource_exhausted", f"more than {self._max_parts} parts in one upload")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._field) + len(self._value) > MAX_HEADER_BYTES or len(self._headers) > MAX_HEADERS:
            raise ConnectError("invalid_argument", "the headers of a part are too long")

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name, filename = (options.get(key, b"").decode("utf-8", "surrogateescape") for key in (b"name", b"filename"))
        self._events.append((name, filename))

    def _finish(self) -> None:
        self._is_finished = True
