"""`/v1/chat/completions`: messages in, a message out, whole or as it is written."""

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
from moonlet.serve.openai.schema import ChatBody, ToolChoice
from moonlet.serve.openai.service import Service, Streaming, new_id
from moonlet.serve.openai.stops import StopStrings
from moonlet.serve.sampler import Drawn
from moonlet.serve.sequence import Finish
from moonlet.serve.sequence import Request as EngineRequest
from moonlet.text.parse import Delta, TokenParser
from moonlet.text.tokenizer import Tokenizer
from moonlet.text.xtml import ChatOptions, encode_chat

router = APIRouter()


class ChatWriter:
    """Tokens to deltas of a message; stop strings end the visible answer, not the thinking."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, thinking: bool = True) -> None:
        self._parser = TokenParser(tokenizer, thinking=thinking)
        self._stops = StopStrings(stops)

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped

    def push(self, token: int) -> list[Delta]:
        return self._cut(self._parser.push(token))

    def flush(self) -> list[Delta]:
        return [*self._cut(self._parser.flush()), *self._held()]

    def finish(self, finish: Finish | None) -> str:
        """OpenAI's word for how the message ended."""
        if self.is_stopped:
            return "stop"
        if finish in ("length", "deadline"):
            return "length"
        return "tool_calls" if self._parser.message.tool_calls else "stop"

    def is_complete(self, index: int) -> bool:
        """Whether a tool call came to its end; one that did not must not run."""
        return self._parser.message.tool_calls[index].is_complete

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if self.is_stopped:
                break
            if delta.kind != "content":
                kept += [*self._held(), delta]
            elif text := self._stops.push(delta.text):
                kept.append(Delta("content", text))
        return kept

    def _held(self) -> list[Delta]:
        text = self._stops.flush()
        return [Delta("content", text)] if text else []


@dataclass
class Chat:
    """One answer. `chunks` is what a streaming client sees; `whole` puts them together."""

    tokenizer: Tokenizer
    body: ChatBody
    request: EngineRequest
    head: dict[str, Any]

    def __post_init__(self) -> None:
        self.writer = new_writer(self.tokenizer, self.body)
        self.num_tokens = self.num_cached = 0

    @property
    def usage(self) -> dict[str, Any]:
        return usage(len(self.request.ids), self.num_tokens, self.num_cached)

    async def chunks(self, thread: Streaming) -> AsyncGenerator[Chunk, None]:
        """Raises what submitting raises, before the first chunk."""
        is_first = True
        async with aclosing(events_of(thread, self.request)) as events:
            async for event in events:
                if is_first:
                    is_first, self.num_cached = False, event.num_cached
                    yield self._chunk({"role": "assistant", "content": ""})
                deltas = [] if event.drawn is None else self.writer.push(event.drawn.token)
                if event.finish is not None:
                    deltas += self.writer.flush()
                extra = {} if event.drawn is None else self._extra(event.drawn)
                for fields in [_delta_fields(delta) for delta in deltas] or ([{}] if extra else []):
                    yield self._chunk(fields, **extra)
                    extra = {}
                if event.finish is not None:
                    yield self._chunk({}, finish=self.writer.finish(event.finish))
        if self.body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": self.usage}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **extra: Any) -> Chunk:
        return {**self.head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **extra}]}

    def _extra(self, drawn: Drawn) -> dict[str, Any]:
        """What was asked about each token; every token is told of once, markers too."""
        self.num_tokens += 1
        extra: dict[str, Any] = {"token_ids": [drawn.token]} if self.body.return_token_ids else {}
        if self.body.logprobs:
            top = [_describe(self.tokenizer, token, value) for token, value in drawn.top]
            entry = {**_describe(self.tokenizer, drawn.token, drawn.logprob), "top_logprobs": top}
            extra["logprobs"] = {"content": [entry]}
        return extra

    async def whole(self, thread: Streaming) -> dict[str, Any]:
        """The whole answer; a tool call that is not complete is left out."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        if self.body.logprobs:
            choice["logprobs"] = {"content": []}
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": list(self.request.ids), "token_ids": []}
        async with aclosing(self.chunks(thread)) as chunks:
            async for part in (chunk["choices"][0] async for chunk in chunks if chunk["choices"]):
                _add_delta(message, calls, part["delta"])
                choice["finish_reason"] = part["finish_reason"]
                if "logprobs" in part:
                    choice["logprobs"]["content"] += part["logprobs"]["content"]
                if "token_ids" in part:
                    choice["token_ids"] += part["token_ids"]
        if complete := [call for index, call in enumerate(calls) if self.writer.is_complete(index)]:
            message["tool_calls"] = complete
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": self.usage}


def _delta_fields(delta: Delta) -> dict[str, Any]:
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.text, "arguments": ""}
    return {"tool_calls": [{"index": delta.index, "id": new_id("call_"), "type": "function", "function": function}]}


def _add_delta(message: dict[str, Any], calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if key in delta:
            message[key] = message.get(key, "") + delta[key]
    for piece in delta.get("tool_calls", ()):
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def _describe(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelling = tokenizer.decode_bytes([token])
    return {"token": spelling.decode(errors="replace"), "logprob": logprob, "bytes": list(spelling)}


def new_writer(tokenizer: Tokenizer, body: ChatBody) -> ChatWriter:
    return ChatWriter(tokenizer, body.stops, thinking=body.thinking.type == "enabled")


def build_chat(service: Service, body: ChatBody) -> Chat:
    """Raises DataError, RequestError, UnknownModelError."""
    service.check_model(body.model)
    ids = encode_chat(service.tokenizer, [message.as_sent() for message in body.messages], _options(body)).ids
    watch = new_writer(service.tokenizer, body)  # of the engine's own: it sees each token before we do

    def is_over(token: int) -> bool:
        watch.push(token)
        return watch.is_stopped

    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = EngineRequest(
        ids,
        service.sampling(body),
        max_tokens=service.max_tokens(asked, len(ids)),
        stop_ids=service.chat_stops,
        banned_ids=service.chat_banned,
        num_top=body.top_logprobs if body.logprobs else 0,
        deadline_s=service.config.answer_timeout_s,
        should_stop=is_over if body.stops else None,
    )
    return Chat(service.tokenizer, body, request, head(service, "chatcmpl-", "chat.completion.chunk"))


def _options(body: ChatBody) -> ChatOptions:
    choice = body.tool_choice
    return ChatOptions(
        tools=[tool.as_sent() for tool in body.tools],
        effort=body.reasoning_effort,
        thinking=body.thinking.type == "enabled",
        tool_choice=choice.model_dump() if isinstance(choice, ToolChoice) else choice,
        response_format=None if body.response_format is None else body.response_format.model_dump(exclude_none=True),
    )


@router.post("/v1/chat/completions", response_model=None)
async def complete_chat(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody)
    chat = await asyncio.to_thread(build_chat, service, body)
    if body.stream:
        return await start_stream(request, chat.chunks(service.thread))
    return ASCIIResponse(await unless_gone(request, chat.whole(service.thread)))
