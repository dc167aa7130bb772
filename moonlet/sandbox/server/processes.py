"""`/process.Process/*`: commands of a sandbox. They go on when the client that started them is gone."""

from __future__ import annotations

import base64
import signal
from asyncio import timeout
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from moonlet.errors import GuestFileError, MoonletError
from moonlet.sandbox.api import ProcessInfo
from moonlet.sandbox.guest.client import Guest, GuestProcess
from moonlet.sandbox.guest.transcript import Launch, new_command_id
from moonlet.sandbox.local import LocalProcess
from moonlet.sandbox.server.connect import (
    STREAM_TYPE,
    ConnectError,
    StreamResponse,
    check_codec,
    read_messages,
    read_request,
    read_unary,
    timeout_s,
)
from moonlet.sandbox.server.filesystem import guest_path
from moonlet.sandbox.server.follow import events, polls
from moonlet.sandbox.server.service import service_of
from moonlet.sandbox.server.traffic import followed, guest_of, note, sandbox_id_of, sandbox_of

router = APIRouter(prefix="/process.Process")

START_PATIENCE_S = 30.0
INPUT_PATIENCE_S = 60.0
PTY_PREFIX = "pty-"  # of ids of commands that have a terminal, so that it is known after a restart too
_SIGNALS = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}


def _limit(request: Request) -> int:
    return service_of(request).config.bounds.message_bytes


@router.post("/Start", response_model=None)
async def start(request: Request) -> Response:
    """Runs a command and streams what it writes. `Connect-Timeout-Ms` is the command's own limit: its tree is killed."""
    body, limit_s = await read_request(request, _limit(request)), timeout_s(request)

    async def messages() -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(_follow(request, await _launch(request, body, limit_s), (0, 0))) as source:
            async for message in source:
                yield message

    return StreamResponse(messages())


async def _launch(request: Request, body: dict[str, Any], limit_s: float | None) -> GuestProcess:
    manager, sandbox_id = service_of(request).manager, sandbox_id_of(request)
    config, pty = _object(body, "process"), _size(body) if body.get("pty") else None
    launch = Launch(
        argv=(_text(config, "cmd"), *_texts(config, "args")),
        env={**manager.env(sandbox_id), **_variables(config, service_of(request).config.bounds.env_entries)},
        cwd=guest_path(config["cwd"]) if config.get("cwd") else None,
        stdin=bool(body.get("stdin", False)) or pty is not None,
        timeout_s=limit_s,
        output_bytes=(await manager.info(sandbox_id)).limits.output_bytes,
        tag=str(body.get("tag") or ""),
        pty=pty,
        command_id=(PTY_PREFIX if pty else "") + new_command_id(),
    )
    with service_of(request).metrics.timed("exec_start"):
        async with guest_of(request) as guest:
            process = await _start_with_shell(guest, launch)
    note(request, "exec", pid=process.pid, command=" ".join(launch.argv))
    return process


async def _start_with_shell(guest: Guest, launch: Launch) -> GuestProcess:
    """E2B's clients run everything through /bin/bash; an image that lacks it gets its plain shell."""
    try:
        reply = await guest.stream.request("start", **launch.request()).wait(START_PATIENCE_S)
    except GuestFileError as error:
        if error.code != "ENOENT" or launch.argv[0] != "/bin/bash":
            raise
        try:
            return await _start_with_shell(guest, replace(launch, argv=("/bin/sh", *launch.argv[1:])))
        except GuestFileError:
            raise error from None
    return GuestProcess(guest, launch.command_id, reply.number("pid"))


async def _follow(request: Request, process: GuestProcess, offsets: tuple[int, int]) -> AsyncGenerator[dict[str, Any]]:
    service, sandbox_id = service_of(request), sandbox_id_of(request)
    yield {"event": {"start": {"pid": process.pid, "moonlet": {"command_id": process.command_id}}}}
    looks = polls(sandbox_of(request), process.command_id, offsets)
    source = followed(request, events(looks, process.command_id.startswith(PTY_PREFIX)))
    async with service.followers.following(service.manager, sandbox_id, process.command_id), aclosing(source):
        async for event in source:
            yield {"event": event if event is not None else {"keepalive": {}}}


