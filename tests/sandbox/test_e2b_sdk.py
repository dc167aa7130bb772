"""The real `e2b` package, unmodified, of two versions and both kinds, against our service on every kind of machine.

Each version has a virtual environment of its own, made once below MOONLET_TEST_CACHE (default ~/.cache/moonlet-tests).
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox.scripted_backend import ScriptedBackend
from sandbox.service_thread import ServiceThread

from moonlet.sandbox.backend import Backend

pytestmark = pytest.mark.slow
VERSIONS = {"2.30.0": "e2b==2.30.0", "newest": "e2b>=2.63"}
PROGRAM = Path(__file__).with_name("e2b_program.py")


def python_with(version: str) -> Path:
    """The interpreter of an environment with that version. Skips where none can be installed, unless it is demanded."""
    cache = Path(os.environ.get("MOONLET_TEST_CACHE") or Path.home() / ".cache" / "moonlet-tests")
    folder = cache / f"e2b-{version}-py{sys.version_info[0]}{sys.version_info[1]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run on several workers
        if not (folder / "complete").exists():
            failure = _install(folder, VERSIONS[version])
            if failure and os.environ.get("MOONLET_REQUIRE_BACKENDS"):
                pytest.fail(f"e2b {version} is required and cannot be installed: {failure}")
            if failure:
                pytest.skip(f"e2b {version} cannot be installed: {failure}")
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _install(folder: Path, requirement: str) -> str:
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return ""


@pytest.fixture(scope="module", params=["scripted", "namespace", "gvisor", "microvm"])
def service(request, tmp_path_factory, require_backend):
    """A service on that backend; the scripted one, which isolates nothing, shows what is ours alone."""
    backend: Backend = ScriptedBackend()
    if request.param != "scripted":
        require_backend(request.param)
        from moonlet.sandbox.choose import make_backend

        backend = make_backend(request.param)
    with ServiceThread(tmp_path_factory.mktemp("service"), backend, create_timeout_s=300.0) as running:
        yield running
        assert running.open_streams() == 0
        assert not running.manager.ids()


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_works_unmodified(service, version, kind) -> None:
    python = python_with(version)
    probe = service.call(service.backend.probe())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")} | {
        "E2B_API_URL": service.url,
        "E2B_SANDBOX_URL": service.url,
        "E2B_API_KEY": service.api_key,
        "MEMORY": str(int(probe.caps.processes_survive_pause or not probe.caps.frees_memory)),
    }
    done = subprocess.run([python, PROGRAM, kind], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    print(done.stdout)
