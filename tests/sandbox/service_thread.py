"""The sandbox service in a thread of its own, over a backend without isolation, as a client sees it: a URL and a key."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
from scripted_backend import ScriptedBackend

from moonlet.sandbox.backend import Backend
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
                await serve_manager(self.manager, self._server_config, self.stop, self._started.set_result)
                if not self.pauses:
                    infos = await self.manager.list()
                    await asyncio.gather(*(self.manager.destroy(info.id) for info in infos), return_exceptions=True)
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

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