@router.post("/Connect", response_model=None)
async def connect(request: Request) -> Response:
    """The output of a command from its first byte on, and its end, which a command keeps until somebody has seen it."""
    body, limit_s = await read_request(request, _limit(request)), timeout_s(request)

    async def messages() -> AsyncGenerator[dict[str, Any]]:
        async with guest_of(request) as guest:
            process = await _selected(guest, body, is_ended_fine=True)
        async with aclosing(_follow(request, process, _offsets(body))) as source:
            async for message in source:
                yield message

    return StreamResponse(messages(), limit_s)


@router.post("/List", response_model=None)
async def list_processes(request: Request) -> Response:
    await read_unary(request, _limit(request))
    async with guest_of(request) as guest:
        processes = [each for each in await guest.processes() if each.is_running]
    return JSONResponse({"processes": [_process_body(each) for each in processes]})


def _process_body(info: ProcessInfo) -> dict[str, Any]:
    config = {"cmd": info.argv[0] if info.argv else "", "args": list(info.argv[1:]), "envs": {}}
    body = {"pid": info.pid, "config": config, "moonlet": {"command_id": info.command_id}}
    return body | ({"tag": info.tag} if info.tag else {})


@router.post("/SendInput", response_model=None)
async def send_input(request: Request) -> Response:
    body = await read_unary(request, _limit(request))
    await _write(request, body, _input(body), timeout_s(request), close=body.get("moonlet") == "close")
    return JSONResponse({})


@router.post("/CloseStdin", response_model=None)
async def close_stdin(request: Request) -> Response:
    await _write(request, await read_unary(request, _limit(request)), b"", timeout_s(request), close=True)
    return JSONResponse({})


@router.post("/StreamInput", response_model=None)
async def stream_input(request: Request) -> Response:
    """Input as a stream of messages: first which process, then data; each is handed on before the next is read."""
    check_codec(request, STREAM_TYPE)
    selector: dict[str, Any] | None = None
    try:
        async with timeout(timeout_s(request)):
            async for message in read_messages(request, _limit(request)):
                if "start" in message:
                    selector = _object(message, "start")
                elif "data" in message:
                    if selector is None:
                        raise ConnectError("invalid_argument", "data came before the message that names the process")
                    await _write(request, selector, _input(_object(message, "data")), None)
        failure = None if selector else ConnectError("invalid_argument", "no message named the process")
    except TimeoutError:
        failure = ConnectError("deadline_exceeded", "the command did not read its input in time")
    except (ConnectError, MoonletError) as error:
        failure = error

    async def answer() -> AsyncIterator[dict[str, Any]]:
        if failure is not None:
            raise failure
        yield {}

    return StreamResponse(answer())


async def _write(
    request: Request, selector: dict[str, Any], data: bytes, limit_s: float | None, close: bool = False
) -> None:
    """Returns when the command has read nearly all. No lock is held meanwhile, so that the sandbox can be paused."""
    try:
        async with timeout(limit_s or INPUT_PATIENCE_S), AsyncExitStack() as stack:
            guest = await stack.enter_async_context(guest_of(request))
            found = await _selected(guest, selector)
            await stack.aclose()
            await LocalProcess(sandbox_of(request), found.command_id, found.pid).write_stdin(data, close=close)
    except TimeoutError:
        raise ConnectError("deadline_exceeded", "the command did not read its input in time") from None


