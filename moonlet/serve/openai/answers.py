"""How errors and streams look to OpenAI's clients, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from moonlet.errors import DataError, EngineBusyError, MoonletError, RequestError
from moonlet.serve.engine_thread import EngineStoppedError
from moonlet.serve.openai.service import AnswerFailedError, Service, Streaming, UnknownModelError, new_id
from moonlet.serve.sequence import Request as EngineRequest
from moonlet.serve.sequence import TokenEvent

log = logging.getLogger(__name__)
Chunk = dict[str, Any]
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

_ANSWERS: tuple[tuple[type[Exception], int, str], ...] = (
    (EngineBusyError, 429, "rate_limit_error"),
    (UnknownModelError, 404, "not_found_error"),
    (EngineStoppedError, 503, "server_error"),
    (AnswerFailedError, 500, "server_error"),
    (RequestError, 400, "invalid_request_error"),
    (DataError, 400, "invalid_request_error"),
    (MoonletError, 400, "invalid_request_error"),
)


class ASCIIResponse(Response):
    """JSON in ASCII: a model may write half a surrogate pair as an escape, which no UTF-8 stands for."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def error_body(kind: str, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers; what we did not expect is logged and told without details."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        message = f"{where}: {first['msg']}" if where else first["msg"]
        return 400, error_body("invalid_request_error", message, where or None), {}
    for kind, status, word in _ANSWERS:
        if isinstance(error, kind):
            busy = isinstance(error, EngineBusyError)
            headers = {"Retry-After": str(max(1, round(error.retry_after_s)))} if busy else {}
            code = "model_not_found" if isinstance(error, UnknownModelError) else None
            return status, error_body(word, str(error), code=code), headers
    log.error("A request failed", exc_info=error)
    return 500, error_body("server_error", "the server failed; its log says how"), {}


async def answer_error(request: Request, error: Exception) -> Response:
    status, body, headers = describe_error(error)
    return ASCIIResponse(body, status, headers)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as a model. Raises ValidationError."""
    return kind.model_validate_json(await request.body())


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. The body must have been read."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for unfinished in (task, leaving):
            unfinished.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events_of(thread: Streaming, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    """The events of an answer. Raises AnswerFailedError where the engine gives it up."""
    stream = thread.stream(request)
    try:
        async for event in stream:
            if event.finish == "error":
                raise AnswerFailedError(f"the answer could not be finished: {event.error}")
            yield event
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


class EventStream(StreamingResponse):
    """Server-sent events, ended by [DONE]. However it ends, the answer behind it ends too."""

    def __init__(self, first: Chunk, rest: AsyncGenerator[Chunk, None]) -> None:
        self._first, self._rest = first, rest
        super().__init__(self._lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()

    async def _lines(self) -> AsyncIterator[str]:
        yield _line(self._first)
        try:
            async for chunk in self._rest:
                yield _line(chunk)
        except Exception as error:
            yield _line(describe_error(error)[1])
        yield "data: [DONE]\n\n"


def _line(chunk: Chunk) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


async def start_stream(request: Request, chunks: AsyncGenerator[Chunk, None]) -> EventStream:
    """Waits for the first chunk, so that a refusal is still an answer with a status of its own."""

    async def first() -> Chunk:
        return await anext(chunks)

    try:
        return EventStream(await unless_gone(request, first()), chunks)
    except BaseException:
        await chunks.aclose()
        raise


def usage(num_prompt: int, num_answer: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def head(service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """The fields that all chunks of an answer share."""
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": service.config.model_name,
    }
