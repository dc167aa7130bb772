"""The weak level: an ordinary process of the host that has given up most of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonlet.errors import BackendUnavailableError
from moonlet.sandbox.api import Sandbox
from moonlet.sandbox.backend import Template
from moonlet.sandbox.namespace.landlock import LandlockBackend
from moonlet.sandbox.namespace.landlock_rules import landlock_version
from moonlet.sandbox.processes import ProcessId
from tests.sandbox.conftest import Bench, open_bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench("landlock", tmp_path_factory.mktemp("state") / "s") as opened:
        yield opened


@pytest.fixture
def box(bench: Bench) -> Sandbox:
    return bench.shared()


def test_it_says_that_it_is_weak(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        box = await bench.create()
        assert (await box.info()).caps.isolation == "weak"
        await box.destroy()

    with caplog.at_level(logging.WARNING, logger="moonlet"):
        bench.run(work())
    assert any("weakly" in record.message for record in caplog.records)


def test_its_home_is_all_that_it_can_write(bench: Bench, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the host's")
    tmp_path.chmod(0o777)

    async def work() -> None:
        await box.write_file("deep/er/f", b"x")
        assert await box.read_file("deep/er/f") == b"x"
        for command in (
            f"cat {tmp_path}/secret",
            f"touch {tmp_path}/new",
            "ls /root /home",
            "touch /usr/x /etc/x /tmp/x",
        ):
            assert (await box.exec(command)).exit_code != 0, command
        assert (await box.exec("echo y > $TMPDIR/f && cat $TMPDIR/f && echo $HOME && pwd")).exit_code == 0

    bench.run(work())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_no_socket_reaches_out(bench: Bench, box: Sandbox, tmp_path: Path) -> None:
    """Not by name either, since what listens there may be strong. Pairs of sockets are left."""
    script = (
        "import socket\n"
        "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):\n"
        "    try: socket.socket(family); print('open')\n"
        "    except PermissionError: pass\n"
        "one, other = socket.socketpair(); one.send(b'hey'); print(other.recv(3).decode())\n"
    )
    assert bench.run(box.exec(["python3", "-c", script])).text == "hey\n"


def test_other_processes_are_out_of_reach(bench: Bench, box: Sandbox) -> None:
    environment = {**os.environ, "MOONLET_TEST_SECRET": "hidden"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        try:
            assert "hidden" not in bench.run(box.exec(f"cat /proc/{process.pid}/environ")).text
            if landlock_version() >= 6 or os.geteuid() == 0:
                assert bench.run(box.exec(f"kill -TERM {process.pid}")).exit_code != 0
                assert process.poll() is None
        finally:
            process.kill()


def test_nobody_is_left_at_the_end(bench: Bench) -> None:
    """No namespace ends them all: those that left their session and their parent must be found."""

    async def work() -> set[int]:
        box = await bench.create()
        await box.start("setsid sh -c 'sleep 600 & sleep 600' & (sleep 600 &) ; exec sleep 600", tag="many")
        while True:
            pids = {
                int(name) for name in os.listdir("/proc") if name.isdigit() and box.id.encode() in _environment(name)
            }
            if len(pids) >= 6:
                break
            await asyncio.sleep(0.02)
        await box.destroy()
        return pids

    pids = bench.run(work())
    assert [pid for pid in pids if ProcessId.of(pid)] == []


def _environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_dead_agent_takes_its_commands_along(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create()
        command = await box.start("sleep 600")
        machine = bench.manager._core.boxes[box.id].machine
        machine.init.kill(signal.SIGKILL)  # type: ignore[union-attr]
        while (await box.info()).state != "failed":
            await asyncio.sleep(0.02)
        assert not os.path.exists(f"/proc/{command.pid}") or box.id.encode() not in _environment(str(command.pid))
        await box.destroy()

    bench.run(work())


def test_pause_and_fork(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create()
        await box.write_file("f", b"parent")
        await box.start("sleep 600", tag="sleeper")
        await box.pause()
        await box.resume()
        assert (await box.process("sleeper")).pid
        child = (await box.fork(1))[0]
        assert isinstance(child, Sandbox)
        await child.write_file("f", b"child")
        assert (await box.read_file("f"), await child.read_file("f")) == (b"parent", b"child")
        for one in (box, child):
            await one.destroy()

    bench.run(work())


def test_it_cannot_change_the_root() -> None:
    from moonlet.sandbox.api import Limits

    with pytest.raises(BackendUnavailableError, match="host"):
        asyncio.run(LandlockBackend().prepare(Template("t", Path("/nowhere")), Limits(), lambda *_: None))
