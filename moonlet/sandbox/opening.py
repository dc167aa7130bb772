"""`Sandbox.create` and `Sandbox.attach`: where a sandbox lives that somebody just asks for.

With a url, in the service there. Else in the service of this user's state directory if one runs. Else in this process: one
manager per event loop over a private folder, whose sandboxes end with the loop. What a process leaves that is killed, the
next one removes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moonlet.errors import ConfigError, SandboxNotFoundError, SandboxStateError, nearest_name
from moonlet.sandbox.api import Sandbox, SandboxSpec
from moonlet.sandbox.backend import Backend
from moonlet.sandbox.generations import in_thread, remove_tree
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager, ServiceConfig
from moonlet.sandbox.settings import default_state_dir
from moonlet.sandbox.state_dir import Owner, find_service, label_of

_PLACES = ("url", "api_key", "state_dir")
_CLEANUP_S = 60.0

log = logging.getLogger(__name__)


class Opening:
    """A sandbox to be: `await` it, or enter it with `async with`, which destroys it at the end."""

    def __init__(self, make: Callable[[], Awaitable[Sandbox]]) -> None:
        self._make = make
        self._sandbox: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._make().__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._make()
        return self._sandbox

    async def __aexit__(self, *exc: object) -> None:
        assert self._sandbox is not None
        await self._sandbox.destroy()


def open_sandbox(spec: SandboxSpec | None = None, **options: Any) -> Opening:
    """See `Sandbox.create`. `state_dir` names the directory whose service is to be used. Raises ConfigError at once."""
    known = [field.name for field in fields(SandboxSpec)]
    place = _take_place(options, known)
    spec = replace(spec or SandboxSpec(), **options)

    async def make() -> Sandbox:
        service = _service(place)
        if service is not None:
            from moonlet.sandbox.remote import RemoteSandbox

            return await RemoteSandbox.create(spec, **service)
        manager = await embedded_manager()
        return LocalSandbox(manager, (await manager.create(spec)).id)

    return Opening(make)


def attach_sandbox(sandbox_id: str, **options: Any) -> Opening:
    """See `Sandbox.attach`. Raises ConfigError at once."""
    place = _take_place(options, [])

    async def make() -> Sandbox:
        embedded = _embedded.get(asyncio.get_running_loop())
        if not place and embedded is not None:
            manager = await embedded.manager()
            if sandbox_id in manager.ids():
                await manager.resume(sandbox_id)
                return LocalSandbox(manager, sandbox_id)
        service = _service(place)
        if service is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id!r} in this process and no service runs for {default_state_dir()}: give the "
                "url of its service, or start one with `moonlet sandbox serve`"
            )
        from moonlet.sandbox.remote import RemoteSandbox

        return await RemoteSandbox.attach(sandbox_id, **service)

    return Opening(make)


def _take_place(options: dict[str, Any], others: list[str]) -> dict[str, Any]:
    """Takes what says where out of the options."""
    for name in options:
        if name not in _PLACES and name not in others:
            raise ConfigError(f"a sandbox has no option '{name}'{nearest_name(name, [*_PLACES, *others])}")
    return {name: options.pop(name) for name in _PLACES if options.get(name) is not None}


def _service(place: Mapping[str, Any]) -> dict[str, str] | None:
    """Address and key of the service to use, None for this process."""
    if "url" in place:
        return {"url": place["url"], "api_key": place.get("api_key", "")}
    folder = Path(place.get("state_dir") or default_state_dir())
    url = find_service(folder)
    if url is not None:
        from moonlet.sandbox.server.auth import load_api_key

        return {"url": url, "api_key": place.get("api_key") or load_api_key(folder)}
    if "state_dir" in place:
        raise SandboxStateError(
            f"no service runs for {folder}: start it with `moonlet sandbox serve --state-dir {folder}`"
        )
    return None


# -- in this process --------------------------------------------------------------------------------------------------
class _Embedded:
    """The manager of one event loop, kept by a task whose cancellation, at the end of the loop, destroys everything."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.folder = _private_folder()
        self._opened: asyncio.Future[Manager] = loop.create_future()
        self._keeper = loop.create_task(self._keep(), name="keeper of sandboxes")

    async def manager(self) -> Manager:
        return await asyncio.shield(self._opened)

    async def _keep(self) -> None:
        manager = _new_manager(self.folder)
        try:
            await reap_dead_processes(self.folder.parent)
            await manager.__aenter__()
        except BaseException as error:
            await self._let_go()
            reason = error if isinstance(error, Exception) else SandboxStateError("the event loop has ended")
            self._opened.set_exception(reason)
            self._opened.exception()  # seen, also if nobody waits for it
            return
        self._opened.set_result(manager)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # nothing else: a loop that is only dropped cannot wait for anything any more
            await _destroy_all(manager)
            await manager.close()
            await self._let_go()
            raise

    async def _let_go(self) -> None:
        _embedded.pop(asyncio.get_running_loop(), None)
        await in_thread(remove_tree, self.folder)

    async def close(self) -> None:
        """Destroy all and go."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])


_embedded: dict[asyncio.AbstractEventLoop, _Embedded] = {}


async def embedded_manager() -> Manager:
    """The manager of this event loop, opened at the first call."""
    loop = asyncio.get_running_loop()
    if loop not in _embedded:
        if not _embedded:
            atexit.register(_clean_up)
        _embedded[loop] = _Embedded(loop)
    return await _embedded[loop].manager()


async def close_embedded() -> None:
    """Destroy the sandboxes that live in this event loop. The end of `asyncio.run` does the same."""
    embedded = _embedded.get(asyncio.get_running_loop())
    if embedded is not None:
        await embedded.close()


def _new_manager(folder: Path) -> Manager:
    from moonlet.sandbox.manager import template_store

    config = ServiceConfig(folder)
    return Manager(config, templates=template_store(default_state_dir() / "templates", config.template_cache_bytes))


async def _destroy_all(manager: Manager) -> None:
    async def destroy(sandbox_id: str) -> None:
        try:
            await manager.destroy(sandbox_id)
        except SandboxNotFoundError:
            return
        except Exception as error:
            log.error("sandbox %s could not be destroyed: %s", sandbox_id, error)

    await asyncio.gather(*(destroy(sandbox_id) for sandbox_id in manager.ids()))


def _clean_up() -> None:
    """At the exit of a process whose loops were not ended: threads and loops do not work any more, a new process does."""
    leftover = [str(embedded.folder) for embedded in _embedded.values() if embedded.folder.exists()]
    _embedded.clear()
    if leftover:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([sys.executable, "-m", "moonlet.sandbox.opening", *leftover], timeout=_CLEANUP_S)


# -- private folders --------------------------------------------------------------------------------------------------
def _private_folder() -> Path:
    """A folder that bears the identity of this process; short, since sockets below it have short names only."""
    me = Owner.me()
    base = default_state_dir() / "run"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{me.pid}.{me.start}.", dir=base))
    except OSError:
        base = Path(tempfile.gettempdir()) / f"moonlet-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise
        return Path(tempfile.mkdtemp(prefix=f"{me.pid}.{me.start}.", dir=base))


async def reap_dead_processes(base: Path) -> list[Path]:
    """End and remove what processes left that are gone; returns their folders."""
    reaped = []
    for folder in sorted(base.iterdir()):
        named = re.fullmatch(r"(\d+)\.(\d+)\..*", folder.name)
        if named is None or Owner(int(named[1]), int(named[2])).is_alive:
            continue
        with contextlib.suppress(OSError), open(folder / "service.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two that start at once do not both do it
            log.info("sandboxes of process %s, which is gone, are ended", named[1])
            await reap_folder(folder)
            reaped.append(folder)
    return reaped


async def reap_folder(folder: Path, backends: Mapping[str, Backend] | None = None) -> None:
    """End all machines of a private folder and remove it."""
    if backends is None:
        from moonlet.sandbox.choose import all_backends

        backends = all_backends()
    for backend in backends.values():
        try:
            await backend.sweep(label_of(folder), set())
        except Exception as error:
            log.error("backend %s could not look for leftovers of %s: %s", backend.name, folder, error)
    await in_thread(remove_tree, folder)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        asyncio.run(reap_folder(Path(name)))
