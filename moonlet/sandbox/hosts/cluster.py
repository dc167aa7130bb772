"""Several hosts as one place for sandboxes.

A host's actor is restarted by Ray when its process dies, and takes up the machines that live in its state directory. It
outlives the program that started it, so that the times to live of a dead program's sandboxes are still watched; a program
that opens a cluster of the same name joins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moonlet.errors import (
    BackendUnavailableError,
    ConfigError,
    MissingDependencyError,
    SandboxDiedError,
    SandboxError,
    SandboxLimitError,
    SandboxNotFoundError,
    TemplateError,
)
from moonlet.sandbox.api import SandboxInfo, SandboxSpec
from moonlet.sandbox.hosts.actor import SandboxHost
from moonlet.sandbox.hosts.hosted import Host, HostedSandbox
from moonlet.sandbox.settings import ServiceConfig

_LOAD_AGE_S = 1.0  # the load of a host is asked for at most so often
_OPEN_TIMEOUT_S = 120.0
_CALLS_AT_ONCE = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostConfig:
    """A host: where its actor runs (a Ray node id, anywhere if None) and the settings of its manager."""

    name: str
    service: ServiceConfig
    node_id: str | None = None


@dataclass(frozen=True)
class HostLoad:
    """How busy a host is. `pid` is its actor's process."""

    pid: int
    running: int
    max_running: int
    total: int
    max_total: int

    @property
    def free(self) -> int:
        return min(self.max_running - self.running, self.max_total - self.total)


@dataclass
class _Known:
    host: Host
    load: HostLoad | None = None
    asked_at: float = float("-inf")
    num_coming: int = 0  # creates under way, which its load does not show yet

    def count_one(self) -> None:
        """A create is done, which the load shows only when it is asked for again."""
        if self.load is not None:
            self.load = replace(self.load, running=self.load.running + 1, total=self.load.total + 1)


