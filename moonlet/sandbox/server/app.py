"""The service as an ASGI application, and as a process that listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from moonlet.errors import (
    GuestFileError,
    MoonletError,
    SandboxDiedError,
    SandboxNotFoundError,
    SandboxStateError,
    StorageError,
)
from moonlet.sandbox.api import SandboxInfo, State
from moonlet.sandbox.envelope import EnvelopeError
from moonlet.sandbox.network import Denied
from moonlet.sandbox.server import control, envd, filesystem, processes
from moonlet.sandbox.server.answers import ApiError, error_body
from moonlet.sandbox.server.audit import AuditLog
from moonlet.sandbox.server.auth import Keys, find_target
from moonlet.sandbox.server.config import ENVD_PORT, ServerConfig
from moonlet.sandbox.server.connect import STATUS, as_connect_error, describe
from moonlet.sandbox.server.metrics import Metrics
from moonlet.sandbox.server.schema import AUTO_RESUME
from moonlet.sandbox.server.service import Service, error_response, unauthorized
from moonlet.sandbox.server.watchers import Watchers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

RESUME_PATIENCE_S = 60.0

log = logging.getLogger(__name__)


def build_app(manager: Any, config: ServerConfig) -> FastAPI:
    """The application over an open manager; its `state.service` is set `closing` by whoever stops it."""
    state_dir = manager.config.state_dir
    service = Service(
        manager=manager,
        config=config,
        keys=Keys(state_dir),
        audit=AuditLog(state_dir / "audit.jsonl", config.audit_bytes, config.audit_files),
        metrics=Metrics(lambda: manager.num_reaped),
        watchers=Watchers(config.bounds.watchers, config.bounds.watcher_events),
    )
    manager.on_denied(lambda sandbox_id, denied: _note_denied(service, sandbox_id, denied))
    app = _new_app(service)
    app.add_api_route("/health", _health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", _prometheus, methods=["GET"], response_model=None)
    app.include_router(control.router)
    app.add_exception_handler(MoonletError, _answer_error)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    app.add_middleware(Dispatcher, service=service, traffic=_traffic_app(service))
    return app


def _note_denied(service: Service, sandbox_id: str, denied: Denied) -> None:
    service.audit.write("denied", sandbox=sandbox_id, host=denied.host, port=denied.port, reason=denied.reason)


def _new_app(service: Service) -> FastAPI:
    app = FastAPI(title="Moonlet sandboxes", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for status in (404, 405):
        app.add_exception_handler(status, _answer_unknown)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    return app


def _traffic_app(service: Service) -> FastAPI:
    app = _new_app(service)
    for module in (envd, processes, filesystem):
        app.include_router(module.router)
    for kind in (MoonletError, EnvelopeError, Exception):
        app.add_exception_handler(kind, _answer_connect_error)
    app.add_exception_handler(envd.RangeError, _answer_range)
    return app


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _prometheus(request: Request) -> Response:
    service: Service = request.app.state.service
    service.metrics.lost_audit_lines.set(service.audit.num_lost)
    infos = await service.manager.list(states=set(State))
    return Response(service.metrics.text(infos), media_type="text/plain; version=0.0.4")


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return JSONResponse(error_body(status, f"there is no {request.method} {request.url.path[:200]}"), status)


async def _answer_connect_error(request: Request, error: Exception) -> Response:
    if isinstance(error, SandboxDiedError | SandboxStateError):
        return _not_running(request.scope["moonlet.sandbox_id"], error)
    problem = as_connect_error(error)
    status = STATUS.get(problem.code, 500)
    if request.url.path == "/files":
        status = 507 if isinstance(error, GuestFileError) and error.code in ("ENOSPC", "EDQUOT") else status
        return JSONResponse(error_body(status, str(problem), _word(error)), status)
    return JSONResponse(describe(problem) | _detail(error), status)


async def _answer_range(request: Request, error: Exception) -> Response:
    assert isinstance(error, envd.RangeError)
    return JSONResponse(error_body(416, str(error)), 416, {"Content-Range": f"bytes */{error.size}"})


def _word(error: Exception) -> str:
    return error.code if isinstance(error, GuestFileError) else ""


def _detail(error: Exception) -> dict[str, str]:
    return {"errno": error.code} if isinstance(error, GuestFileError) else {}


def _not_running(sandbox_id: str, error: Exception) -> Response:
    """What E2B's proxy answers for a sandbox that does not run; its clients look for "was not found"."""
    body = {"sandboxId": sandbox_id, "message": f"The sandbox was not found: {error}", "code": 502}
    match error:
        case SandboxDiedError():
            body |= {"error_code": "died", "reason": str(error.reason)}
        case SandboxStateError():
            body |= {"error_code": "state"}
        case _:
            body |= {"error_code": "not_found"}
    return JSONResponse(body, 502)


