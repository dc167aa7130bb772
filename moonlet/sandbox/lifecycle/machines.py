"""Machines of a box: started with an agent that answers, watched while they live, let go without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from moonlet.errors import MoonletError, SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.api import FailReason, State
from moonlet.sandbox.backend import Machine, MachineSpec, Template
from moonlet.sandbox.generations import in_thread, remake_folder, remove_tree, settled
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.network import AllowList, NetworkProxy

_HELLO_S = 30.0  # a machine that has run before answers by then, or it is taken for dead
_LOG_BYTES = 256 << 10
_LAST_WORDS_BYTES = 500  # of a machine that died while it started, in the error
_closing: set[asyncio.Task[None]] = set()  # so that they are not collected before they end

log = logging.getLogger(__name__)


def machine_spec(core: Core, box: Box) -> MachineSpec:
    template = box.template or Template(box.row.template_id)
    return MachineSpec(box.id, core.label, template, box.row.spec.limits, hostname=box.id)


async def load_template(core: Core, box: Box) -> None:
    """Look up the template of a box and keep it from being evicted while the box exists."""
    if box.template is None:
        box.template = await core.templates.resolve(box.row.template_id)
        hold = contextlib.ExitStack()
        hold.enter_context(core.templates.hold(box.template.id))
        box.release_template = hold.close


async def start_machine(core: Core, box: Box, image: Path | None) -> None:
    """From the template or from a saved image, until its agent answers as itself: new entropy, clock, host name.

    Raises SandboxTimeoutError when that takes too long. After an error nothing of it is left.
    """
    backend = core.backends[box.row.backend]
    async with core.starting, core.gate.read():
        try:
            async with _limited(core.config.create_timeout_s, f"sandbox {box.id} did not start"):
                await load_template(core, box)
                await in_thread(remake_folder, box.live)
                spec = machine_spec(core, box)
                if image is None:
                    box.machine = await backend.launch(spec, box.live)
                else:
                    box.machine = await backend.restore(spec, box.live, image)
                await unless_dead(box, _greet(core, box, is_fresh=image is None))
        except BaseException:
            await settled(asyncio.ensure_future(let_go(box)))
            raise


async def _greet(core: Core, box: Box, *, is_fresh: bool) -> None:
    await open_guest(core, box, core.config.create_timeout_s, is_fresh=is_fresh)
    await refresh(box)


async def unless_dead(box: Box, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` with a machine that may die meanwhile, which ends it: nobody waits for an agent that is gone."""
    assert box.machine is not None
    death, working = asyncio.ensure_future(box.machine.wait_dead()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({death, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return
        words = (await in_thread(read_logs, box))[-_LAST_WORDS_BYTES:].decode(errors="replace").strip()
        raise SandboxDiedError(
            f"the machine of sandbox {box.id} died while it started ({death.result()}){': ' if words else ''}{words}",
            death.result(),
        )
    finally:
        for task in (death, working):
            task.cancel()
        await asyncio.wait({death, working})
        if not working.cancelled():
            working.exception()  # seen


async def open_guest(core: Core, box: Box, timeout_s: float = _HELLO_S, *, is_fresh: bool = False) -> None:
    """Speak with the agent, and let the guest reach the hosts that it may. `is_fresh`: nobody spoke with it before."""
    assert box.machine is not None
    stream = await GuestStream.open(box.machine.endpoint(), timeout_s=timeout_s, is_fresh=is_fresh)
    try:
        if box.row.spec.allow_hosts:
            allow = AllowList(box.row.spec.allow_hosts)
            box.proxy = NetworkProxy(stream, allow, on_denied=lambda denied: core.deny(box.id, denied))
            await box.proxy.start()
    except BaseException:
        stream.close()
        raise
    box.guest = Guest(stream)
    box.announce()


async def refresh(box: Box) -> None:
    """Nothing that another copy of this machine knows may be taken for its own: random numbers, names, the clock."""
    assert box.guest is not None
    machine_id = hashlib.sha256(f"machine-id of {box.id}".encode()).hexdigest()[:32]
    await box.guest.refresh(hostname=box.id, machine_id=machine_id)


def close_guest(box: Box) -> None:
    """Calls in flight end, whatever they wait for just now; connections of the guest are cut."""
    guest, box.guest = box.guest, None
    proxy, box.proxy = box.proxy, None
    for call in box.calls:
        call.reschedule(0.0)
    box.calls.clear()
    box.announce()
    if guest is not None:
        guest.stream.close()
    if proxy is not None:
        task = asyncio.ensure_future(proxy.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


async def stop_watching(box: Box) -> None:
    watcher, box.watcher = box.watcher, None
    if watcher is not None and watcher is not asyncio.current_task():
        watcher.cancel()
        await asyncio.wait([watcher])


async def let_go(box: Box) -> None:
    """Destroy the machine and its folder. Errors are logged: the reaper comes back to what is left."""
    await stop_watching(box)
    close_guest(box)
    machine, box.machine = box.machine, None
    if machine is not None:
        try:
            await machine.destroy()
        except Exception as error:
            log.error("sandbox %s: its machine could not be destroyed: %s", box.id, error)
    try:
        await in_thread(remove_tree, box.live)
    except OSError as error:
        log.error("sandbox %s: %s could not be removed: %s", box.id, box.live, error)


# -- death ------------------------------------------------------------------------------------------------------------
def watch(core: Core, box: Box) -> None:
    """Notice the death of the machine and say so; started once it runs."""
    assert box.machine is not None
    if box.watcher is not None and not box.watcher.done():
        return  # a machine that was frozen is still watched
    box.watcher = core.spawn(_watch(core, box, box.machine), f"watch {box.id}")


async def _watch(core: Core, box: Box, machine: Machine) -> None:
    reason = await machine.wait_dead()
    log.warning("sandbox %s: its machine died (%s)", box.id, reason)
    box.doom = reason
    close_guest(box)  # whoever waits for an answer learns of it now
    async with box.lock.write():
        if box.machine is machine:
            await fail(core, box, reason)


async def fail(core: Core, box: Box, reason: FailReason) -> None:
    """The machine is gone: keep what it last said, let go of the rest."""
    await stop_watching(box)
    await in_thread(_keep_logs, box)
    await let_go(box)
    await core.try_save(box, state=State.FAILED, reason=reason, is_live=False, origin="")
    box.doom = None


def _keep_logs(box: Box) -> None:
    kept = read_logs(box)
    with contextlib.suppress(OSError):
        (box.folder / "last.log").write_bytes(kept)


def read_logs(box: Box) -> bytes:
    """The ends of the machine's log files, or what was kept of them when it died."""
    parts = []
    for path in [box.folder / "last.log", *sorted(box.live.glob("*.log"))]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            parts.append(file.read(_LOG_BYTES))
    return b"\n".join(part for part in parts if part)


async def ensure_alive(core: Core, box: Box) -> None:
    """After something failed: the machine runs and its agent answers, or the box is failed and SandboxDiedError raised."""
    if box.machine is None:
        raise box.died()
    try:
        await box.machine.thaw()
        try:
            if box.guest is None:
                raise SandboxDiedError("no stream")
            await box.guest.usage()
        except (SandboxDiedError, SandboxTimeoutError):
            close_guest(box)
            await open_guest(core, box)
    except Exception as error:
        log.error("sandbox %s: its machine does not go on: %s", box.id, error)
        await fail(core, box, error_reason(error))
        raise box.died() from error


async def run_on(core: Core, box: Box, error: Exception | None) -> None:
    """After a pause or snapshot that ended or failed: running as before, or failed if the machine did not survive it."""
    if error is not None:
        log.warning("sandbox %s: %s failed: %s", box.id, box.state, error)
    await ensure_alive(core, box)
    await core.try_save(box, state=State.RUNNING)


def as_sandbox_error(error: Exception, what: str) -> Exception:
    """Errors of ours say enough; others get to know which sandbox it was."""
    if isinstance(error, MoonletError):
        return error
    return SandboxError(f"{what}: {type(error).__name__}: {error}; it runs on")


def error_reason(error: BaseException) -> FailReason:
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, FailReason) else FailReason.CRASH


@asynccontextmanager
async def _limited(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise SandboxTimeoutError(
            f"{what} within {limit_s:g} s (create_timeout_s); try again, or allow more"
        ) from error