class Cluster:
    """`async with Cluster(hosts) as cluster: sandbox = await cluster.create(spec)`; Ray must be initialised.

    Leaving the block pauses what runs and ends the actors. Raises MissingDependencyError without the extra `ray`.
    """

    def __init__(self, hosts: Sequence[HostConfig], name: str = "sandboxes") -> None:
        if len({host.name for host in hosts}) != len(hosts) or not hosts:
            raise ConfigError("a cluster needs hosts, each with a name of its own")
        self.name = name
        self._configs = list(hosts)
        self._hosts: dict[str, _Known] = {}

    @staticmethod
    def nodes(service: ServiceConfig) -> list[HostConfig]:
        """One host on each living node of Ray, its state in a folder of the node's name below `service.state_dir`."""
        ray = _ray()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return [
            HostConfig(
                f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}",
                replace(service, state_dir=service.state_dir / node["NodeManagerHostname"]),
                node["NodeID"],
            )
            for node in nodes
        ]

    async def __aenter__(self) -> Cluster:
        ray = _ray()
        for config in self._configs:
            self._hosts[config.name] = _Known(Host(config.name, self._start(ray, config)))
        opened = await asyncio.gather(*(self._ask(known) for known in self._hosts.values()), return_exceptions=True)
        if errors := [error for error in opened if isinstance(error, BaseException)]:
            await self._end(False)
            raise errors[0]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, pause_running: bool = True) -> None:
        """End the actors. What runs is paused, or goes on and is taken up by the next cluster of these hosts."""
        await self._end(pause_running)

    def _start(self, ray: Any, config: HostConfig) -> Any:
        options: dict[str, Any] = {}
        if config.node_id is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(config.node_id, soft=False)
        actor = ray.remote(SandboxHost).options(
            name=f"{self.name}/{config.name}",
            namespace="moonlet",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=_CALLS_AT_ONCE,
            **options,
        )
        return actor.remote(config.service)

    async def _end(self, pause_running: bool) -> None:
        async def end(known: _Known) -> None:
            try:
                await known.host.call("close", pause_running)
            except SandboxError as error:
                log.warning("host %s did not close: %s", known.host.name, error)
            _ray().kill(known.host.actor)

        await asyncio.gather(*(end(known) for known in self._hosts.values()))
        self._hosts.clear()

    # -- placement ----------------------------------------------------------------------------------------------------
    async def create(self, spec: SandboxSpec | None = None) -> HostedSandbox:
        """A sandbox on the host with most room; the next one is tried where a host is full, lost or has not the template.

        Raises SandboxLimitError if a full one might take it later, else what the last host said.
        """
        spec = spec or SandboxSpec()
        errors: list[Exception] = []
        for known in await self._by_room():
            known.num_coming += 1
            try:
                made = HostedSandbox(known.host, await self._create_on(known.host, spec))
                known.count_one()
                return made
            except (SandboxLimitError, SandboxDiedError, TemplateError, BackendUnavailableError) as error:
                known.asked_at = float("-inf")
                errors.append(error)
            finally:
                known.num_coming -= 1
        full = [error for error in errors if isinstance(error, SandboxLimitError)]
        if full:
            raise SandboxLimitError(f"no host has room for it: {full[0]}", min(error.retry_after_s for error in full))
        raise errors[-1] if errors else SandboxDiedError("all hosts are lost", "lost")

    async def _create_on(self, host: Host, spec: SandboxSpec) -> str:
        """A create whose caller goes away leaves nothing: what was made all the same is destroyed."""
        reference = host.begin("create", spec)
        making = asyncio.ensure_future(host.answer(reference))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            host.cancel(reference)
            undone = asyncio.ensure_future(_undo(host, making))
            _undoing.add(undone)
            undone.add_done_callback(_undoing.discard)
            raise

    async def _by_room(self) -> list[_Known]:
        """Hosts that answer, the one with most room first."""
        await asyncio.gather(*(self._ask(known) for known in self._hosts.values()), return_exceptions=True)
        living = [known for known in self._hosts.values() if known.load is not None]
        return sorted(living, key=lambda known: known.num_coming - known.load.free)  # type: ignore[union-attr]

    async def _ask(self, known: _Known) -> None:
        now = asyncio.get_running_loop().time()
        if now - known.asked_at < _LOAD_AGE_S:
            return
        known.asked_at = now
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                known.load = HostLoad(**await known.host.call("load"))
        except BaseException:
            known.load, known.asked_at = None, float("-inf")
            raise

    # -- what is there ------------------------------------------------------------------------------------------------
    async def attach(self, sandbox_id: str) -> HostedSandbox:
        """An existing sandbox, wherever it is, resumed if it is paused. Raises SandboxNotFoundError."""
        answers = await self._all("find", sandbox_id)
        for known, found in answers:
            if isinstance(found, SandboxInfo):
                sandbox = HostedSandbox(known.host, sandbox_id)
                await sandbox.resume()
                return sandbox
        lost = [known.host.name for known, found in answers if isinstance(found, Exception)]
        where = f"; not asked, since lost: {', '.join(lost)}" if lost else ""
        raise SandboxNotFoundError(f"there is no sandbox {sandbox_id!r} on {len(answers) - len(lost)} hosts{where}")

    async def list(self) -> list[tuple[str, SandboxInfo]]:
        """(host, info) of all sandboxes of the hosts that answer."""
        answers = await self._all("manage", "list")
        return [(known.host.name, info) for known, infos in answers if isinstance(infos, list) for info in infos]

    async def loads(self) -> dict[str, HostLoad | None]:
        """By host; None for one that does not answer."""
        answers = await self._all("load")
        return {known.host.name: HostLoad(**found) if isinstance(found, dict) else None for known, found in answers}

    async def _all(self, method: str, *arguments: Any) -> Sequence[tuple[_Known, Any]]:
        hosts = [*self._hosts.values()]
        found = await asyncio.gather(*(known.host.call(method, *arguments) for known in hosts), return_exceptions=True)
        return [*zip(hosts, found, strict=True)]


_undoing: set[asyncio.Future[None]] = set()


async def _undo(host: Host, making: asyncio.Future[str]) -> None:
    await asyncio.wait([making])
    if not making.cancelled() and making.exception() is None:
        await HostedSandbox(host, making.result()).destroy()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependencyError("ray", "ray", "spreading sandboxes over several hosts") from None
    return ray