class Dispatcher:
    """In front of everything: checks who asks, and sends requests for a sandbox to the application that answers for it."""

    def __init__(self, app: Any, service: Service, traffic: FastAPI) -> None:
        self._control, self._traffic, self._service = app, traffic, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        headers = Headers(scope=scope)
        target = find_target(headers, self._service.config.domain)
        answer: Response | None
        if target is None and scope["path"] == "/files":
            target = await self._find_signed(scope)
        if target is not None:
            answer = await self._admit(scope, headers, *target)
        elif scope["path"] == "/health" or self._service.keys.accepts(headers):
            answer = None
        else:
            answer = unauthorized("send the service's API key as X-API-Key")
        if answer is not None:
            self._service.metrics.refused.labels(str(answer.status_code)).inc()
            await answer(scope, receive, send)
            return
        app = self._control if target is None else self._traffic
        await app(scope, receive, send)

    async def _admit(self, scope: Scope, headers: Headers, sandbox_id: str, port: int) -> Response | None:
        """The refusal of a request to a sandbox, None to let it through."""
        if not sandbox_id:
            return JSONResponse(error_body(400, "E2b-Sandbox-Id or E2b-Sandbox-Port is malformed"), 400)
        if not (self._service.keys.accepts_token(sandbox_id, headers) or self._is_signed(scope, sandbox_id)):
            return unauthorized("send the sandbox's access token as X-Access-Token")
        manager = self._service.manager
        try:
            info = await manager.info(sandbox_id)
            if port != ENVD_PORT:
                message = f"the port is not open: {port} of sandbox {sandbox_id} cannot be reached from outside"
                return JSONResponse({"sandboxId": sandbox_id, "message": message, "code": 502}, 502)
            if info.state is State.FAILED:
                raise SandboxDiedError(f"sandbox {sandbox_id} died ({info.reason}); delete it", str(info.reason))
            if info.state is not State.RUNNING:
                await self._await_running(info)
        except (SandboxNotFoundError, SandboxStateError, SandboxDiedError) as error:
            return _not_running(sandbox_id, error)
        manager.touch(sandbox_id)
        scope["moonlet.sandbox_id"] = sandbox_id
        return None

    async def _await_running(self, info: SandboxInfo) -> None:
        """A sandbox on its way back is waited for; one that pauses or is paused is not, unless it was made so."""
        if info.state in (State.PAUSED, State.PAUSING) and AUTO_RESUME in info.metadata:
            await self._service.manager.resume(info.id)
        elif info.state in (State.PAUSED, State.PAUSING, State.KILLING):
            raise SandboxStateError(f"sandbox {info.id} is {info.state}; connect to it to resume it")
        try:
            async with asyncio.timeout(RESUME_PATIENCE_S):
                await self._service.manager.running(info.id)
        except TimeoutError:
            raise SandboxStateError(f"sandbox {info.id} did not run again in time") from None

    def _is_signed(self, scope: Scope, sandbox_id: str) -> bool:
        operation = {"GET": "read", "POST": "write"}.get(scope["method"])
        query = envd.query_of(Request(scope))
        is_file = scope["path"] == "/files" and operation is not None and "signature" in query
        return is_file and self._service.keys.accepts_signature(sandbox_id, operation or "", query)

    async def _find_signed(self, scope: Scope) -> tuple[str, int] | None:
        """The sandbox whose token signed this file URL: such a URL names none where there is no host name per sandbox."""
        if b"signature=" not in scope["query_string"]:
            return None
        infos = await self._service.manager.list()
        sandbox_id = next((info.id for info in infos if self._is_signed(scope, info.id)), None)
        return (sandbox_id, ENVD_PORT) if sandbox_id else None


# -- as a process -----------------------------------------------------------------------------------------------------
Started = Callable[[str, FastAPI], None]


async def serve(config: ServerConfig, started: Started | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then pause what runs. `started` is told the URL once it is listened on.

    Raises StorageError if the address cannot be had, SandboxStateError if another service has the state directory.
    """
    from moonlet.sandbox.manager import Manager

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    async with Manager(config.service) as manager:
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            await serve_manager(manager, config, stop, started)
            await manager.close(pause_running=True)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def serve_manager(
    manager: Any, config: ServerConfig, stop: asyncio.Event, started: Started | None = None
) -> None:
    """Serve over a manager that somebody else opened and closes, until `stop` is set."""
    app = build_app(manager, config)
    service: Service = app.state.service
    server, listener = _server(app, config), _listen(config.host, config.port)
    note = manager.config.state_dir / "service.json"
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    stopping = asyncio.ensure_future(_stop_when(stop, service, server))
    try:
        _write_note(note, url)
        if started is not None:
            started(url, app)
        await server.serve(sockets=[listener])
    finally:
        stopping.cancel()
        note.unlink(missing_ok=True)
        service.closing.set()
        await service.watchers.close()
        service.audit.close()
        listener.close()


def _server(app: FastAPI, config: ServerConfig) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again, which ends the process before anything is paused."""

        def capture_signals(self):  # type: ignore[override]
            return contextlib.nullcontext()

    settings = uvicorn.Config(
        app,
        lifespan="off",
        http="h11",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # else a client chooses the address under which it is audited
        server_header=False,
        timeout_graceful_shutdown=max(1, round(config.grace_s)),
        timeout_keep_alive=60,
    )
    return Server(settings)


async def _stop_when(stop: asyncio.Event, service: Service, server: Any) -> None:
    await stop.wait()
    service.closing.set()
    server.should_exit = True


_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, asyncio turns off Nagle's algorithm; else each answer waits 40 ms for the client's ACK.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _KEEPALIVE:  # connections inherit it: a client whose machine is gone is noticed
            listener.setsockopt(level, option, value)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise StorageError(
            f"cannot listen on {host}:{port} ({error}): choose another with --host and --port"
        ) from error
    return listener


def _write_note(path: Path, url: str) -> None:
    """Where other processes of this user find the service."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"url": url, "pid": os.getpid()}, file)
    temporary.replace(path)
