"""The control API of E2B: create, list, pause, connect, fork, snapshot, kill. Both path styles, `/sandboxes` and `/v2/…`."""

from __future__ import annotations

import base64
import binascii
import time
from typing import Any
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from moonlet.errors import SandboxError, SandboxNotFoundError, SandboxStateError, TemplateError
from moonlet.sandbox.api import Limits, SandboxInfo, State
from moonlet.sandbox.server import schema
from moonlet.sandbox.server.answers import ApiError, describe_error
from moonlet.sandbox.server.auth import is_sandbox_id
from moonlet.sandbox.server.service import Service, peer_of, read_model, service_of, unless_gone
from moonlet.sandbox.template.store import TemplateInfo

router = APIRouter()


def _both(path: str, methods: list[str]):
    """Register a route under `path` and under `/v2` + `path`."""

    def register(handler):
        for prefix in ("", "/v2"):
            router.add_api_route(prefix + path, handler, methods=methods, response_model=None)
        return handler

    return register


def _known_id(sandbox_id: str) -> str:
    if not is_sandbox_id(sandbox_id):
        raise SandboxNotFoundError(f"there is no sandbox '{sandbox_id[:64]}'")
    return sandbox_id


def _note(request: Request, action: str, sandbox_id: str, **fields: object) -> None:
    service_of(request).audit.write(action, sandbox=sandbox_id, peer=peer_of(request), **fields)


def _body(service: Service, info: SandboxInfo) -> dict[str, Any]:
    return schema.sandbox_body(info, service.keys.token(info.id), service.config.domain)


@_both("/sandboxes", ["POST"])
async def create(request: Request) -> Response:
    service = service_of(request)
    body = await read_model(request, schema.NewSandbox)
    spec = schema.spec_of(body, service.config, service.manager.config.default_ttl_s)
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise ApiError(400, "Idempotency-Key must have 1 to 255 characters")
    with service.metrics.timed("create"):
        creating = service.manager.create(spec, idempotency_key=key)
        info = await (unless_gone(request, creating) if key is None else creating)
    _note(
        request, "create", info.id, template=spec.template, backend=info.backend, allow_hosts=",".join(spec.allow_hosts)
    )
    return JSONResponse(_body(service, info), 201)


@_both("/sandboxes", ["GET"])
async def list_sandboxes(request: Request) -> Response:
    service, query = service_of(request), request.query_params
    words = [word for text in query.getlist("state") for word in text.split(",")] or ["running", "paused"]
    metadata = {unquote(key): unquote(value) for key, value in parse_qsl(query.get("metadata", ""))}
    infos = [
        info
        for info in await service.manager.list(metadata=metadata or None)
        if schema.state_word(info) in words and query.get("template", info.template) == info.template
    ]
    infos.sort(key=lambda info: (info.created_at, info.id), reverse=query.get("order") != "asc")
    page, headers = _page(infos, lambda info: info.id, request)
    return JSONResponse([schema.detail_body(info) for info in page], headers=headers)


def _page(items: list[Any], id_of, request: Request) -> tuple[list[Any], dict[str, str]]:
    """One page of `items` and the header that leads to the next; a token names the last item of the page before."""
    query, limit = request.query_params, service_of(request).config.bounds.page
    text = query.get("limit", str(limit))
    if not (text.isdecimal() and len(text) < 9 and int(text) > 0):
        raise ApiError(400, "limit must be a positive number")
    start = 0
    if token := query.get("nextToken"):
        try:
            last = base64.urlsafe_b64decode(token).decode()
        except (ValueError, binascii.Error):
            raise ApiError(400, "nextToken was not made by this service") from None
        start = next((index + 1 for index, item in enumerate(items) if id_of(item) == last), len(items))
    page = items[start : start + min(int(text), limit)]
    if not page or start + len(page) >= len(items):
        return page, {}
    return page, {"X-Next-Token": base64.urlsafe_b64encode(id_of(page[-1]).encode()).decode()}


@_both("/sandboxes/metrics", ["GET"])
async def list_metrics(request: Request) -> Response:
    ids = [part for text in request.query_params.getlist("sandbox_ids") for part in text.split(",") if part]
    samples = {}
    for sandbox_id in ids[: service_of(request).config.bounds.page]:
        try:
            samples[sandbox_id] = await _sample(request, _known_id(sandbox_id))
        except SandboxError:
            continue  # a sandbox that is gone or paused has no figures
    return JSONResponse({"sandboxes": samples})


