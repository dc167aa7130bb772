"""What reinforcement learning needs beside OpenAI's API: tokens in and out with versions, pauses, other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moonlet.errors import RequestError
from moonlet.model.hf import load_released
from moonlet.serve.engine import Collector
from moonlet.serve.openai.answers import ASCIIResponse, events_of, read_body, unless_gone
from moonlet.serve.openai.schema import GenerateBody, UpdateWeightsBody
from moonlet.serve.openai.service import Service
from moonlet.serve.sequence import Completion
from moonlet.serve.sequence import Request as EngineRequest

router = APIRouter()


@router.post("/v1/generate", response_model=None)
async def generate(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, GenerateBody)
    asked = EngineRequest(
        body.ids,
        service.sampling(body),
        max_tokens=body.max_tokens,
        stop_ids=frozenset(body.stop_ids),
        banned_ids=_banned(service, body.banned_ids),
        num_top=body.num_top,
        deadline_s=min(body.deadline_s or service.config.answer_timeout_s, service.config.answer_timeout_s),
        priority=body.priority,
    )
    done = await unless_gone(request, _collect(service, asked))
    return ASCIIResponse(
        {
            "ids": done.ids,
            "logprobs": done.logprobs,
            "versions": done.versions,
            "finish": done.finish,
            "num_cached": done.num_cached,
            "top_logprobs": [[list(pair) for pair in top] for top in done.tops] if body.num_top else None,
        }
    )


def _banned(service: Service, ids: list[int]) -> frozenset[int]:
    """The asked ones, and the model's ids that the tokenizer has no spelling for."""
    strange = [token for token in ids if not 0 <= token < service.vocab_size]
    if strange:
        raise RequestError(f"banned_ids names token {strange[0]}; the vocabulary has {service.vocab_size}")
    return frozenset(ids) | frozenset(range(service.tokenizer.vocab_size, service.vocab_size))


async def _collect(service: Service, asked: EngineRequest) -> Completion:
    collector = Collector()
    async for event in events_of(service.thread, asked):
        collector(event)
    return collector.completion()


@router.post("/pause", response_model=None)
async def pause(request: Request) -> Response:
    """No token is drawn from now on; requests are taken in and wait."""
    await asyncio.to_thread(request.app.state.service.thread.pause)
    return ASCIIResponse({"paused": True})


@router.post("/resume", response_model=None)
async def resume(request: Request) -> Response:
    await asyncio.to_thread(request.app.state.service.thread.resume)
    return ASCIIResponse({"paused": False})


@router.post("/update_weights", response_model=None)
async def update_weights(request: Request) -> Response:
    """Weights from a file or an exported folder that this server can read; nothing changes where they do not fit."""
    service: Service = request.app.state.service
    body = await read_body(request, UpdateWeightsBody)
    weights = await asyncio.to_thread(_load_weights, Path(body.path))
    job = service.thread.call(lambda engine: engine.update_weights(weights, body.version, keep_states=body.keep_states))
    await asyncio.wrap_future(job)
    return ASCIIResponse({"version": body.version})


def _load_weights(path: Path) -> dict[str, Tensor]:
    """A safetensors file by the model's own names, or a folder in the released layout. Raises MoonletError."""
    if path.is_dir():
        return load_released(path, text_only=True)[0].state_dict()
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"cannot read weights from '{path}': {error}") from None
