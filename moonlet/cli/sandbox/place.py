"""Where the sandboxes are that a command is about: in a service, or in a state directory that no service holds.

Machines live on when the command ends, in either case; only nobody watches their time to live without a service.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moonlet.errors import ConfigError, SandboxDiedError, SandboxNotFoundError, SandboxStateError, nearest_name
from moonlet.sandbox.api import Sandbox, SandboxInfo, SandboxSpec

LOCK_PATIENCE_S = 10.0
URL_VARIABLE, KEY_VARIABLE = "MOONLET_SANDBOX_URL", "MOONLET_SANDBOX_API_KEY"


class Place(ABC):
    """A set of sandboxes that can be listed."""

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    @abstractmethod
    async def attach(self, sandbox_id: str) -> Sandbox:
        """An existing one, resumed if it is paused."""

    @abstractmethod
    async def get(self, sandbox_id: str) -> Sandbox:
        """An existing one as it is."""

    @abstractmethod
    async def list(self) -> list[SandboxInfo]: ...

    @abstractmethod
    async def logs(self, sandbox_id: str) -> bytes: ...

    @abstractmethod
    async def snapshots(self) -> list[tuple[str, str]]:
        """(id, name) of each."""

    @abstractmethod
    async def delete_snapshot(self, name: str) -> None: ...


@asynccontextmanager
async def open_place(url: str | None, state_dir: Path | None) -> AsyncIterator[Place]:
    """The service at `url` or $MOONLET_SANDBOX_URL; else that of the state directory; else the directory itself."""
    from moonlet.sandbox.settings import default_state_dir
    from moonlet.sandbox.state_dir import find_service

    folder = state_dir or default_state_dir()
    url = url or (None if state_dir else os.environ.get(URL_VARIABLE))
    key = os.environ.get(KEY_VARIABLE, "")
    if url is None:
        url = find_service(folder)
        if url is not None:
            from moonlet.sandbox.server.auth import load_api_key

            key = load_api_key(folder)
    elif not key:
        raise ConfigError(
            f"the service {url} wants an API key: set {KEY_VARIABLE} (the service keeps it in api_key of its state directory)"
        )
    if url is None:
        async with _open_manager(folder) as manager:
            yield LocalPlace(manager)
        return
    place = ServicePlace(url, key)
    try:
        yield place
    finally:
        await place.close()


@asynccontextmanager
async def _open_manager(folder: Path) -> AsyncIterator[Any]:
    """A manager for one command; it waits for its turn if another command has the directory."""
    from moonlet.sandbox.manager import Manager, ServiceConfig

    manager = Manager(ServiceConfig(folder))
    patience = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            await manager.__aenter__()
            break
        except SandboxStateError as error:
            if time.monotonic() > patience:
                raise SandboxStateError(
                    f"{error}. For several commands at once start `moonlet sandbox serve --state-dir {folder}`"
                ) from None
            await asyncio.sleep(0.1)
    try:
        yield manager
    finally:
        await manager.close(pause_running=False)


class LocalPlace(Place):
    """The sandboxes of a manager in this process."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return self._sandbox((await self.manager.create(spec)).id)

    async def attach(self, sandbox_id: str) -> Sandbox:
        await self.manager.resume(sandbox_id)
        return self._sandbox(sandbox_id)

    async def get(self, sandbox_id: str) -> Sandbox:
        await self.manager.info(sandbox_id)
        return self._sandbox(sandbox_id)

    def _sandbox(self, sandbox_id: str) -> Sandbox:
        from moonlet.sandbox.local import LocalSandbox

        return LocalSandbox(self.manager, sandbox_id)

    async def list(self) -> list[SandboxInfo]:
        return await self.manager.list()

    async def logs(self, sandbox_id: str) -> bytes:
        return await self.manager.logs(sandbox_id)

    async def snapshots(self) -> list[tuple[str, str]]:
        return [(snapshot.id, snapshot.name) for snapshot in await self.manager.snapshots()]

    async def delete_snapshot(self, name: str) -> None:
        await self.manager.delete_snapshot(name)


class ServicePlace(Place):
    """The sandboxes of a service with the API of E2B."""

    def __init__(self, url: str, api_key: str) -> None:
        from moonlet.sandbox.remote_service import RemoteService

        self._service = RemoteService(url, api_key)
        self._address = {"url": url, "api_key": api_key}
        self._opened: list[Any] = []

    async def close(self) -> None:
        for sandbox in self._opened:
            await sandbox.aclose()
        await self._service.aclose()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        from moonlet.sandbox.remote import RemoteSandbox

        return self._keep(await RemoteSandbox.create(spec, **self._address))

    async def attach(self, sandbox_id: str) -> Sandbox:
        from moonlet.sandbox.remote import RemoteSandbox

        return self._keep(await RemoteSandbox.attach(_checked(sandbox_id), **self._address))

    async def get(self, sandbox_id: str) -> Sandbox:
        from moonlet.sandbox.remote import RemoteSandbox

        try:
            found = await self._service.sandboxes("GET", f"/{_checked(sandbox_id)}")
        except SandboxNotFoundError as error:
            raise SandboxNotFoundError(
                f"{error}{nearest_name(sandbox_id, [box.id for box in await self.list()])}"
            ) from None
        except SandboxDiedError:
            found = {"sandboxID": sandbox_id}  # it can be destroyed all the same
        return self._keep(RemoteSandbox(self._service.share(), found, None))

    def _keep(self, sandbox: Any) -> Sandbox:
        self._opened.append(sandbox)
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        from moonlet.sandbox.remote_bodies import info_from_detail

        return [
            info_from_detail(body)
            async for body in self._service.pages(
                "/v2/sandboxes", {"state": "running,paused,failed,killing", "order": "asc"}
            )
        ]

    async def logs(self, sandbox_id: str) -> bytes:
        answer = await self._service.sandboxes("GET", f"/{_checked(sandbox_id)}/logs")
        lines = answer.get("logs") or []
        return "".join(f"{line.get('message', line.get('line', ''))}\n" for line in lines).encode()

    async def snapshots(self) -> list[tuple[str, str]]:
        return [
            (str(body["snapshotID"]), ", ".join(body.get("names") or ()))
            async for body in self._service.pages("/snapshots", {})
        ]

    async def delete_snapshot(self, name: str) -> None:
        await self._service.request("DELETE", f"/templates/{quote(name, safe='')}")


def _checked(sandbox_id: str) -> str:
    """An id that can be part of a path."""
    if not sandbox_id or not all(character.isalnum() or character in "-_" for character in sandbox_id):
        raise SandboxNotFoundError(f"{sandbox_id!r} is no id of a sandbox: `moonlet sandbox ls` shows them")
    return sandbox_id
