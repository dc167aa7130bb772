"""The Connect protocol with its JSON codec, as a server: single calls, and streams of enveloped messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from moonlet.errors import (
    GuestFileError,
    MoonletError,
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
    StorageError,
)
from moonlet.sandbox.envelope import END, EnvelopeError, EnvelopeReader, envelope, parse_message

SILENCE_S = 120.0  # a client that sends nothing for so long has gone without a word
STREAM_TYPE = "application/connect+json"
STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
FILE_ERRORS = {
    "ENOENT": "not_found",
    "ESRCH": "not_found",
    "EEXIST": "already_exists",
    "EACCES": "permission_denied",
    "EPERM": "permission_denied",
    "EROFS": "permission_denied",
    "ENOSPC": "resource_exhausted",
    "EDQUOT": "resource_exhausted",
    "EMFILE": "resource_exhausted",
    "ENOMEM": "resource_exhausted",
    "EAGAIN": "resource_exhausted",
}

log = logging.getLogger(__name__)


class ConnectError(EnvelopeError):
    """A call failed; `code` is one of the protocol's."""


def describe(error: EnvelopeError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}


def as_connect_error(error: Exception) -> ConnectError:
    """The protocol's error for one of ours; what we did not expect is logged and told without details."""
    match error:
        case EnvelopeError():
            return ConnectError(error.code, str(error))
        case GuestFileError():
            return ConnectError(FILE_ERRORS.get(error.code, "invalid_argument"), str(error))
        case SandboxNotFoundError():
            return ConnectError("not_found", str(error))
        case SandboxTimeoutError():
            return ConnectError("deadline_exceeded", str(error))
        case SandboxDiedError():
            return ConnectError("unavailable", f"The sandbox was not found: {error}")
        case SandboxStateError():
            return ConnectError("unavailable", f"The sandbox was not found running: {error}")
        case SandboxLimitError() | StorageError():
            return ConnectError("resource_exhausted", str(error))
        case MoonletError():
            return ConnectError("internal", str(error))
    log.error("A call failed", exc_info=error)
    return ConnectError("internal", "the service failed; its log says how")


async def read_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ConnectError(deadline_exceeded) if the client falls silent in its middle."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ConnectError("deadline_exceeded", f"nothing more of the body came for {SILENCE_S:.0f} s") from None
        yield chunk


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; ConnectError(resource_exhausted) as soon as it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in read_chunks(request):
        body += chunk
        if len(body) > limit:
            raise ConnectError("resource_exhausted", f"the body is larger than {limit} bytes")
    return bytes(body)


def check_codec(request: Request, expected: str) -> None:
    """Refuse every content type but `expected`, and compressed messages."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != expected:
        raise ConnectError("unimplemented", f"the content type is {given or 'missing'}, this service speaks {expected}")
    for name in ("content-encoding", "connect-content-encoding"):
        if request.headers.get(name, "identity").lower() not in ("", "identity"):
            raise ConnectError("unimplemented", "compressed messages are not accepted")


async def read_unary(request: Request, limit: int) -> dict[str, Any]:
    """The message of a single call."""
    check_codec(request, "application/json")
    body = await read_body(request, limit)
    return parse_message(body) if body else {}


async def read_messages(request: Request, limit: int) -> AsyncIterator[dict[str, Any]]:
    """The messages of a streaming call as they arrive, each at most `limit` bytes."""
    check_codec(request, STREAM_TYPE)
    reader = EnvelopeReader(limit)
    async for chunk in request.stream():
        for flags, message in reader.feed(chunk):
            if flags & END:
                return
            yield message
    if not reader.is_between_messages:
        raise ConnectError("invalid_argument", "the stream ended within a message")


async def read_request(request: Request, limit: int) -> dict[str, Any]:
    """The one message of a call whose answer is a stream."""
    messages = [message async for message in read_messages(request, limit)]
    if len(messages) != 1:
        raise ConnectError("invalid_argument", f"one message was expected, {len(messages)} came")
    return messages[0]


def timeout_s(request: Request) -> float | None:
    """How long the caller gives the call (`Connect-Timeout-Ms`), None for as long as it takes."""
    text = request.headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) <= 10):
        raise ConnectError("invalid_argument", "Connect-Timeout-Ms is not a number of at most 10 digits")
    return int(text) / 1000 or None


class StreamResponse(Response):
    """Answers with the messages of an async iterator, each sent before the next is asked for.

    A client that reads slowly therefore holds up the iterator instead of filling memory, and one that goes away ends it,
    as does the end of `limit_s`.
    """

    def __init__(self, messages: AsyncIterator[dict[str, Any]], limit_s: float | None = None) -> None:
        super().__init__(media_type=STREAM_TYPE)
        del self.headers["content-length"]
        self._messages, self._limit_s = messages, limit_s

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Awaitable]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_wait_gone(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, watcher):
                task.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)

    async def _write(self, send: Callable[..., Awaitable]) -> None:
        error: ConnectError | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                async for message in self._messages:
                    await send({"type": "http.response.body", "body": envelope(message), "more_body": True})
        except TimeoutError:
            error = ConnectError(
                "deadline_exceeded", f"the stream was open for the {self._limit_s} s that were asked for"
            )
        except Exception as problem:
            error = as_connect_error(problem)
        finally:
            close = getattr(self._messages, "aclose", None)
            if close is not None:
                await close()
        end = envelope({"error": describe(error)} if error else {}, END)
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def _wait_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
