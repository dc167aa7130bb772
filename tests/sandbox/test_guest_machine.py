"""What a guest agent does to its machine, and how it comes into being."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from sandbox.guest_process import with_guest

from moonlet.errors import BackendUnavailableError
from moonlet.sandbox.guest import build
from moonlet.sandbox.guest.client import Guest


def test_an_agent_that_is_not_alone_leaves_the_machine_as_it_is(tmp_path: Path) -> None:
    """Not process 1: the names and the clock are those of somebody else's machine."""
    name, machine = socket.gethostname(), Path("/etc/machine-id")
    before = machine.read_bytes() if machine.exists() else b""

    async def work(guest: Guest) -> None:
        await guest.refresh(hostname="moonlet-test", machine_id="0" * 32)
        assert socket.gethostname() == name
        assert (machine.read_bytes() if machine.exists() else b"") == before
        reply = await guest.stream.call("settime", time=time.time() + 86400)
        assert not reply.flag("done")
        reply = await guest.stream.call("reseed", body=b"x" * 64)
        assert reply.flag("mixed") and not reply.flag("credited")
        await guest.sync()
        usage = await guest.usage()
        assert usage.processes > 1 and usage.memory_bytes > 0

    with_guest(tmp_path, work)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_an_agent_that_is_process_1_names_its_machine_and_reaps(tmp_path: Path) -> None:
    from sandbox.guest_process import AgentProcess, wait_until

    wrap = ["unshare", "--user", "--map-root-user", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are forbidden here")

    async def run() -> None:
        agent = AgentProcess(tmp_path, wrap=wrap)
        try:
            guest = await agent.open()
            await guest.stream.call("identity", hostname="moonlet-test")
            assert (await guest.exec("hostname; echo $PPID")).text.splitlines()[0] == "moonlet-test"
            await guest.exec("(setsid sh -c 'sleep 0.05 & sleep 0.1 &' &)")
            async with asyncio.timeout(20):
                while len((await guest.exec("ls -d /proc/[0-9]*")).text.split()) > 4:  # 1, supervisor, sh, ls
                    await asyncio.sleep(0.02)
            guest.stream.close()
        finally:
            agent.process.kill()
            agent.process.wait()
        await wait_until(lambda: agent.process.poll() is not None)

    import asyncio

    asyncio.run(run())


def test_the_agent_is_static_and_built_once() -> None:
    first = build.guest_binary()
    assert first == build.guest_binary() and os.access(first, os.X_OK)
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert subprocess.run([first, "--nonsense"], capture_output=True).returncode == 2
    assert subprocess.run([first, "--processes", "x"], capture_output=True).returncode == 2
    assert subprocess.run([first, "--home"], capture_output=True).returncode == 2
    done = subprocess.run([first, "--device", "/no/such/port"], capture_output=True, text=True)
    assert done.returncode == 1 and "/no/such/port" in done.stderr


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build.guest_binary.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="apt-get install gcc"):
            build.guest_binary()
    finally:
        build.guest_binary.cache_clear()


def test_without_a_static_library_it_is_dynamic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    real = shutil.which("cc") or shutil.which("gcc")
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-static*) echo cannot find -lc >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.guest_binary.cache_clear()
    build._cache_folder.cache_clear()
    try:
        binary = build.guest_binary()
        assert "dynamically" in caplog.text and binary.is_relative_to(tmp_path)
        broken = tmp_path / "broken"
        broken.write_text("#!/bin/sh\necho no headers >&2; exit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        build.guest_binary.cache_clear()
        with pytest.raises(BackendUnavailableError, match="no headers"):
            build.guest_binary()
    finally:
        build.guest_binary.cache_clear()
        build._cache_folder.cache_clear()


def test_all_sources_are_in_the_package() -> None:
    """`package-data` names them by pattern: nothing may lie where it does not reach."""
    files = {path.name for path in build.SOURCE_FOLDER.rglob("*") if path.suffix in (".c", ".h")}
    assert files == {path.name for path in build.SOURCE_FOLDER.iterdir() if path.suffix in (".c", ".h")}
    assert all(len(path.read_text().splitlines()) < 600 for path in build.SOURCE_FOLDER.glob("*.[ch]"))
