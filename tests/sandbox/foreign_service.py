"""A service with the API of E2B that is not ours: only the old paths, no extensions, codes as Go has them, and bad days."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from moonlet.sandbox.envelope import END, EnvelopeReader, envelope


class ForeignService:
    """One sandbox, `fx1`. `troubles` are answers (status, headers) given before the right ones."""

    def __init__(self) -> None:
        self.url = ""
        self.state = "running"
        self.requests: list[tuple[str, str, Any]] = []
        self.troubles: list[tuple[int, dict[str, str]]] = []
        self.files: dict[str, bytes] = {}
        self.has_fork = True
        self.app = FastAPI()
        self.app.add_middleware(_Recorder, service=self)
        for method, path, handler in (
            ("POST", "/sandboxes", self._create),
            ("GET", "/sandboxes/{name}", self._detail),
            ("DELETE", "/sandboxes/{name}", self._delete),
            ("POST", "/sandboxes/{name}/pause", self._pause),
            ("POST", "/sandboxes/{name}/connect", self._connect),
            ("POST", "/sandboxes/{name}/timeout", self._nothing),
            ("POST", "/sandboxes/{name}/fork", self._fork),
            ("POST", "/sandboxes/{name}/snapshots", self._snapshot),
            ("POST", "/process.Process/Start", self._start),
            ("POST", "/filesystem.Filesystem/Stat", self._stat),
            ("POST", "/filesystem.Filesystem/Remove", self._remove),
            ("GET", "/files", self._read),
            ("POST", "/files", self._write),
        ):
            self.app.add_api_route(path, handler, methods=[method], response_model=None)

    def paths(self) -> Counter[str]:
        return Counter(f"{method} {path}" for method, path, _ in self.requests)

    # -- control ------------------------------------------------------------------------------------------------------
    def _body(self) -> dict[str, Any]:
        return {
            "sandboxID": "fx1",
            "templateID": "t1",
            "clientID": "c",
            "envdVersion": "0.5.0",
            "envdAccessToken": "tok",
        }

    async def _create(self) -> Response:
        return JSONResponse(self._body(), 201)

    async def _detail(self, name: str) -> Response:
        if name != "fx1":
            return JSONResponse({"code": 404, "message": "nope"}, 404)
        times = {"startedAt": "2026-01-01T00:00:00.5Z", "endAt": "2026-01-01T00:05:00Z"}
        sizes = {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024}
        return JSONResponse(
            self._body() | times | sizes | {"state": self.state, "alias": "base", "metadata": {"a": "b"}}
        )

    async def _delete(self, name: str) -> Response:
        return Response(status_code=204 if name == "fx1" else 404)

    async def _pause(self, name: str) -> Response:
        if self.state == "paused":
            return JSONResponse({"code": 409, "message": "already paused"}, 409)
        self.state = "paused"
        return Response(status_code=204)

    async def _connect(self, name: str, request: Request) -> Response:
        if "timeout" not in await request.json():
            return JSONResponse({"code": 400, "message": "timeout is required"}, 400)
        self.state = "running"
        return JSONResponse(self._body(), 201)

    async def _nothing(self, name: str) -> Response:
        return Response(status_code=204)

    async def _fork(self, name: str) -> Response:
        return JSONResponse([{"sandbox": self._body()}, {"error": {"code": 500, "message": "no room"}}], 201)

    async def _snapshot(self, name: str) -> Response:
        return JSONResponse({"snapshotID": "snap1", "names": []}, 201)

    # -- in the sandbox -----------------------------------------------------------------------------------------------
    async def _start(self, request: Request) -> Response:
        (message,) = [message for _, message in EnvelopeReader(1 << 20).feed(await request.body())]
        command = message["process"]["args"][-1]

        async def events():
            yield envelope({"event": {"start": {"pid": 7}}})
            if command == "break":
                return
            yield envelope({"event": {"data": {"stdout": base64.b64encode(command.encode()).decode()}}})
            if command == "slow":
                yield envelope({"error": {"code": "deadline_exceeded", "message": "too slow"}}, END)
                return
            end = {"exited": True, "status": "exit status 0"}  # protobuf leaves out an exit code of 0
            if command == "killed":
                end = {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}
            yield envelope({"event": {"end": end}})
            yield envelope({}, END)

        return StreamingResponse(events(), media_type="application/connect+json")

    async def _stat(self, request: Request) -> Response:
        if self.state != "running":
            return JSONResponse({"sandboxId": "fx1", "message": "The sandbox was not found", "code": 502}, 502)
        path = (await request.json())["path"]
        if path not in self.files:
            return JSONResponse({"code": "not_found", "message": f"{path}: no such file"}, 404)
        entry = {"name": path, "type": "FILE_TYPE_FILE", "path": f"/guest/{path}", "size": "3", "owner": "user"}
        return JSONResponse({"entry": entry})

    async def _remove(self, request: Request) -> Response:
        return JSONResponse({})

    async def _read(self, path: str) -> Response:
        if path not in self.files:
            return JSONResponse({"code": 404, "message": f"{path}: no such file"}, 404)
        return Response(self.files[path])

    async def _write(self, path: str, request: Request) -> Response:
        form = await request.form()  # too old for octet streams
        self.files[path] = await form["file"].read()  # type: ignore[union-attr]
        return JSONResponse([{"name": path, "type": "file", "path": path}])


class _Recorder:
    """Notes requests, and answers with the next trouble if there is one."""

    def __init__(self, app: Any, service: ForeignService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self._service.requests.append((scope["method"], scope["path"], headers))
        if self._service.troubles:
            status, more = self._service.troubles.pop(0)
            await JSONResponse({"code": status, "message": "trouble"}, status, more)(scope, receive, send)
            return
        await self._app(scope, receive, send)


@contextlib.contextmanager
def running(service: ForeignService) -> Iterator[ForeignService]:
    server = uvicorn.Server(uvicorn.Config(service.app, port=0, log_level="error", lifespan="off"))
    started = threading.Event()

    async def serve() -> None:
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        service.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join(30)