@router.post("/SendSignal", response_model=None)
async def send_signal(request: Request) -> Response:
    """SIGKILL goes to every descendant, so that nothing of the command is left."""
    body = await read_unary(request, _limit(request))
    number = body.get("signal")
    number = _SIGNALS.get(number, number) if isinstance(number, str) else number
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 64:
        raise ConnectError("invalid_argument", "signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
    async with guest_of(request) as guest:
        process = await _selected(guest, body)
        if number == signal.SIGKILL:
            await process.kill()
        else:
            await process.signal(number)
    note(request, "signal", pid=process.pid, signal=int(number))
    return JSONResponse({})


@router.post("/Update", response_model=None)
async def update(request: Request) -> Response:
    body = await read_unary(request, _limit(request))
    rows, columns = _size(body)
    async with guest_of(request) as guest:
        await (await _selected(guest, body)).resize(rows, columns)
    return JSONResponse({})


# -- fields of messages -----------------------------------------------------------------------------------------------
async def _selected(guest: Guest, body: dict[str, Any], *, is_ended_fine: bool = False) -> GuestProcess:
    """The process that a selector names by guest pid or by tag: the newest that runs, else the newest."""
    selector = _object(body, "process")
    pid, tag, command_id = selector.get("pid"), selector.get("tag"), selector.get("moonlet")
    is_pid = isinstance(pid, int) and not isinstance(pid, bool)
    if isinstance(command_id, str):  # clients of ours name the very command, also when its number is another's by now
        found = [each for each in await guest.processes() if each.command_id == command_id]
        is_ended_fine = True
    elif is_pid or (isinstance(tag, str) and tag):
        found = [each for each in await guest.processes() if (each.pid == pid if is_pid else each.tag == tag)]
    else:
        raise ConnectError("invalid_argument", "process must be {'pid': number} or {'tag': text}")
    found.sort(key=lambda each: each.is_running)
    if not found or not (found[-1].is_running or is_ended_fine):
        raise ConnectError("not_found", f"there is no running process {pid if is_pid else tag}")
    return GuestProcess(guest, found[-1].command_id, found[-1].pid)


def _offsets(body: dict[str, Any]) -> tuple[int, int]:
    """Where a client of ours goes on reading after its stream broke."""
    given = body.get("moonlet") or {}
    offsets = (given.get("stdout", 0), given.get("stderr", 0)) if isinstance(given, dict) else (-1, -1)
    if not all(isinstance(value, int) and 0 <= value <= 1 << 40 for value in offsets):
        raise ConnectError("invalid_argument", "offsets must be numbers from 0 on")
    return offsets


def _variables(config: dict[str, Any], limit: int) -> dict[str, str]:
    env = config.get("envs") or {}
    if not isinstance(env, dict) or len(env) > limit:
        raise ConnectError("invalid_argument", f"envs must be an object of at most {limit} strings")
    if not all(isinstance(value, str) and "\0" not in name + value and "=" not in name for name, value in env.items()):
        raise ConnectError("invalid_argument", "envs must hold strings without NUL, their names without '='")
    return env


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise ConnectError("invalid_argument", f"'{name}' must be an object")
    return value


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConnectError("invalid_argument", f"'{name}' must be text without NUL that is not empty")
    return value


def _texts(body: dict[str, Any], name: str) -> list[str]:
    values = body.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) and "\0" not in value for value in values):
        raise ConnectError("invalid_argument", f"'{name}' must be a list of texts without NUL")
    return values


def _size(body: dict[str, Any]) -> tuple[int, int]:
    size = _object(_object(body, "pty"), "size")
    rows, columns = size.get("rows", 24), size.get("cols", 80)
    if not all(isinstance(value, int) and 1 <= value <= 10_000 for value in (rows, columns)):
        raise ConnectError("invalid_argument", "pty.size needs rows and cols from 1 to 10000")
    return rows, columns


def _input(body: dict[str, Any]) -> bytes:
    """What to write to standard input or the terminal, base64 in JSON."""
    fields = _object(body, "input")
    text = fields.get("stdin", fields.get("pty"))
    if not isinstance(text, str):
        raise ConnectError("invalid_argument", "input must be {'stdin': base64} or {'pty': base64}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ConnectError("invalid_argument", "input is not valid base64") from None
