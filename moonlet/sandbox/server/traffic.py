"""Requests to one sandbox: which it is, whether the caller may, and streams that live as long as both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from fastapi import Request

from moonlet.errors import SandboxNotFoundError
from moonlet.sandbox.api import State
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.server.connect import ConnectError
from moonlet.sandbox.server.service import Service, peer_of, service_of

Item = TypeVar("Item")


def sandbox_id_of(request: Request) -> str:
    """Set by the dispatcher, which has checked the caller's token for it."""
    return request.scope["moonlet.sandbox_id"]


def guest_of(request: Request) -> AbstractAsyncContextManager[Guest]:
    """The sandbox's agent for calls that end soon: a pause waits for the end of the block."""
    return service_of(request).manager.guest(sandbox_id_of(request))


def sandbox_of(request: Request) -> LocalSandbox:
    """The sandbox for calls that a pause may cut: they wait for the resume and go on."""
    return LocalSandbox(service_of(request).manager, sandbox_id_of(request))


def note(request: Request, action: str, **fields: Any) -> None:
    service_of(request).audit.write(action, sandbox=sandbox_id_of(request), peer=peer_of(request), **fields)


def keepalive_s(request: Request) -> float:
    """How often an idle stream says that it lives: what the client asks for, within reason."""
    text = request.headers.get("keepalive-ping-interval", "")
    default = service_of(request).config.keepalive_s
    return min(max(float(text), 1.0), 600.0) if text.isdecimal() and len(text) < 6 else default


async def followed(request: Request, source: AsyncIterator[Item]) -> AsyncGenerator[Item | None]:
    """The items of `source`, None for every pause of a keepalive interval; ends with an error when the service stops."""
    service = service_of(request)
    _admit(service, sandbox_id_of(request))
    interval_s, closing = keepalive_s(request), asyncio.ensure_future(service.closing.wait())
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(source))
            done, _ = await asyncio.wait({pending, closing}, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
            if pending in done:
                finished, pending = pending, None
                try:
                    item = finished.result()
                except StopAsyncIteration:
                    return
                except SandboxNotFoundError as error:
                    raise _gone(service, sandbox_id_of(request), error) from error
                yield item
            elif closing in done:
                raise ConnectError("unavailable", "the service is stopping; the command goes on, connect to it again")
            else:
                yield None
    finally:
        _release(service, sandbox_id_of(request))
        waiting: list[asyncio.Task[Any]] = [task for task in (pending, closing) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def _gone(service: Service, sandbox_id: str, error: Exception) -> Exception:
    """The error of a stream whose sandbox was destroyed; clients of E2B look for these words."""
    manager = service.manager
    if sandbox_id in manager.ids() and manager.peek(sandbox_id).state is not State.KILLING:
        return error
    return ConnectError("unavailable", f"The sandbox was not found: {error}")


async def _next(source: AsyncIterator[Item]) -> Item:
    return await anext(source)


def _admit(service: Service, sandbox_id: str) -> None:
    if service.streams[sandbox_id] >= service.config.bounds.streams:
        raise ConnectError("resource_exhausted", f"at most {service.config.bounds.streams} streams per sandbox")
    service.streams[sandbox_id] += 1
    service.metrics.streams.inc()


def _release(service: Service, sandbox_id: str) -> None:
    service.metrics.streams.dec()
    service.streams[sandbox_id] -= 1
    if service.streams[sandbox_id] <= 0:
        del service.streams[sandbox_id]
