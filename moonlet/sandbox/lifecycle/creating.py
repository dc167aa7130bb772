"""New sandboxes: from a template, a snapshot, or another sandbox. All or nothing: one that fails was never there."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from moonlet.errors import BackendUnavailableError, ConfigError, SandboxStateError, TemplateError
from moonlet.sandbox.api import SandboxSpec, State
from moonlet.sandbox.backend import Probe
from moonlet.sandbox.generations import in_thread, remove_tree, settled
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.lifecycle.copying import collect_snapshots, fetch
from moonlet.sandbox.lifecycle.core import Core
from moonlet.sandbox.lifecycle.machines import let_go, start_machine, watch
from moonlet.sandbox.network import AllowList
from moonlet.sandbox.records import CreateKey, SandboxRow, SnapshotInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Everything about a sandbox that is settled before its machine starts."""

    spec: SandboxSpec
    backend: str
    probe: Probe
    template_id: str
    snapshot: SnapshotInfo | None = None


async def make_plan(core: Core, spec: SandboxSpec) -> Plan:
    """Raises TemplateError, BackendUnavailableError, SandboxStateError (snapshot of another version), ConfigError."""
    check_ttl(core, spec.ttl_s)
    _check_spec(spec)
    snapshot = core.snapshot(spec.template) or await fetch(core, spec.template)
    if snapshot is not None:
        return await _plan_from_snapshot(core, spec, snapshot)
    template = await core.templates.resolve(spec.template)
    backend, probe = await core.choose_backend(spec.backend)
    _check_network(spec, probe)
    await backend.prepare(template, spec.limits, _log_progress)
    return Plan(spec, backend.name, probe, template.id)


async def _plan_from_snapshot(core: Core, spec: SandboxSpec, snapshot: SnapshotInfo) -> Plan:
    if spec.backend not in ("auto", snapshot.backend):
        raise SandboxStateError(
            f"snapshot {snapshot.id} was made by the backend {snapshot.backend}, {spec.backend} cannot start it: leave "
            "`backend` at 'auto'"
        )
    backend = await core.matching_backend(snapshot.backend, snapshot.version, f"snapshot {snapshot.id}")
    if snapshot.caps.fork_processes:  # the size of a machine that runs already cannot be chosen
        spec = replace(spec, limits=snapshot.spec.limits)
    env, probe = {**snapshot.spec.env, **spec.env}, await backend.probe()
    _check_network(spec, probe)
    return Plan(replace(spec, env=env), backend.name, probe, snapshot.template_id, snapshot)


def _check_spec(spec: SandboxSpec) -> None:
    """What is wrong is refused before anything is made."""
    AllowList(spec.allow_hosts)
    for name, value in vars(spec.limits).items():
        if not value > 0:
            raise ConfigError(f"limits.{name} must be more than 0, not {value!r}")
    if spec.on_timeout not in ("pause", "kill"):
        raise ConfigError(f"on_timeout is 'pause' or 'kill', not {spec.on_timeout!r}")
    if spec.idle_pause_s is not None and not spec.idle_pause_s > 0:
        raise ConfigError(f"idle_pause_s must be more than 0, not {spec.idle_pause_s!r}; None means never")
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"env: {name!r} cannot be a variable: no '=' in the name, no NUL anywhere")


def _check_network(spec: SandboxSpec, probe: Probe) -> None:
    if spec.allow_hosts and probe.caps is not None and not probe.caps.network:
        raise BackendUnavailableError(
            f"sandboxes of the backend {probe.backend} have no network at all here: leave out allow_hosts, or take another"
        )


def check_ttl(core: Core, ttl_s: float | None) -> None:
    longest = core.config.max_ttl_s
    if ttl_s is not None and not ttl_s > 0:
        raise ConfigError(
            f"ttl_s must be more than 0, not {ttl_s!r}; None means that the sandbox lives until it is destroyed"
        )
    if longest is not None and (ttl_s is None or ttl_s > longest):
        raise ConfigError(f"ttl_s is {ttl_s}, this service allows at most {longest:g} s (max_ttl_s)")


def new_box(core: Core, plan: Plan) -> Box:
    """Register a sandbox in memory. Raises SandboxLimitError, TemplateError if the snapshot is gone by now."""
    if plan.snapshot is not None and plan.snapshot.id not in core.snapshots:
        raise TemplateError(f"snapshot {plan.snapshot.id} was deleted meanwhile")
    core.admit(running=1, total=1)
    now = time.time()
    row = SandboxRow(
        id=core.new_id("sb"),
        state=State.CREATING,
        spec=plan.spec,
        backend=plan.backend,
        version=plan.probe.version,
        template_id=plan.template_id,
        caps=plan.probe.caps,  # type: ignore[arg-type]  # a plan is made of a probe that passed
        created_at=now,
        expires_at=None if plan.spec.ttl_s is None else now + plan.spec.ttl_s,
        origin=plan.snapshot.id if plan.snapshot else "",
    )
    box = Box(row, core.sandboxes_folder / row.id)
    core.boxes[box.id] = box
    return box


async def create(core: Core, box: Box, key: CreateKey | None) -> None:
    """Record it, start it, say that it runs."""
    try:
        async with box.lock.write():
            await core.write(core.records.add, box.row, key)
            await begin_life(core, box)
            now = time.time()
            ttl_s = box.row.spec.ttl_s
            await core.save(box, state=State.RUNNING, is_live=True, expires_at=None if ttl_s is None else now + ttl_s)
            watch(core, box)
    except BaseException:
        await settled(asyncio.ensure_future(abandon(core, box)))
        raise


async def begin_life(core: Core, box: Box) -> None:
    """Start the machine of a box that has never lived."""
    image: Path | None = core.image_of(box.row.origin) if box.row.origin else None
    await start_machine(core, box, image)


async def forget(core: Core, box: Box, *, with_key: bool = False) -> None:
    """Remove what is left of a box, in memory too. Raises what keeps it from being removed."""
    await let_go(box)
    await in_thread(remove_tree, box.folder)
    box.is_gone = True  # before the row goes, so that nothing writes it again
    try:
        await core.write(core.records.delete, box.id, with_key=with_key)
    except BaseException:
        box.is_gone = False
        raise
    core.boxes.pop(box.id, None)
    box.let_template_go()
    box.announce()


async def abandon(core: Core, box: Box) -> None:
    """`forget` for one that never came to life; what cannot be removed now is left to the reaper."""
    try:
        await forget(core, box, with_key=True)
        await collect_snapshots(core)
    except Exception as error:
        log.error("sandbox %s: not all of it could be removed: %s", box.id, error)
        if not box.is_gone:
            box.publish(replace(box.row, state=State.KILLING))


def _log_progress(what: str, share: float | None) -> None:
    log.info("%s%s", what, "" if share is None else f" ({share:.0%})")
