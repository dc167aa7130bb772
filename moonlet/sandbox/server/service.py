"""What every part of the server shares."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from moonlet.sandbox.server.answers import ApiError, describe_error, error_body
from moonlet.sandbox.server.audit import AuditLog
from moonlet.sandbox.server.auth import Keys
from moonlet.sandbox.server.config import ServerConfig
from moonlet.sandbox.server.connect import ConnectError, read_body
from moonlet.sandbox.server.follow import Followers
from moonlet.sandbox.server.metrics import Metrics
from moonlet.sandbox.server.watchers import Watchers

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


@dataclass
class Service:
    """One running service. `closing` is set when it is asked to stop, so that long streams end."""

    manager: Any
    config: ServerConfig
    keys: Keys
    audit: AuditLog
    metrics: Metrics
    watchers: Watchers
    followers: Followers = field(default_factory=Followers)
    streams: Counter[str] = field(default_factory=Counter)  # open now, by sandbox
    closing: asyncio.Event = field(default_factory=asyncio.Event)


def service_of(request: Request) -> Service:
    return request.app.state.service


async def read_model(request: Request, kind: type[Model]) -> Model:
    """The JSON body as `kind`; no body counts as an empty object."""
    limit = service_of(request).config.bounds.json_bytes
    try:
        body = await read_body(request, limit)
    except ConnectError as error:
        raise ApiError(408 if error.code == "deadline_exceeded" else 413, str(error)) from None
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where or 'the body'}: {first['msg']}") from None


def error_response(error: Exception) -> JSONResponse:
    body, headers = describe_error(error)
    return JSONResponse(body, body["code"], headers)


def peer_of(request: Request) -> str:
    return request.client.host if request.client else ""


def unauthorized(message: str) -> JSONResponse:
    return JSONResponse(error_body(401, message), 401)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client goes away: nobody would know what it made."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_gone(request: Request) -> None:
    """The body has been read, so nothing but the end of the connection can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
