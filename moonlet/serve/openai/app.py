"""The API as an ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from moonlet.errors import MoonletError
from moonlet.serve.engine_thread import EngineThread
from moonlet.serve.openai import chat, completions, rl
from moonlet.serve.openai.answers import ASCIIResponse, answer_error, error_body
from moonlet.serve.openai.gate import Gate
from moonlet.serve.openai.metrics import EngineMetrics
from moonlet.serve.openai.service import ServeConfig, Service, UnknownModelError
from moonlet.text.tokenizer import Tokenizer


def build_app(thread: EngineThread, tokenizer: Tokenizer, config: ServeConfig) -> FastAPI:
    """The application over a running engine thread, which the caller starts and stops."""
    app = FastAPI(title="Moonlet", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = Service(thread, tokenizer, config)
    app.state.metrics = EngineMetrics(thread)
    for path, answer in (
        ("/health", _health),
        ("/metrics", _metrics),
        ("/v1/models", _models),
        ("/v1/models/{name:path}", _model),
    ):
        app.add_api_route(path, answer, methods=["GET"], response_model=None)
    for module in (chat, completions, rl):
        app.include_router(module.router)
    for kind in (MoonletError, ValidationError, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    for status in (404, 405):
        app.add_exception_handler(status, _answer_unknown)
    app.add_middleware(Gate, config=config)
    return app


async def _health(request: Request) -> Response:
    service: Service = request.app.state.service
    engine = service.thread.engine
    return ASCIIResponse({"status": "ok", "paused": service.thread.is_paused, "version": engine.weights_version})


async def _metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")


async def _models(request: Request) -> Response:
    return ASCIIResponse({"object": "list", "data": [_describe(request.app.state.service)]})


async def _model(request: Request, name: str) -> Response:
    service: Service = request.app.state.service
    if name != service.config.model_name:
        raise UnknownModelError(f"there is no model '{name}' here; this server has '{service.config.model_name}'")
    return ASCIIResponse(_describe(service))


def _describe(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "moonlet",
        "max_model_len": service.thread.engine.max_context,
    }


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return ASCIIResponse(
        error_body("invalid_request_error", f"there is no {request.method} {request.url.path[:200]}"), status
    )
