"""Machines to test on: every backend that works here, each module with a service of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moonlet.sandbox.api import Caps, Limits, Sandbox, SandboxSpec
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.manager import Manager, ServiceConfig
from tests.sandbox.namespace_life import make_rootfs

_Result = TypeVar("_Result")


def require(backend: str) -> Caps:
    """What a backend can do here. Skips the test where it does not work, unless the run demands it."""
    probe = asyncio.run(make_backend(backend).probe())
    if probe.caps is not None:
        return probe.caps
    if backend in os.environ.get("MOONLET_REQUIRE_BACKENDS", "").split(","):
        pytest.fail(f"the backend {backend} is required and does not work: {probe.reason}")
    pytest.skip(f"{backend}: {probe.reason}")


@pytest.fixture(scope="session")
def require_backend() -> Callable[[str], Caps]:
    return require


@dataclass
class Bench:
    """A service with one backend, and the loop that it lives in."""

    backend: str
    caps: Caps
    state_dir: Path
    runner: asyncio.Runner
    manager: Manager
    url: str | None = None
    boxes: dict[str, Sandbox] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.runner.run(work)

    async def create(self, **options: Any) -> Sandbox:
        """A sandbox of this backend; `options` are fields of SandboxSpec."""
        spec = SandboxSpec(**{"ttl_s": 600.0, "limits": Limits(memory_bytes=256 << 20), **options})
        if self.url is not None:
            from moonlet.sandbox.remote import RemoteSandbox
            from moonlet.sandbox.server.auth import load_api_key

            return await RemoteSandbox.create(spec, url=self.url, api_key=load_api_key(self.state_dir))
        from moonlet.sandbox.local import LocalSandbox

        return LocalSandbox(self.manager, (await self.manager.create(spec)).id)

    def shared(self) -> Sandbox:
        """One for all tests of a module that leave it as it was."""
        if "shared" not in self.boxes:
            self.boxes["shared"] = self.run(self.create())
        return self.boxes["shared"]


@contextlib.contextmanager
def open_bench(backend: str, state_dir: Path) -> Iterator[Bench]:
    """`remote` is our own server over the backend namespace."""
    below = "namespace" if backend == "remote" else backend
    caps = require(below)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            config = ServiceConfig(state_dir, backend=below, scoring_slack_s=0.0)
            manager = runner.run(stack.enter_async_context(Manager(config, backends={below: make_backend(below)})))
            url = runner.run(stack.enter_async_context(_served(manager))) if backend == "remote" else None
            bench = Bench(backend, caps, state_dir, runner, manager, url)
            yield bench
            runner.run(_destroy_all(manager))
        finally:
            runner.run(stack.aclose())


async def _destroy_all(manager: Manager) -> None:
    for sandbox_id in manager.ids():
        await manager.destroy(sandbox_id)


@contextlib.asynccontextmanager
async def _served(manager: Manager) -> AsyncIterator[str]:
    from moonlet.sandbox.server.app import serve_manager
    from moonlet.sandbox.server.config import ServerConfig

    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(
        serve_manager(manager, ServerConfig(port=0), stop, lambda at, *_: url.set_result(at))
    )
    await asyncio.wait([serving, url], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield url.result() if url.done() else serving.result()
    finally:
        stop.set()
        await serving


BACKENDS = [
    "namespace",
    pytest.param("gvisor", marks=pytest.mark.slow),
    pytest.param("microvm", marks=pytest.mark.slow),
    "remote",
]


@pytest.fixture(scope="module", params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The contract holds for each of them."""
    with open_bench(request.param, tmp_path_factory.mktemp("state") / "s") as opened:
        yield opened


@pytest.fixture
def label(require_backend: Callable[[str], Caps]) -> Iterator[str]:
    """Of machines of the backend namespace, one that nobody else has; nothing of it may be left at the end."""
    require_backend("namespace")
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert asyncio.run(make_backend("namespace").sweep(name, set())) == []


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small system."""
    return make_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
