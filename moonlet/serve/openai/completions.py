"""`/v1/completions`: text or token ids in, their continuation out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from moonlet.serve.openai.answers import (
    ASCIIResponse,
    Chunk,
    events_of,
    head,
    read_body,
    start_stream,
    unless_gone,
    usage,
)
from moonlet.serve.openai.schema import CompletionBody
from moonlet.serve.openai.service import Service, Streaming
from moonlet.serve.openai.stops import StopStrings
from moonlet.serve.sampler import Drawn
from moonlet.serve.sequence import Request as EngineRequest
from moonlet.text.tokenizer import Tokenizer
from moonlet.text.utf8 import Utf8Stream

router = APIRouter()


class TextWriter:
    """Tokens to text, up to the first stop string; tokens that end an answer stand for no text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], silent: frozenset[int]) -> None:
        self._characters, self._stops, self._silent = Utf8Stream(tokenizer), StopStrings(stops), silent

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped

    def push(self, token: int) -> str:
        return "" if token in self._silent else self._stops.push(self._characters.push(token))

    def flush(self) -> str:
        return self._stops.push(self._characters.flush()) + self._stops.flush()


@dataclass
class Continuation:
    """One answer. `chunks` is what a streaming client sees; `whole` puts them together."""

    tokenizer: Tokenizer
    body: CompletionBody
    request: EngineRequest
    head: dict[str, Any]

    def __post_init__(self) -> None:
        self.writer = TextWriter(self.tokenizer, self.body.stops, self.request.stop_ids)
        self.num_tokens = self.num_cached = self._offset = 0

    @property
    def usage(self) -> dict[str, Any]:
        return usage(len(self.request.ids), self.num_tokens, self.num_cached)

    async def chunks(self, thread: Streaming) -> AsyncGenerator[Chunk, None]:
        """One for each token. Raises what submitting raises, before the first chunk."""
        async with aclosing(events_of(thread, self.request)) as events:
            async for event in events:
                self.num_cached = event.num_cached
                text, extra, finish = "", {}, None
                if event.drawn is not None:
                    extra, text = self._extra(event.drawn), self.writer.push(event.drawn.token)
                if event.finish is not None:
                    text += self.writer.flush()
                    is_cut = event.finish in ("length", "deadline") and not self.writer.is_stopped
                    finish = "length" if is_cut else "stop"
                self._offset += len(text)
                choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None, **extra}
                yield {**self.head, "choices": [choice]}
        if self.body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": self.usage}

    def _extra(self, drawn: Drawn) -> dict[str, Any]:
        self.num_tokens += 1
        extra: dict[str, Any] = {"token_ids": [drawn.token]} if self.body.return_token_ids else {}
        if self.body.logprobs is not None:
            top = {self.tokenizer.decode([token]): value for token, value in reversed(drawn.top)}
            extra["logprobs"] = {
                "tokens": [self.tokenizer.decode([drawn.token])],
                "token_logprobs": [drawn.logprob],
                "top_logprobs": [top],
                "text_offset": [self._offset],
            }
        return extra

    async def whole(self, thread: Streaming) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None if self.body.logprobs is None else {}}
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": list(self.request.ids), "token_ids": []}
        async with aclosing(self.chunks(thread)) as chunks:
            async for part in (chunk["choices"][0] async for chunk in chunks if chunk["choices"]):
                choice["text"] += part["text"]
                choice["finish_reason"] = part["finish_reason"]
                for key, values in (part["logprobs"] or {}).items():
                    choice["logprobs"].setdefault(key, []).extend(values)
                if "token_ids" in part:
                    choice["token_ids"] += part["token_ids"]
        return {**self.head, "choices": [choice], "usage": self.usage}


def build_continuation(service: Service, body: CompletionBody) -> Continuation:
    """Raises DataError, RequestError, UnknownModelError."""
    service.check_model(body.model)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    watch = TextWriter(service.tokenizer, body.stops, service.text_stops)  # the engine's own: it sees each token first

    def is_over(token: int) -> bool:
        watch.push(token)
        return watch.is_stopped

    request = EngineRequest(
        ids,
        service.sampling(body),
        max_tokens=service.max_tokens(body.max_tokens, len(ids)),
        stop_ids=service.text_stops,
        banned_ids=service.text_banned,
        num_top=body.logprobs or 0,
        deadline_s=service.config.answer_timeout_s,
        should_stop=is_over if body.stops else None,
    )
    return Continuation(service.tokenizer, body, request, head(service, "cmpl-", "text_completion"))


@router.post("/v1/completions", response_model=None)
async def complete_text(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    continuation = await asyncio.to_thread(build_continuation, service, body)
    if body.stream:
        return await start_stream(request, continuation.chunks(service.thread))
    return ASCIIResponse(await unless_gone(request, continuation.whole(service.thread)))
