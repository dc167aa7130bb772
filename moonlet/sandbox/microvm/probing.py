"""Whether virtual machines work here, found by booting one.

That `/dev/kvm` exists proves nothing: there are kernels whose KVM takes a guest and never gets it to its first line. So a
small machine is booted until its agent answers, and its memory is read as a save would read it. The outcome is remembered
in the cache for as long as kernel, QEMU, processor and host kernel stay the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import BackendUnavailableError, MoonletError
from moonlet.sandbox.api import Limits
from moonlet.sandbox.generations import in_thread, remove_tree
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.microvm.booting import Parts, agent_args, make_ram, wait_for_agent
from moonlet.sandbox.microvm.image import make_disk, make_layer
from moonlet.sandbox.microvm.kernel import find_kernel
from moonlet.sandbox.microvm.machine import QemuMachine
from moonlet.sandbox.microvm.marks import boot_spec
from moonlet.sandbox.microvm.memory import save_changed
from moonlet.sandbox.microvm.qemu import Accel, Boot, Hardware, Start, find_qemu, processor_digest
from moonlet.sandbox.microvm.saved import PAGES, Saved
from moonlet.sandbox.microvm.templates import MIN_RAM_MIB

KVM_BOOT_S, EMULATED_BOOT_S = 8.0, 90.0
RETRY_S = {"kvm": 24 * 3600.0, "tcg": 60.0}  # emulation works unless something is wrong that may soon be right again
COMPLAINT_LENGTH = 400
KVM_DEVICE = Path("/dev/kvm")

log = logging.getLogger("moonlet")


@dataclass(frozen=True)
class Found:
    """What machines are made of here, and why they are not accelerated if they are not."""

    parts: Parts
    why_no_kvm: str


async def find_parts(cache: Path) -> Found:
    """With KVM if a guest boots with it, else with emulation. Raises BackendUnavailableError if none boots."""
    await in_thread(lambda: cache.mkdir(parents=True, exist_ok=True, mode=0o700))
    why_no_kvm = "there is no /dev/kvm" if not KVM_DEVICE.exists() else ""
    if not why_no_kvm and not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        why_no_kvm = "this user may not open /dev/kvm"
    if not why_no_kvm:
        parts = await in_thread(_parts, cache, "kvm")
        why_no_kvm = await _why_not(cache, parts, KVM_BOOT_S)
        if not why_no_kvm:
            return Found(parts, "")
        log.info("virtual machines are emulated: %s", why_no_kvm)
    parts = await in_thread(_parts, cache, "tcg")
    complaint = await _why_not(cache, parts, EMULATED_BOOT_S)
    if complaint:
        raise BackendUnavailableError(f"no virtual machine boots here: {complaint}")
    return Found(parts, why_no_kvm)


def _parts(cache: Path, accel: Accel) -> Parts:
    qemu = find_qemu(accel)
    agent = guest_binary()
    return Parts(qemu, find_kernel(cache), agent, hashlib.sha256(agent.read_bytes()).hexdigest()[:16])


async def _why_not(cache: Path, parts: Parts, timeout_s: float) -> str:
    """Empty if a machine of these parts boots and can be saved, else what happened instead."""
    about = [parts.qemu.identity, parts.kernel.digest, parts.agent_digest, platform.release(), processor_digest()]
    path = cache / f"probe-{parts.qemu.accel}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
    known = await in_thread(_read_outcome, path, RETRY_S[parts.qemu.accel])
    if known is not None:
        return known
    try:
        await _boot_once(cache, parts, timeout_s)
        outcome = ""
    except (MoonletError, OSError) as error:
        what = " ".join(str(error).split())[:COMPLAINT_LENGTH]
        outcome = f"no guest boots with {parts.qemu.accel.upper()} here: {what}"
    await in_thread(_write_outcome, path, outcome)
    return outcome


async def _boot_once(cache: Path, parts: Parts, timeout_s: float) -> None:
    """A machine with an empty disk: kernel, modules and agent only."""
    folder = Path(await in_thread(lambda: tempfile.mkdtemp(prefix="probe-", dir=cache)))
    try:
        shape, limits = Hardware(MIN_RAM_MIB, 1), Limits()
        await in_thread(make_ram, folder, shape)
        initramfs = await in_thread(parts.initramfs, cache)
        boot = Boot(parts.kernel.image, initramfs, agent_args(limits), limits.processes)
        await in_thread(_make_empty_disk, folder)
        spec = boot_spec(folder.name, limits)
        saved = Saved(parts.qemu.identity, parts.kernel.digest, parts.agent_digest, shape, 1, 1)
        start = Start(spec.label, spec.id, shape, "disk-1", boot=boot)
        machine = await QemuMachine.start(parts.qemu, spec, folder, start, saved)
        try:
            (await wait_for_agent(machine, timeout_s)).close()
            await machine.freeze()
            await machine.save_state(folder)
            await in_thread(save_changed, machine.process.pid, folder / PAGES)
        finally:
            await machine.destroy()
    finally:
        await in_thread(remove_tree, folder)


def _make_empty_disk(folder: Path) -> None:
    (folder / "rootfs").mkdir()
    make_disk(folder / "rootfs", folder / "disk-0", 0)
    make_layer(folder, 1)


def _read_outcome(path: Path, retry_s: float) -> str | None:
    try:
        outcome = json.loads(path.read_text())
        is_fresh = not outcome["complaint"] or 0 <= time.time() - outcome["time"] < retry_s
        return str(outcome["complaint"]) if is_fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_outcome(path: Path, complaint: str) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({"complaint": complaint, "time": time.time()}))
    unfinished.replace(path)
