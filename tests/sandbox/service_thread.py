"""The sandbox service in a thread of its own, over a backend without isolation, as a client sees it: a URL and a key."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI
from sandbox.scripted_backend import ScriptedBackend

from moonlet.sandbox.backend import Backend
from moonlet.sandbox.envelope import END, EnvelopeReader, envelope
from moonlet.sandbox.manager import Manager
from moonlet.sandbox.server.app import serve_manager
from moonlet.sandbox.server.auth import load_api_key
from moonlet.sandbox.server.config import ServerConfig
from moonlet.sandbox.settings import ServiceConfig


class ServiceThread:
    """`with ServiceThread(folder) as service:`; `pauses` says whether the end pauses what runs, else it is destroyed."""

    def __init__(self, state_dir: Path, backend: Backend | None = None, port: int = 0, **options: Any) -> None:
        self.state_dir = state_dir
        self.backend = backend or ScriptedBackend()
        self.url = ""
        self.pauses = False
        server = {name: options.pop(name) for name in list(options) if name in ServerConfig.__dataclass_fields__}
        self._config = ServiceConfig(state_dir, **options)
        self._server_config = ServerConfig(port=port, **server)
        self._started: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="service")

    async def _main(self) -> None:
        try:
            self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
            async with Manager(self._config, backends={self.backend.name: self.backend}) as self.manager:
                await serve_manager(self.manager, self._server_config, self.stop, self._note)
                if not self.pauses:
                    infos = await self.manager.list()
                    await asyncio.gather(*(self.manager.destroy(info.id) for info in infos), return_exceptions=True)
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _note(self, url: str, app: FastAPI) -> None:
        self.app = app
        self._started.set_result(url)

    def open_streams(self) -> int:
        """Streams that the service holds open now."""
        return sum(self.app.state.service.streams.values())

    def __enter__(self) -> ServiceThread:
        self._thread.start()
        self.url = self._started.result(60)
        self.api_key = load_api_key(self.state_dir)
        self.client = httpx.Client(base_url=self.url, headers={"X-API-Key": self.api_key}, timeout=60)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(60)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the service's loop, where its manager belongs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def raw(self, data: bytes) -> tuple[int, bytes]:
        """Status and the rest of the answer to bytes that no HTTP client would send; 0 if there is none."""
        port = urlsplit(self.url).port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # refused before all was sent
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        return (int(answer.split(None, 2)[1]), answer) if answer else (0, b"")

    def create(self, **body: Any) -> SandboxClient:
        answer = self.client.post("/sandboxes", json={"templateID": "base", "timeout": 300} | body)
        assert answer.status_code == 201, answer.text
        return SandboxClient(self, answer.json())


class SandboxClient:
    """A sandbox as plain HTTP requests."""

    def __init__(self, service: ServiceThread, body: dict[str, Any]) -> None:
        self.id, self.token, self.body = body["sandboxID"], body["envdAccessToken"], body
        self.path = f"/sandboxes/{self.id}"
        headers = {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}
        self.http = httpx.Client(base_url=service.url, headers=headers, timeout=60)

    def rpc(self, name: str, message: dict[str, Any]) -> httpx.Response:
        return self.http.post(f"/{name}", json=message)

    def stream(self, name: str, message: dict[str, Any], **headers: str) -> Messages:
        """A call whose answer is a stream; use it with `with`."""
        headers = {"Content-Type": "application/connect+json"} | {
            key.replace("_", "-"): headers[key] for key in headers
        }
        return Messages(self.http.stream("POST", f"/{name}", headers=headers, content=envelope(message)))

    def run(self, command: str, **options: Any) -> list[dict[str, Any]]:
        """All events of a shell command; the last is its end, or `{"error": ...}`."""
        config = {"cmd": "/bin/sh", "args": ["-c", command]} | options.pop("process", {})
        headers = options.pop("headers", {})
        with self.stream("process.Process/Start", {"process": config} | options, **headers) as messages:
            return [message.get("event", message) for message in messages]


class Messages:
    """Iterates over the messages of a stream; the error at its end, if any, comes last as `{"error": ...}`."""

    def __init__(self, response: AbstractContextManager[httpx.Response]) -> None:
        self._opening = response

    def __enter__(self) -> Messages:
        self.response = self._opening.__enter__()
        self._messages = self._read()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opening.__exit__(*exc)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._messages)

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self.response.status_code == 200, self.response.read()
        reader = EnvelopeReader(1 << 24)
        for chunk in self.response.iter_raw():
            for flags, message in reader.feed(chunk):
                if message or not flags & END:
                    yield message


def output_of(events: list[dict[str, Any]], name: str = "stdout") -> bytes:
    pieces = (event["data"][name] for event in events if name in event.get("data", {}))
    return b"".join(base64.b64decode(piece) for piece in pieces)


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    """Look again until it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
