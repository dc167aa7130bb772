"""In front of the endpoints: who may ask, and how large and how late a request may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from moonlet.serve.openai.answers import ASCIIResponse, error_body
from moonlet.serve.openai.service import ServeConfig

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_OPEN_PATHS = ("/health",)


class TooLargeError(Exception):
    """A body is larger than allowed."""


class Gate:
    """Middleware. The whole body is read here, within its limits, before anything looks at it."""

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"] not in _OPEN_PATHS and not self._accepts(headers):
            body = error_body("authentication_error", "send the server's key as a bearer token", code="invalid_api_key")
            await ASCIIResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                whole = await self._read(headers, receive)
        except TooLargeError:
            await self._refuse(413, f"a request may have {self._config.max_body_bytes:,} bytes", scope, receive, send)
        except TimeoutError:
            await self._refuse(408, "the request's body did not arrive in time", scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self._app(scope, _replay(whole, receive), send)

    async def _refuse(self, status: int, message: str, scope: Any, receive: Receive, send: Any) -> None:
        answer = ASCIIResponse(error_body("invalid_request_error", message), status, {"Connection": "close"})
        await answer(scope, receive, send)

    def _accepts(self, headers: Headers) -> bool:
        if self._config.api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self._config.api_key.encode())
        return same and scheme.lower() == "bearer"

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._config.max_body_bytes:
            raise TooLargeError
        whole = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            whole += message.get("body", b"")
            if len(whole) > self._config.max_body_bytes:
                raise TooLargeError
            if not message.get("more_body"):
                return bytes(whole)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes after it: that the client leaves."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
