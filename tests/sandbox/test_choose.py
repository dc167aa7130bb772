"""Which backend is taken, and what is said when there is none."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moonlet.errors import BackendUnavailableError, ConfigError
from moonlet.sandbox.api import Caps
from moonlet.sandbox.backend import Probe
from moonlet.sandbox.choose import all_backends, choose, make_backend, strongest
from tests.sandbox.scripted_backend import ScriptedBackend


def candidate(name: str, strength: int, isolation: str | None, reason: str = "it runs") -> ScriptedBackend:
    """A backend whose probe answers as told; isolation None: it does not work."""

    class Candidate(ScriptedBackend):
        probed = False

        async def probe(self) -> Probe:
            self.probed = True
            if isolation is None:
                return Probe(name, None, reason)
            return Probe(name, Caps(False, False, False, isolation, True), reason, "1")  # type: ignore[arg-type]

    Candidate.name, Candidate.strength = name, strength
    return Candidate()


def pick(*backends: ScriptedBackend) -> str:
    backend, _ = asyncio.run(strongest({backend.name: backend for backend in backends}))
    return backend.name


def test_the_strongest_that_works() -> None:
    vm, kernel, spaces = (
        candidate("microvm", 40, "vm", "a guest boots with KVM"),
        candidate("gvisor", 30, "user-kernel"),
        candidate("namespace", 20, "namespaces"),
    )
    assert pick(spaces, kernel, vm) == "microvm"
    assert pick(spaces, kernel, candidate("microvm", 40, None)) == "gvisor"
    assert pick(spaces, candidate("gvisor", 30, None)) == "namespace"


def test_an_emulated_machine_only_if_nothing_else_works() -> None:
    emulated = candidate("microvm", 40, "vm", "a guest boots with TCG")
    assert pick(emulated, candidate("namespace", 20, "namespaces")) == "namespace"
    assert pick(emulated, candidate("namespace", 20, None)) == "microvm"


def test_a_weak_one_is_never_chosen() -> None:
    with pytest.raises(BackendUnavailableError, match=r"namespace: no user namespaces.*landlock"):
        pick(candidate("landlock", 0, "weak"), candidate("namespace", 20, None, "no user namespaces"))


def test_a_weak_one_is_not_even_tried() -> None:
    weak = candidate("landlock", 0, "weak")
    pick(weak, candidate("namespace", 20, "namespaces"))
    assert not weak.probed


def test_names() -> None:
    assert set(all_backends()) == {"microvm", "firecracker", "gvisor", "namespace", "landlock"}
    assert make_backend("namespace").name == "namespace"
    with pytest.raises(ConfigError, match="did you mean 'namespace'"):
        make_backend("namespaces")


def test_choosing_by_name_says_so_once(require_backend, caplog: pytest.LogCaptureFixture) -> None:
    require_backend("namespace")
    with caplog.at_level(logging.INFO, logger="moonlet"):
        for _ in range(2):
            assert asyncio.run(choose("namespace")).name == "namespace"
    assert len([record for record in caplog.records if "as asked for" in record.message]) <= 1
