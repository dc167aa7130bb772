"""Machines of gVisor themselves; what every backend must do is in test_contract.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moonlet.errors import SandboxDiedError, SandboxStateError, StorageError
from moonlet.sandbox.api import FailReason, Limits
from moonlet.sandbox.backend import Machine, MachineSpec, Probe, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.gvisor import GvisorBackend, cgroup
from moonlet.sandbox.gvisor.containers import container_id, find_processes
from moonlet.sandbox.processes import ProcessId

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /workspace/count.tmp; mv /workspace/count.tmp /workspace/count; sleep 0.05; done"
RUNSC = os.environ.get("MOONLET_TEST_RUNSC", "runsc")  # another version than the installed one
SMALL = Limits(memory_bytes=128 << 20, disk_bytes=64 << 20)


@cache
def _probe() -> Probe:
    return asyncio.run(GvisorBackend(RUNSC).probe())


@pytest.fixture(autouse=True)
def _works_here() -> None:
    if _probe().caps is None:
        if "gvisor" in os.environ.get("MOONLET_REQUIRE_BACKENDS", "").split(","):
            pytest.fail(f"gVisor is required and does not work: {_probe().reason}")
        pytest.skip(f"gVisor: {_probe().reason}")


class Bench:
    """Machines of one test, all released at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.label = f"test-{os.getpid()}-{abs(hash(folder)) % 10**6}"
        self.backend = GvisorBackend(RUNSC)
        self._streams: dict[Machine, GuestStream] = {}

    def spec(self, name: str, limits: Limits = SMALL, rootfs: Path | None = None) -> MachineSpec:
        template = Template("host" if rootfs is None else rootfs.name, rootfs)
        return MachineSpec(name, self.label, template, limits, hostname=name)

    def live(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def image(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name

    async def launch(self, name: str, limits: Limits = SMALL) -> Machine:
        return await self.backend.launch(self.spec(name, limits), self.live(name))

    async def guest(self, machine: Machine) -> Guest:
        """One at a time: two would take each other's answers."""
        if machine in self._streams:
            self._streams[machine].close()
        self._streams[machine] = await GuestStream.open(machine.endpoint(), timeout_s=20)
        return Guest(self._streams[machine])

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        await self.backend.sweep(self.label, set())


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    made = Bench(folder)
    try:
        yield made
    finally:
        await made.close()
    assert find_processes(made.label) == []
    assert cgroup.find_cgroups(made.label) == []


def run(folder: Path, work: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with bench(folder) as made:
            await work(made)

    asyncio.run(main())


async def count(guest: Guest) -> int:
    return int((await guest.exec("cat /workspace/count")).text)


async def counts_on(guest: Guest, above: int) -> int:
    """Wait until the counter process of the guest has got beyond `above`."""
    async with asyncio.timeout(20):
        while (now := await count(guest)) <= above:
            await asyncio.sleep(0.05)
    return now


async def start_counter(guest: Guest) -> None:
    await guest.start(COUNTER, tag="counter")
    async with asyncio.timeout(20):
        while (await guest.exec("test -e /workspace/count")).exit_code:
            await asyncio.sleep(0.05)


def test_three_generations_lose_nothing(tmp_path: Path) -> None:
    """Bugs B73, e2b-dev/E2B#884: losses from the second resume on."""
    data = os.urandom(5_000_000)

    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        guest = await made.guest(machine)
        await guest.write_file("/workspace/data", data)
        await guest.exec("exec 9> /tmp/gone; echo kept >&9; rm /tmp/gone; cp /workspace/data /etc/data")
        await start_counter(guest)
        for generation in range(3):
            before = await count(guest)
            image = made.image(f"gen-{generation}")
            await machine.save(image, is_final=True)
            await machine.destroy()
            assert find_processes(made.label) == []
            machine = await made.backend.restore(made.spec("a"), made.live(f"a{generation}"), image)
            guest = await made.guest(machine)
            assert await guest.read_file("/workspace/data") == data
            assert await guest.read_file("/etc/data") == data
            assert await counts_on(guest, before) > before
            assert (await guest.process("counter")).command_id

    run(tmp_path, work)


def test_three_forks_of_a_running_machine_part(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        source = await made.launch("a")
        guest = await made.guest(source)
        await start_counter(guest)
        image = made.image("image")
        await source.save(image, is_final=False)
        guest = await made.guest(source)
        before = await count(guest)
        forks = await asyncio.gather(
            *(made.backend.restore(made.spec(f"f{n}"), made.live(f"f{n}"), image) for n in range(3))
        )
        guests = [await made.guest(fork) for fork in forks]
        for number, child in enumerate(guests):
            await child.refresh(hostname=f"f{number}", machine_id=f"{number:032}")
            await child.exec(f"echo {number} > /workspace/who")
            assert await counts_on(child, 0)
        assert [(await child.exec("cat /workspace/who")).text for child in guests] == ["0\n", "1\n", "2\n"]
        assert [(await child.exec("hostname")).text for child in guests] == ["f0\n", "f1\n", "f2\n"]
        random = {(await child.exec("head -c 16 /dev/urandom | od -x")).text for child in [guest, *guests]}
        assert len(random) == 4
        assert (await guest.exec("test -e /workspace/who")).exit_code == 1
        assert await counts_on(guest, before) > before  # the source never stopped for good

    run(tmp_path, work)


def test_frozen_machine_stands_still_and_goes_on(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        guest = await made.guest(machine)
        await start_counter(guest)
        await machine.freeze()
        await machine.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await guest.exec("true")
        await machine.thaw()
        await machine.thaw()
        assert await counts_on(guest, await count(guest))

    run(tmp_path, work)


def test_machine_outlives_the_service_that_made_it(tmp_path: Path) -> None:
    code = f"""
        import asyncio, os, signal
        from pathlib import Path
        from test_gvisor import COUNTER, Bench, start_counter

        async def main():
            made = Bench(Path({str(tmp_path)!r}))
            made.label = "test-outlive-{os.getpid()}"
            machine = await made.launch("a")
            guest = await made.guest(machine)
            await start_counter(guest)
            os.write(os.open(machine.endpoint().to_guest, os.O_RDWR), b'{{"id": 7, "op": "sta')
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=here, timeout=60)
    assert done.returncode == -signal.SIGKILL

    async def work(made: Bench) -> None:
        made.label = f"test-outlive-{os.getpid()}"
        machine = await made.backend.attach(made.spec("a"), made.live("a"))
        guest = await made.guest(machine)
        assert await counts_on(guest, await count(guest))

    run(tmp_path, work)


def test_kill_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """The service dies while the machine is between two lives: the checkpoint is whole or the machine still runs."""
    code = f"""
        import asyncio, os, signal
        from pathlib import Path
        from test_gvisor import Bench, start_counter

        async def main():
            made = Bench(Path({str(tmp_path)!r}))
            made.label = "test-save-{os.getpid()}"
            machine = await made.launch("a")
            await start_counter(await made.guest(machine))
            machine._fill_image = lambda image: os.kill(os.getpid(), signal.SIGKILL)
            await machine.save(made.image("image"), is_final=True)

        asyncio.run(main())
    """
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=here, timeout=60)
    assert done.returncode == -signal.SIGKILL

    async def work(made: Bench) -> None:
        made.label = f"test-save-{os.getpid()}"
        machine = await made.backend.attach(made.spec("a"), made.live("a"))
        guest = await made.guest(machine)
        assert await counts_on(guest, await count(guest))
        assert not (made.folder / "a" / "saved").exists()

    run(tmp_path, work)


def test_hog_ends_the_machine_with_the_reason(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        guest = await made.guest(machine)
        death = asyncio.ensure_future(machine.wait_dead())
        await guest.start("exec python3 -c 'x = bytearray(1 << 30); print(len(x))'")
        async with asyncio.timeout(30):
            assert await death == FailReason.OOM
        with pytest.raises(SandboxDiedError) as caught:
            await made.backend.attach(made.spec("a"), made.live("a"))
        assert caught.value.reason == FailReason.OOM
        await machine.destroy()
        await machine.destroy()

    run(tmp_path, work)


@pytest.mark.slow
def test_without_control_groups_memory_is_watched(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        found = await made.backend._find()
        made.backend._found = replace(found, runsc=replace(found.runsc, has_cgroups=False))
        machine = await made.launch("a")
        guest = await made.guest(machine)
        await guest.exec("head -c 30M /dev/urandom > /workspace/data")
        assert 30 << 20 < machine.usage().memory_bytes < 100 << 20
        death = asyncio.ensure_future(machine.wait_dead())
        await guest.start(["python3", "-c", "import time; x = bytearray(400 << 20); time.sleep(60)"])
        async with asyncio.timeout(30):
            assert await death == FailReason.OOM

    run(tmp_path, work)


def test_end_of_the_sentry_is_a_crash(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        death = asyncio.ensure_future(machine.wait_dead())
        await asyncio.sleep(0)
        os.kill(int((made.folder / "a" / "pid").read_text()), signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await death == FailReason.CRASH
        with pytest.raises(SandboxDiedError):
            await machine.freeze()
        assert machine.usage().memory_bytes == 0

    run(tmp_path, work)


def test_a_save_is_no_death(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        death = asyncio.ensure_future(machine.wait_dead())
        await machine.save(made.image("one"), is_final=False)
        await machine.save(made.image("two"), is_final=True)
        await machine.thaw()  # a commit that failed after all
        assert (await (await made.guest(machine)).exec("echo on")).text == "on\n"
        assert not death.done()
        os.kill(int((made.folder / "a" / "pid").read_text()), signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await death == FailReason.CRASH

    run(tmp_path, work)


@pytest.mark.slow
def test_a_cancelled_save_leaves_the_machine_running(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        await start_counter(await made.guest(machine))
        for delay_s in (0.0, 0.02, 0.06, 0.1, 0.15, 0.25):
            task = asyncio.ensure_future(machine.save(made.image(f"image-{delay_s}"), is_final=False))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
            guest = await made.guest(machine)
            assert await counts_on(guest, await count(guest))

    run(tmp_path, work)


@pytest.mark.slow
def test_destroy_in_the_middle_of_a_save(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        for number, delay_s in enumerate((0.02, 0.08, 0.2, 0.3)):
            machine = await made.launch(f"a{number}")
            task = asyncio.ensure_future(machine.save(made.image(f"image{number}"), is_final=False))
            await asyncio.sleep(delay_s)
            await machine.destroy()
            await asyncio.wait([task])
            assert find_processes(made.label) == []

    run(tmp_path, work)


@pytest.mark.slow
def test_a_cancelled_launch_leaves_nothing(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        await made.backend.probe()
        for number, delay_s in enumerate((0.01, 0.05, 0.1, 0.15, 0.2)):
            task = asyncio.ensure_future(made.launch(f"a{number}"))
            await asyncio.sleep(delay_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).destroy()
            assert find_processes(made.label) == []

    run(tmp_path, work)


@pytest.mark.slow
def test_full_disk_of_the_image_leaves_the_machine_running(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")

    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        guest = await made.guest(machine)
        await guest.write_file("/workspace/data", os.urandom(6 << 20))
        await start_counter(guest)
        image = made.image("image")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", image], check=True)
        try:
            with pytest.raises(StorageError, match="free some space"):
                await machine.save(image, is_final=True)
        finally:
            subprocess.run(["umount", image], check=True)
        guest = await made.guest(machine)
        assert await counts_on(guest, await count(guest))
        assert (await guest.exec("wc -c < /workspace/data")).text.strip() == str(6 << 20)

    run(tmp_path, work)


def test_full_disk_of_the_machine_is_seen_before_it_could_end_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")

    async def work(made: Bench) -> None:
        live = made.live("a")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", live], check=True)
        try:
            machine = await made.launch("a")
            guest = await made.guest(machine)
            await start_counter(guest)
            with pytest.raises(StorageError, match="free some space"):
                await machine.save(made.image("image"), is_final=True)
            assert await counts_on(guest, await count(guest))
        finally:
            await made.close()
            subprocess.run(["umount", live], check=True)

    run(tmp_path, work)


def test_sweep_takes_what_is_not_kept(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        kept, stray = await made.launch("a"), await made.launch("a.b")
        found = await made.backend.sweep(made.label, {"a"})
        assert any(container_id(made.label, "a.b", 1) in line for line in found)
        assert {one.sandbox for one in find_processes(made.label)} == {"a"}
        assert (await (await made.guest(kept)).exec("true")).exit_code == 0
        assert await made.backend.sweep(made.label[:-1], set()) == []
        await stray.destroy()

    run(tmp_path, work)


@pytest.mark.slow
def test_image_of_another_version_is_refused(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a")
        image = made.image("image")
        await machine.save(image, is_final=True)
        facts = (image / "machine.json").read_text()
        (image / "machine.json").write_text(facts.replace('"version": "', '"version": "1'))
        with pytest.raises(SandboxStateError, match="install that version again"):
            await made.backend.restore(made.spec("b"), made.live("b"), image)
        with pytest.raises(SandboxStateError, match="no image"):
            await made.backend.restore(made.spec("b"), made.live("b"), made.image("empty"))

    run(tmp_path, work)


def test_guest_sees_neither_the_host_nor_a_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")

    async def work(made: Bench) -> None:
        guest = await made.guest(await made.launch("a"))
        assert (await guest.exec(["cat", str(secret)])).exit_code == 1
        assert (await guest.exec("touch /usr/new; touch /bin/new")).exit_code == 1
        assert (await guest.exec("ls /sys/class/net")).text.split() in (["lo"], [])
        reach = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
        assert "OSError" in (await guest.exec(["python3", "-c", reach])).error_text
        listed = await guest.exec("ls -l / && stat /usr && id -un")
        assert listed.exit_code == 0
        assert listed.text.endswith("root\n")

    run(tmp_path, work)


@pytest.mark.slow
def test_fork_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        machine = await made.launch("a", Limits(memory_bytes=256 << 20, processes=40))
        guest = await made.guest(machine)
        assert (await guest.exec("hostname other; hostname")).text == "a\n"  # what forbids it also bounds processes
        bomb = "for i in $(seq 200); do sleep 30 & done; echo through"
        told = await guest.exec(bomb, timeout_s=30)
        assert "fork" in told.error_text
        assert (await guest.usage()).processes <= 60

    run(tmp_path, work)


def test_full_guest_disk_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    async def work(made: Bench) -> None:
        guest = await made.guest(await made.launch("a"))
        told = await guest.exec("head -c 500M /dev/zero > /workspace/big")
        assert told.exit_code != 0
        assert (await guest.exec("rm /workspace/big; echo well")).text == "well\n"

    run(tmp_path, work)


def test_process_is_known_by_its_start(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    known = ProcessId.of(child.pid)
    assert known is not None and known.is_alive()
    assert not ProcessId(child.pid, known.start + 1).is_alive()
    ProcessId(child.pid, known.start + 1).kill()
    assert known.is_alive()
    known.kill()
    asyncio.run(known.ended())
    assert ProcessId.of(child.pid) is None
    child.wait()


@pytest.mark.slow
def test_an_ordinary_user_gets_machines_or_an_honest_answer(tmp_path: Path) -> None:
    """Versions of 2024 and newer work for everyone; the one of 2022 for root only, and then says what to install."""
    home = Path(tempfile.mkdtemp(prefix="moonlet-user-"))
    code = f"""
        import asyncio
        from moonlet.sandbox.gvisor import GvisorBackend
        probe = asyncio.run(GvisorBackend({RUNSC!r}).probe())
        print(probe.caps.processes_survive_pause if probe.caps else probe.reason)
    """
    root = str(Path(__file__).parents[2])
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    run = ["env", f"HOME={home}", f"XDG_CACHE_HOME={home}/cache", f"PYTHONPATH={root}", "PYTHONDONTWRITEBYTECODE=1"]
    program = ["/usr/bin/python3", "-c", textwrap.dedent(code)]
    try:
        if (
            os.geteuid() != 0
            or subprocess.run([*user, *run, *program[:2], "import moonlet.errors"], cwd="/").returncode
        ):
            pytest.skip("needs root, and a checkout and a Python that others may read")
        os.chown(home, 65534, 65534)
        done = subprocess.run([*user, *run, *program], cwd="/", capture_output=True, text=True, timeout=60)
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True" or "works for root only: install gVisor" in done.stdout
