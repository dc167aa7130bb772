"""Sandboxes of no machine: every call takes the time and fails as a script says; what they break is noted.

`run_virtually` runs a coroutine on a loop whose clock jumps to the next timer, so that hours pass in no time and in the
same order each time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moonlet.errors import SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import ExecResult, Sandbox, SandboxSpec

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in which waiting takes no time."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            if not self._scheduled:  # type: ignore[attr-defined]
                raise AssertionError("nothing will ever happen any more: a deadlock")
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class ScriptedHost:
    """Makes sandboxes and counts them. `fault(operation)` may return the error that this call ends with."""

    fault: Callable[[str], Exception | None] = lambda operation: None
    delay: Callable[[], float] = lambda: 1.0
    alive: set[ScriptedSandbox] = field(default_factory=set)
    running: set[ScriptedSandbox] = field(default_factory=set)
    max_alive: int = 0
    max_running: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    specs: list[SandboxSpec] = field(default_factory=list)

    async def create(self, spec: SandboxSpec) -> ScriptedSandbox:
        sandbox = ScriptedSandbox(self, f"sandbox-{len(self.specs)}")
        self.specs.append(spec)
        self.note(sandbox, is_running=True)
        try:
            await self.take("create", sandbox)
        except BaseException:
            self.forget(sandbox)
            raise
        return sandbox

    async def take(self, operation: str, sandbox: ScriptedSandbox) -> None:
        self.calls.append((operation, sandbox.id))
        error = self.fault(operation)
        await asyncio.sleep(self.delay())
        if error:
            raise error

    def note(self, sandbox: ScriptedSandbox, *, is_running: bool) -> None:
        self.alive.add(sandbox)
        if is_running:
            self.running.add(sandbox)
        else:
            self.running.discard(sandbox)
        self.max_alive = max(self.max_alive, len(self.alive))
        self.max_running = max(self.max_running, len(self.running))

    def forget(self, sandbox: ScriptedSandbox) -> None:
        self.alive.discard(sandbox)
        self.running.discard(sandbox)


def random_faults(seed: int, share: float, error: Callable[[], Exception], *operations: str) -> Callable[[str], Any]:
    """Faults in a share of these operations."""
    dice = random.Random(seed)
    return lambda operation: error() if operation in operations and dice.random() < share else None


class ScriptedSandbox(Sandbox):
    """One of them; only what a pool asks for answers."""

    def __init__(self, host: ScriptedHost, name: str) -> None:
        self.host, self.id = host, name

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        self._check_lives()
        if self not in self.host.running:
            raise SandboxStateError(f"{self.id} is paused")
        await self.host.take("exec", self)
        return ExecResult(0, b"", b"")

    async def pause(self) -> None:
        self._check_lives()
        await self.host.take("pause", self)
        self.host.note(self, is_running=False)

    async def resume(self) -> None:
        self._check_lives()
        self.host.note(self, is_running=True)
        try:
            await self.host.take("resume", self)
        except Exception:
            self.host.note(self, is_running=False)
            raise

    async def set_timeout(self, ttl_s: float | None) -> None:
        self._check_lives()

    async def destroy(self) -> None:
        await self.host.take("destroy", self)
        self.host.forget(self)

    def die(self) -> None:
        """Gone without a call of ours."""
        self.host.forget(self)

    def _check_lives(self) -> None:
        if self not in self.host.alive:
            raise SandboxNotFoundError(f"there is no {self.id}")

    def _unasked(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("nothing in these tests asks for this")

    start = processes = process = read_file = write_file = upload = download = list_files = _unasked
    stat = make_dir = remove = rename = watch = info = snapshot = fork = _unasked
