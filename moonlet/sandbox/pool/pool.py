"""Leases, turns and spares.

Two things are counted, each handed out in the order of asking: machines that exist (`max_alive`) and machines that run
(`max_running`). A new lease takes a place among the living first, then a turn; an idle machine that was paused needs a
turn only, so that leases under way always end. Who waits for a turn gets it as soon as a spare or an idle machine has
been paused for it.

Nothing outlives the pool: a machine is destroyed at the end of its lease whatever happened in it, creation is never
abandoned half-way (what a cancelled lease leaves becomes a spare or is destroyed), and machines of a process that was
killed end on their own, because only the pool's heartbeat prolongs their time to live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from moonlet.errors import MoonletError, SandboxDiedError, SandboxError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import Sandbox, SandboxSpec
from moonlet.sandbox.pool.config import PoolConfig, PoolStats
from moonlet.sandbox.pool.gate import Gate
from moonlet.sandbox.pool.workshop import INFRASTRUCTURE, CreateSandbox, Kind, Machine, Setup, Workshop, closed

if TYPE_CHECKING:
    from moonlet.sandbox.manager import Manager

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_KINDS = 64  # remembered, so that spares can be kept of them
_PAUSE_AGAIN_S = 5.0  # a machine whose pause failed is left alone for so long


class Pool:
    """Leases sandboxes of a manager, or those that a function makes (`Sandbox.create`, or that of a `hosts.Cluster`).

    `async with Pool(Sandbox.create, PoolConfig(max_running=4)) as pool: async with pool.lease(spec) as lease: ...`

    `ttl_s` and `on_timeout` of a spec are replaced: a machine lives as long as its lease and its pool.
    """

    def __init__(self, sandboxes: Manager | CreateSandbox, config: PoolConfig | None = None) -> None:
        self.config = config or PoolConfig()
        self._closing = asyncio.Event()
        create = sandboxes if callable(sandboxes) else _creator(sandboxes)
        self._workshop = Workshop(create, self.config, self._closing)
        self._alive = Gate(self.config.max_alive, self._dispatch, self._offer)
        self._turns = Gate(self.config.max_running, self._dispatch, self._offer)
        self._kinds: dict[str, Kind] = {}  # who was asked for last stands last
        self._machines: set[Machine] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pool:
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def lease(self, spec: SandboxSpec | None = None, setup: Setup | None = None) -> Lease:
        """A machine for the time of an `async with`. `setup` runs once on each fresh machine, spares included."""
        return Lease(self, spec or SandboxSpec(), setup)

    def warm_up(self, spec: SandboxSpec | None = None, setup: Setup | None = None) -> None:
        """Say that leases of this kind will come, so that its spares are begun now."""
        kind = self._ask(spec or SandboxSpec(), setup)
        kind.num_asked += 1
        self._dispatch()

    async def run(
        self, work: Callable[[Lease], Awaitable[Result]], spec: SandboxSpec | None = None, setup: Setup | None = None
    ) -> Result:
        """Run `work` in a lease; if its machine fails, do so again with a fresh one, within the budget of retries."""
        attempt = 1
        while True:
            async with self.lease(spec, setup) as lease:
                try:
                    return await work(lease)
                except INFRASTRUCTURE as error:
                    if not self._workshop.may_retry(attempt, error):
                        raise
            attempt += 1

    def stats(self) -> PoolStats:
        counts = {name: self._workshop.counts[name] for name in PoolStats.__annotations__ if name not in _GAUGES}
        return PoolStats(
            alive=self._alive.num_held,
            running=self._turns.num_held,
            paused=sum(not machine.has_turn for machine in self._machines),
            spares=sum(len(kind.spares) for kind in self._kinds.values()),
            waiting=self._alive.num_waiting + self._turns.num_waiting,
            undestroyed=tuple(self._workshop.undestroyed),
            **counts,
        )

    async def close(self) -> None:
        """Destroy all machines, those of leases too; idempotent. A cancellation meanwhile is obeyed when that is done.

        Raises SandboxError naming the machines that could not be destroyed.
        """
        self._closing.set()
        await _uninterrupted(asyncio.ensure_future(self._close()))
        if left := self._workshop.undestroyed:
            reasons = "; ".join(f"{name} ({why})" for name, (_, why) in left.items())
            raise SandboxError(f"these sandboxes could not be destroyed, remove them by hand: {reasons}")

    # -- getting a machine --------------------------------------------------------------------------------------------
    def _ask(self, spec: SandboxSpec, setup: Setup | None) -> Kind:
        plain = asdict(replace(spec, env=dict(spec.env), metadata=dict(spec.metadata)))
        key = f"{plain} {id(setup)}"
        kind = self._kinds.pop(key, None) or Kind(key, spec, setup)
        kind.num_asked += 1
        kind.asked_at = asyncio.get_running_loop().time()
        self._kinds[key] = kind
        while len(self._kinds) > _MAX_KINDS:
            self._forget(next(iter(self._kinds.values())))
        return kind

    async def _obtain(self, spec: SandboxSpec, setup: Setup | None) -> Machine:
        if self._closing.is_set():
            raise closed()
        kind = self._ask(spec, setup)
        self._workshop.counts["leases"] += 1
        machine = await self._obtain_spare(kind) or await self._obtain_new(kind)
        kind.may_spare = True
        self._dispatch()
        return machine

    async def _obtain_spare(self, kind: Kind) -> Machine | None:
        """One that runs, else one that is paused; those that turn out dead are passed over."""
        while kind.spares:
            machine = min(kind.spares, key=lambda spare: not spare.is_pausable())
            kind.spares.remove(machine)
            try:
                await self._wake(machine)
                return machine
            except INFRASTRUCTURE as error:
                log.warning("pool: spare %s is of no use: %s", machine.sandbox.id, error)
                self._retire(machine)
            except BaseException:
                self._retire(machine)
                raise
        return None

    async def _obtain_new(self, kind: Kind) -> Machine:
        given = await self._alive.acquire(kind)
        if given is not None:
            return given
        try:
            given = await self._turns.acquire(kind)
        except BaseException:
            self._release_alive()
            raise
        if given is not None:
            self._release_alive()
            return given
        making = self._spawn(self._make(kind))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._adopt)
            raise

    async def _make(self, kind: Kind) -> Machine:
        """A fresh machine. Place and turn were taken before; on an error they go back."""
        try:
            machine = await self._workshop.make(kind)
        except BaseException:
            self._turns.release()
            self._release_alive()
            raise
        self._machines.add(machine)
        return machine

    def _adopt(self, making: asyncio.Task[Machine]) -> None:
        """What becomes of a machine whose lease was cancelled while it was made."""
        if not making.cancelled() and making.exception() is None:
            self._offer(making.result())

    def _offer(self, machine: Machine) -> None:
        """A machine that nobody holds: for who waits for its kind, else a spare, else its end."""
        kind = machine.kind
        if self._closing.is_set():
            self._retire(machine)
        elif self._turns.give(kind, machine) or self._alive.give(kind, machine):
            return
        elif self._kinds.get(kind.key) is kind and len(kind.spares) < self.config.warm:
            kind.spares.append(machine)
            self._dispatch()
        else:
            self._retire(machine)

    # -- turns --------------------------------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        """Called after every change: make room for those who wait; if nobody does, make spares."""
        if self._closing.is_set():
            return
        now = asyncio.get_running_loop().time()
        self._drop_spares(now)
        coming = sum(machine.has_turn and (machine.is_pausing or bool(machine.end)) for machine in self._machines)
        victims = sorted(self._pausable(), key=lambda pair: pair[0])
        for due, machine in victims[: max(0, self._turns.num_waiting - coming)]:
            if due <= now:
                machine.is_pausing = True
                machine.change = self._spawn(self._pause(machine))
            else:
                self._dispatch_at(due)
        self._make_spares()

    def _pausable(self) -> Iterator[tuple[float, Machine]]:
        """(when, machine): spares at once, idle ones after their grace."""
        spares = {machine for kind in self._kinds.values() for machine in kind.spares}
        for machine in self._machines:
            if machine.is_pausable() and machine in spares:
                yield machine.pause_after, machine
            elif machine.is_pausable() and machine.idle_since is not None:
                yield max(machine.pause_after, machine.idle_since + self.config.idle_grace_s), machine

    def _drop_spares(self, now: float) -> None:
        """End spares whose place others wait for, and those of kinds that nobody asks for any more."""
        wanted = self._alive.num_waiting - sum(machine.end is not None for machine in self._machines)
        for kind in list(self._kinds.values()):
            if now - kind.asked_at > self.config.spare_idle_s:
                self._forget(kind)
            while wanted > 0 and kind.spares:
                self._retire(kind.spares[0])
                wanted -= 1

    def _forget(self, kind: Kind) -> None:
        del self._kinds[kind.key]
        for machine in list(kind.spares):
            self._retire(machine)

    def _make_spares(self) -> None:
        for kind in reversed(list(self._kinds.values())):
            while kind.num_asked > 1 and kind.may_spare and len(kind.spares) + kind.num_making < self.config.warm:
                if self._turns.num_waiting or self._turns.num_free <= 0 or not self._alive.try_acquire():
                    return
                self._turns.try_acquire()
                kind.num_making += 1
                self._spawn(self._make_spare(kind))

    async def _make_spare(self, kind: Kind) -> None:
        try:
            machine = await self._make(kind)
        except Exception as error:
            # Whoever leases this kind next meets the error itself.
            kind.may_spare = False
            if not self._closing.is_set():
                log.warning("pool: a spare of template %s could not be made: %s", kind.spec.template, error)
            return
        finally:
            kind.num_making -= 1
        self._offer(machine)

    def _dispatch_at(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > due or self._timer.when() <= loop.time():
            if self._timer:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._dispatch)

    async def _pause(self, machine: Machine) -> None:
        try:
            await machine.sandbox.pause()
        except MoonletError as error:
            machine.pause_after = asyncio.get_running_loop().time() + _PAUSE_AGAIN_S
            log.warning("pool: sandbox %s goes on running, its pause failed: %s", machine.sandbox.id, error)
        else:
            self._workshop.counts["pauses"] += 1
            machine.has_turn = False
            self._turns.release()
        finally:
            machine.is_pausing, machine.change = False, None
            self._dispatch()

    async def _wake(self, machine: Machine) -> None:
        """Let it go on when its turn comes; at once if it has never stopped."""
        machine.idle_since = None
        async with machine.lock:
            if machine.change:
                await asyncio.wait([machine.change])
            if machine.end:
                raise closed()
            if not machine.has_turn:
                await self._turns.acquire()
                machine.has_turn = True
                machine.change = self._spawn(self._resume(machine))
                await asyncio.shield(machine.change)

    async def _resume(self, machine: Machine) -> None:
        try:
            await self._workshop.when_admitted(machine.sandbox.resume)
            self._workshop.counts["resumes"] += 1
        except Exception:
            machine.has_turn = False
            self._turns.release()
            raise
        finally:
            machine.change = None
            self._dispatch()

    # -- the end ------------------------------------------------------------------------------------------------------
    def _retire(self, machine: Machine) -> asyncio.Task[None]:
        """Begin to destroy a machine, or join who does."""
        if machine in machine.kind.spares:
            machine.kind.spares.remove(machine)
        if machine.end is None:
            machine.end = self._spawn(self._end(machine))
        return machine.end

    async def _end(self, machine: Machine) -> None:
        if machine.change:
            if not machine.is_pausing:
                machine.change.cancel()  # a resume may wait long for a full service; the turn is kept till the end
            await asyncio.wait([machine.change])
        await self._workshop.destroy(machine.sandbox)
        self._machines.discard(machine)
        if machine.has_turn:
            self._turns.release()
        self._release_alive()

    def _release_alive(self) -> None:
        self._alive.release()
        self._dispatch()

    async def _close(self) -> None:
        for timer in (self._heart, self._timer):
            if timer:
                timer.cancel()
        for gate in (self._alive, self._turns):
            gate.refuse_all(closed)
        self._workshop.cancel_setups()
        while self._tasks or self._machines:
            for machine in list(self._machines):
                self._retire(machine)
            await asyncio.wait(self._tasks)

    async def _beat(self) -> None:
        """Prolong the life of all machines, find dead spares, and try again to destroy what resisted."""
        while True:
            await asyncio.sleep(self.config.orphan_ttl_s / 4)
            living = [machine for machine in self._machines if not machine.end]
            await asyncio.gather(*(self._prolong(machine) for machine in living))
            for sandbox, _ in list(self._workshop.undestroyed.values()):
                await self._workshop.destroy(sandbox)
            self._dispatch()

    async def _prolong(self, machine: Machine) -> None:
        try:
            await machine.sandbox.set_timeout(self.config.orphan_ttl_s)
        except (SandboxNotFoundError, SandboxDiedError):
            if machine in machine.kind.spares:
                self._retire(machine)
        except SandboxStateError:
            return  # some services prolong only what runs
        except Exception as error:
            log.warning("pool: heartbeat of sandbox %s: %s", machine.sandbox.id, error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that the pool owns: no caller's cancellation reaches it, and `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits for it reports it
        return task


def _creator(manager: Manager) -> CreateSandbox:
    from moonlet.sandbox.local import LocalSandbox

    async def create(spec: SandboxSpec) -> Sandbox:
        return LocalSandbox(manager, (await manager.create(spec)).id)

    return create


class Lease:
    """A machine for the time of an `async with`; at its end it is destroyed."""

    def __init__(self, pool: Pool, spec: SandboxSpec, setup: Setup | None) -> None:
        self._pool, self._spec, self._setup = pool, spec, setup
        self._machine: Machine | None = None

    @property
    def sandbox(self) -> Sandbox:
        if self._machine is None:
            raise SandboxStateError("a lease has its sandbox inside of `async with` only")
        return self._machine.sandbox

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Nothing is asked of the machine in this block: it may be paused, and is running again after the block.

        After a cancellation inside the block nobody waits for a turn: call `resume` before the machine is used again.
        """
        if self._machine is None or self._machine.idle_since is not None:
            raise SandboxStateError("idle: the lease is not open, or idle already")
        self._machine.idle_since = asyncio.get_running_loop().time()
        self._pool._dispatch()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            await self.resume()
            raise
        await self.resume()

    async def resume(self) -> None:
        """Return when the machine runs, which may have to wait for its turn; idempotent."""
        if self._machine is None:
            raise SandboxStateError("a lease that is over cannot be resumed")
        await self._pool._wake(self._machine)

    async def __aenter__(self) -> Lease:
        self._machine = await self._pool._obtain(self._spec, self._setup)
        return self

    async def __aexit__(self, *exc: object) -> None:
        machine, self._machine = self._machine, None
        if machine:
            await _uninterrupted(self._pool._retire(machine))


_GAUGES = ("alive", "running", "paused", "spares", "waiting", "undestroyed")


async def _uninterrupted(work: asyncio.Future[None]) -> None:
    """Wait for the end of `work` even if cancelled, and be cancelled then."""
    cancellation: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation:
        raise cancellation
    work.result()
