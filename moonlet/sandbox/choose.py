"""Which backend makes the machines.

`auto` takes the strongest whose probe passes, in this order:

    microvm with KVM    its own kernel behind a processor's virtualization
    firecracker         the same, by another program
    gvisor              a kernel in user space; keeps processes through pauses and forks
    namespace           the host's kernel behind namespaces and a filter
    microvm with TCG    isolates as well as with KVM, but runs 10 to 100 times slower: only where nothing else works

`landlock` is weak and therefore never chosen: it must be asked for by name.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping

from moonlet.errors import BackendUnavailableError, ConfigError, nearest_name
from moonlet.sandbox.backend import Backend, Probe

AUTO = "auto"
_CLASSES = {
    "microvm": ("moonlet.sandbox.microvm.backend", "MicrovmBackend"),
    "firecracker": ("moonlet.sandbox.microvm.firecracker", "FirecrackerBackend"),
    "gvisor": ("moonlet.sandbox.gvisor.backend", "GvisorBackend"),
    "namespace": ("moonlet.sandbox.namespace.backend", "NamespaceBackend"),
    "landlock": ("moonlet.sandbox.namespace.landlock", "LandlockBackend"),
}
_NEVER_AUTO = 0  # strength
_EMULATED = 10  # strength of a virtual machine without a processor that helps

log = logging.getLogger("moonlet")
_logged: set[str] = set()


def all_backends() -> dict[str, Backend]:
    """One of each kind that makes machines on this host, by name; none of them was tried yet."""
    return {name: make_backend(name) for name in _CLASSES}


def make_backend(name: str) -> Backend:
    """A backend by its name, not tried. Raises ConfigError for an unknown one."""
    if name not in _CLASSES:
        raise ConfigError(f"there is no sandbox backend '{name}'{nearest_name(name, [AUTO, *_CLASSES])}")
    module, cls = _CLASSES[name]
    return getattr(importlib.import_module(module), cls)()


async def probe_all() -> list[Probe]:
    """What each backend finds when it really tries, in the order of `auto`."""
    backends = all_backends()
    probes = await asyncio.gather(*(backend.probe() for backend in backends.values()))
    return sorted(probes, key=lambda probe: -effective_strength(backends[probe.backend], probe))


def effective_strength(backend: Backend, probe: Probe) -> int:
    """What counts for `auto`; 0 if it must not be chosen."""
    if probe.caps is None:
        return _NEVER_AUTO
    if probe.caps.isolation == "vm" and is_emulated(probe):
        return _EMULATED
    return backend.strength


def is_emulated(probe: Probe) -> bool:
    """Whether the machine's processor is a program."""
    words = [probe.version, probe.reason, *(probe.caps.notes if probe.caps else ())]
    return any("tcg" in text.lower() for text in words)


async def choose(name: str = AUTO) -> Backend:
    """The backend of this name, or with `auto` the strongest that works here; says once in the log which, and why.

    Raises BackendUnavailableError with what its probe found, ConfigError for an unknown name.
    """
    if name != AUTO:
        backend = make_backend(name)
        probe = await backend.probe()
        if probe.caps is None:
            raise BackendUnavailableError(f"the sandbox backend '{name}' does not work here: {probe.reason}")
        _log_once(f"sandbox backend {name} ({probe.reason}), as asked for", probe)
        return backend
    return (await strongest(all_backends()))[0]


async def strongest(backends: Mapping[str, Backend]) -> tuple[Backend, Probe]:
    """The strongest of these that works here, and what its probe found; says once in the log which, and why.

    Raises BackendUnavailableError with the reason of each.
    """
    refused = []
    best: tuple[int, Backend, Probe] | None = None
    for backend in sorted(backends.values(), key=lambda backend: -backend.strength):
        if backend.strength <= (best[0] if best else _NEVER_AUTO):
            break  # it cannot win, and a probe takes time
        probe = await backend.probe()
        strength = effective_strength(backend, probe)
        if strength == _NEVER_AUTO:
            refused.append(f"{backend.name}: {probe.reason}")
        elif best is None or strength > best[0]:
            best = strength, backend, probe
    if best is None:
        raise BackendUnavailableError(
            "no kind of sandbox works on this machine. "
            + "; ".join(refused)
            + ". The weak backend 'landlock', for code "
            "that is trusted, must be asked for by name"
        )
    _, backend, probe = best
    why = f"sandbox backend {backend.name} ({probe.reason}) is the strongest that works here"
    _log_once(why + (f"; not {'; not '.join(refused)}" if refused else ""), probe)
    return backend, probe


def _log_once(text: str, probe: Probe) -> None:
    notes = "".join(f"; {note}" for note in probe.caps.notes) if probe.caps else ""
    if text not in _logged:
        _logged.add(text)
        log.info("%s%s", text, notes)
