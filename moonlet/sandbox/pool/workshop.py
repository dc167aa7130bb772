"""Making and destroying the machines of a pool: setup, repetition within a budget, nothing forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from moonlet.errors import (
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
)
from moonlet.sandbox.api import Sandbox, SandboxSpec
from moonlet.sandbox.pool.config import PoolConfig

log = logging.getLogger(__name__)

CreateSandbox = Callable[[SandboxSpec], Awaitable[Sandbox]]
Setup = Callable[[Sandbox], Awaitable[None]]
Result = TypeVar("Result")

POOL_METADATA = "moonlet-pool"
INFRASTRUCTURE = (SandboxTimeoutError, SandboxDiedError, SandboxLimitError)  # worth another try
_FREE_RETRIES = 10  # allowed before the share of leases counts
_DESTROY_ATTEMPTS = 3


@dataclass(eq=False)
class Kind:
    """Machines that are alike: same spec, same setup."""

    key: str
    spec: SandboxSpec
    setup: Setup | None
    num_asked: int = 0
    asked_at: float = 0.0
    num_making: int = 0  # spares under way
    may_spare: bool = True  # not after a spare could not be made, until a lease succeeds
    spares: list[Machine] = field(default_factory=list)


@dataclass(eq=False)
class Machine:
    """A sandbox of the pool. `has_turn` says that it counts among the running ones."""

    sandbox: Sandbox
    kind: Kind
    has_turn: bool = True
    idle_since: float | None = None
    pause_after: float = 0.0
    change: asyncio.Task[None] | None = None  # a pause or resume under way
    is_pausing: bool = False
    end: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one wake-up at a time

    def is_pausable(self) -> bool:
        return self.has_turn and not self.change and not self.end


class Workshop:
    """Makes and destroys. `closing` ends every wait; `undestroyed` maps ids to (sandbox, why it is still there)."""

    def __init__(self, create: CreateSandbox, config: PoolConfig, closing: asyncio.Event) -> None:
        self.counts: Counter[str] = Counter()
        self.undestroyed: dict[str, tuple[Sandbox, str]] = {}
        self._create, self._config, self._closing = create, config, closing
        self._setups: set[asyncio.Future[None]] = set()

    async def make(self, kind: Kind) -> Machine:
        """A fresh machine with its setup done; on an error none is left. Not to be cancelled."""
        attempt = 1
        while True:
            try:
                sandbox = await self._create_one(kind.spec)
                await self._set_up(sandbox, kind)
                if self._closing.is_set():
                    await self.destroy(sandbox)
                    raise closed()
                return Machine(sandbox, kind)
            except INFRASTRUCTURE as error:
                if not self.may_retry(attempt, error):
                    raise
                await self._wait(0.2 * 2**attempt * random.uniform(0.5, 1.0))
                attempt += 1

    def may_retry(self, attempt: int, error: Exception) -> bool:
        """Whether attempt + 1 is within the limits; counts it if so."""
        allowed = max(_FREE_RETRIES, self._config.retry_share * self.counts["leases"])
        if attempt >= self._config.max_attempts or self.counts["retries"] >= allowed or self._closing.is_set():
            return False
        self.counts["retries"] += 1
        log.warning("pool: attempt %d failed, trying again: %s", attempt, error)
        return True

    def cancel_setups(self) -> None:
        """Setups are code of the user and may take for ever; creation ends on its own."""
        for setup in self._setups:
            setup.cancel()

    async def destroy(self, sandbox: Sandbox) -> None:
        """Destroy; a sandbox that resists is noted in `undestroyed`."""
        for attempt in range(1, _DESTROY_ATTEMPTS + 1):
            try:
                with contextlib.suppress(SandboxNotFoundError):
                    await sandbox.destroy()
            except Exception as error:
                log.warning("pool: sandbox %s could not be destroyed (attempt %d): %s", sandbox.id, attempt, error)
                self.undestroyed[sandbox.id] = (sandbox, str(error))
                await self._wait(0.1 * attempt)
            else:
                self.undestroyed.pop(sandbox.id, None)
                self.counts["destroyed"] += 1
                return

    async def when_admitted(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `work`, begun again for as long as the service says that it is full."""
        while not self._closing.is_set():
            try:
                return await work()
            except SandboxLimitError as error:
                await self._wait(error.retry_after_s)
        raise closed()

    async def _create_one(self, spec: SandboxSpec) -> Sandbox:
        metadata = {**spec.metadata, POOL_METADATA: self._config.name}
        own = replace(spec, ttl_s=self._config.orphan_ttl_s, on_timeout="kill", metadata=metadata)
        sandbox = await self.when_admitted(lambda: self._create(own))
        self.counts["created"] += 1
        return sandbox

    async def _set_up(self, sandbox: Sandbox, kind: Kind) -> None:
        if kind.setup is None:
            return
        setup = asyncio.ensure_future(kind.setup(sandbox))
        self._setups.add(setup)
        try:
            if self._closing.is_set():
                setup.cancel()
            await setup
        except BaseException as error:
            await self.destroy(sandbox)
            if isinstance(error, asyncio.CancelledError):
                raise closed() from None
            raise
        finally:
            self._setups.discard(setup)

    async def _wait(self, seconds: float) -> None:
        """Sleep, but not into the end of the pool."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)


def closed() -> SandboxStateError:
    return SandboxStateError("the pool of sandboxes is closed: open a new one")