@_both("/sandboxes/{sandbox_id}", ["GET"])
async def get_sandbox(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    info = await service.manager.info(_known_id(sandbox_id))
    if info.state is State.FAILED:
        body = {
            "sandboxID": info.id,
            "code": 410,
            "message": f"sandbox {info.id} died ({info.reason}); delete it",
            "error_code": "died",
        }
        return JSONResponse(body | {"reason": info.reason, "moonlet": schema.extension(info)}, 410)
    return JSONResponse(schema.detail_body(info) | {"envdAccessToken": service.keys.token(info.id)})


@_both("/sandboxes/{sandbox_id}", ["DELETE"])
async def kill(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    await service.manager.info(_known_id(sandbox_id))  # 404 for what is not there; destroy itself is idempotent
    with service.metrics.timed("kill"):
        await service.manager.destroy(sandbox_id)
    _note(request, "kill", sandbox_id)
    return Response(status_code=204)


@_both("/sandboxes/{sandbox_id}/pause", ["POST"])
async def pause(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    info = await service.manager.info(_known_id(sandbox_id))
    if info.state is State.PAUSED:
        raise SandboxStateError(f"sandbox {sandbox_id} is already paused")
    with service.metrics.timed("pause"):
        await service.manager.pause(sandbox_id)
    _note(request, "pause", sandbox_id)
    return Response(status_code=204)


@_both("/sandboxes/{sandbox_id}/connect", ["POST"])
async def connect(request: Request, sandbox_id: str) -> Response:
    """Answers 201 if the sandbox had to be resumed. The time to live of a running one only grows."""
    body = await read_model(request, schema.Connect)
    if body.memory is False:
        raise ApiError(400, "this service cannot boot a sandbox again from its files; resume it with its memory")
    return await _resume(request, _known_id(sandbox_id), body.timeout)


@_both("/sandboxes/{sandbox_id}/resume", ["POST"])
async def resume(request: Request, sandbox_id: str) -> Response:
    body = await read_model(request, schema.Connect)
    return await _resume(request, _known_id(sandbox_id), body.timeout, always_created=True)


async def _resume(request: Request, sandbox_id: str, ttl_s: float | None, always_created: bool = False) -> Response:
    service = service_of(request)
    info = await service.manager.info(sandbox_id)
    was_running = info.state is State.RUNNING
    if was_running:
        await _extend(service, info, ttl_s)
        info = await service.manager.info(sandbox_id)
    else:
        with service.metrics.timed("resume"):
            info = await service.manager.resume(sandbox_id, ttl_s=ttl_s)
        _note(request, "resume", sandbox_id)
    return JSONResponse(_body(service, info), 200 if was_running and not always_created else 201)


async def _extend(service: Service, info: SandboxInfo, ttl_s: float | None) -> None:
    if ttl_s is not None and info.expires_at is not None and time.time() + ttl_s > info.expires_at:
        await service.manager.set_timeout(info.id, ttl_s)


@_both("/sandboxes/{sandbox_id}/timeout", ["POST"])
async def set_timeout(request: Request, sandbox_id: str) -> Response:
    body = await read_model(request, schema.Timeout)
    await service_of(request).manager.set_timeout(_known_id(sandbox_id), body.timeout)
    _note(request, "timeout", sandbox_id, seconds=body.timeout)
    return Response(status_code=204)


@_both("/sandboxes/{sandbox_id}/refreshes", ["POST"])
async def refresh(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    body = await read_model(request, schema.Refresh)
    info = await service.manager.info(_known_id(sandbox_id))
    duration = service.manager.config.default_ttl_s if body.duration is None else body.duration
    await _extend(service, info, duration)
    return Response(status_code=204)


@_both("/sandboxes/{sandbox_id}/fork", ["POST"])
async def fork(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    body = await read_model(request, schema.Fork)
    if body.count > service.config.bounds.fork_count:
        raise ApiError(400, f"at most {service.config.bounds.fork_count} forks at once")
    with service.metrics.timed("fork"):
        children = await unless_gone(request, service.manager.fork(_known_id(sandbox_id), body.count))
    answers: list[dict[str, Any]] = []
    for child in children:
        if isinstance(child, Exception):
            answers.append({"error": describe_error(child)[0]})
            continue
        if body.timeout is not None:
            await service.manager.set_timeout(child.id, body.timeout)
        _note(request, "fork", child.id, source=sandbox_id)
        answers.append({"sandbox": _body(service, child)})
    return JSONResponse(answers, 201)


@_both("/sandboxes/{sandbox_id}/snapshots", ["POST"])
async def create_snapshot(request: Request, sandbox_id: str) -> Response:
    service = service_of(request)
    body = await read_model(request, schema.NewSnapshot)
    info = await service.manager.info(_known_id(sandbox_id))
    if body.memory is False and info.caps.fork_processes:
        raise ApiError(400, f"snapshots of '{info.backend}' hold the memory too; leave out 'memory'")
    with service.metrics.timed("snapshot"):
        snapshot_id = await service.manager.snapshot(sandbox_id, name=body.name)
    _note(request, "snapshot", sandbox_id, snapshot=snapshot_id)
    return JSONResponse({"snapshotID": snapshot_id, "names": [body.name] if body.name else []}, 201)


@_both("/sandboxes/{sandbox_id}/network", ["PUT"])
async def set_network(request: Request, sandbox_id: str) -> Response:
    body = await read_model(request, schema.Network)
    info = await service_of(request).manager.info(_known_id(sandbox_id))
    if set(schema.allow_hosts(body)) != set(info.allow_hosts):
        raise ApiError(501, "the hosts that a sandbox may reach are chosen when it is created")
    return Response(status_code=204)


@_both("/sandboxes/{sandbox_id}/metrics", ["GET"])
async def get_metrics(request: Request, sandbox_id: str) -> Response:
    return JSONResponse([await _sample(request, _known_id(sandbox_id))])


async def _sample(request: Request, sandbox_id: str) -> dict[str, Any]:
    """What the sandbox uses now; the service keeps no history."""
    manager, now = service_of(request).manager, time.time()
    info = await manager.info(sandbox_id)
    usage = await manager.usage(sandbox_id)
    return {
        "timestamp": schema.rfc3339(now),
        "timestampUnix": int(now),
        "cpuCount": max(1, round(info.limits.cpus)),
        "cpuUsedPct": 0.0,
        "memUsed": usage.memory_bytes,
        "memTotal": info.limits.memory_bytes,
        "memCache": 0,
        "diskUsed": usage.disk_bytes,
        "diskTotal": info.limits.disk_bytes,
        "moonlet": {"processes": usage.processes},
    }


@router.get("/sandboxes/{sandbox_id}/logs", response_model=None)
async def get_logs(request: Request, sandbox_id: str) -> Response:
    entries = await _log_entries(request, sandbox_id)
    lines = [{"timestamp": entry["timestamp"], "line": entry["message"]} for entry in entries]
    return JSONResponse({"logs": lines, "logEntries": entries})


@router.get("/v2/sandboxes/{sandbox_id}/logs", response_model=None)
async def get_logs_v2(request: Request, sandbox_id: str) -> Response:
    return JSONResponse({"logs": await _log_entries(request, sandbox_id)})


async def _log_entries(request: Request, sandbox_id: str) -> list[dict[str, Any]]:
    manager = service_of(request).manager
    info = await manager.info(_known_id(sandbox_id))
    text = (await manager.logs(sandbox_id)).decode(errors="replace")
    stamp = schema.rfc3339(info.created_at)  # the machine's console carries no times of its own
    return [{"timestamp": stamp, "level": "info", "message": line, "fields": {}} for line in text.splitlines()[-1000:]]


@router.get("/snapshots", response_model=None)
async def list_snapshots(request: Request) -> Response:
    query = request.query_params
    snapshots = [
        snapshot
        for snapshot in await service_of(request).manager.snapshots()
        if query.get("sandboxID", snapshot.sandbox_id) == snapshot.sandbox_id
        and query.get("name", snapshot.name) == snapshot.name
    ]
    page, headers = _page(snapshots, lambda snapshot: snapshot.id, request)
    bodies = [{"snapshotID": each.id, "names": [each.name] if each.name else []} for each in page]
    return JSONResponse(bodies, headers=headers)


@router.get("/templates", response_model=None)
async def list_templates(request: Request) -> Response:
    templates = await service_of(request).manager.templates.list()
    return JSONResponse([_template_body(template) for template in templates])


def _template_body(template: TemplateInfo) -> dict[str, Any]:
    """Sizes of machines are chosen per sandbox, so those of a template are only what a sandbox gets by default."""
    limits = Limits()
    return {
        "templateID": template.id,
        "names": list(template.names),
        "aliases": list(template.names),
        "buildID": template.id,
        "buildStatus": "ready",
        "buildCount": 1,
        "cpuCount": 1,
        "memoryMB": limits.memory_bytes >> 20,
        "diskSizeMB": limits.disk_bytes >> 20,
        "envdVersion": schema.ENVD_VERSION,
        "public": False,
        "createdAt": schema.rfc3339(template.created_at),
        "updatedAt": schema.rfc3339(template.created_at),
        "createdBy": None,
        "lastSpawnedAt": schema.rfc3339(template.used_at),
        "spawnCount": 0,
        "moonlet": {"source": template.source, "num_bytes": template.num_bytes},
    }


@router.delete("/templates/{template_id:path}", response_model=None)
async def delete_template(request: Request, template_id: str) -> Response:
    """Deletes a snapshot too: to E2B a snapshot is a template."""
    manager = service_of(request).manager
    try:
        await manager.delete_snapshot(template_id)
    except SandboxNotFoundError:
        try:
            await manager.templates.remove(template_id)
        except TemplateError as error:
            raise ApiError(404, str(error)) from None
    _note(request, "delete_template", "", template=template_id)
    return Response(status_code=204)


@router.post("/v3/templates", response_model=None)
@router.post("/v2/templates/{rest:path}", response_model=None)
@router.post("/templates", response_model=None)
async def refuse_build(request: Request) -> Response:
    raise ApiError(501, "this service builds no templates for clients; build them on its host")
