"""Virtual machines themselves; what every backend must do is in test_contract.py."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moonlet.errors import (
    GuestFileError,
    SandboxDiedError,
    SandboxError,
    SandboxStateError,
    SnapshotError,
    StorageError,
)
from moonlet.sandbox.api import FailReason, Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.microvm.backend import MicrovmBackend
from moonlet.sandbox.microvm.image import COPY_LIMIT_BYTES
from moonlet.sandbox.microvm.machine import QemuMachine
from moonlet.sandbox.microvm.saved import Saved
from moonlet.sandbox.processes import ProcessId
from tests.sandbox.conftest import require

pytestmark = pytest.mark.slow

MIB = 1 << 20
LIMITS = Limits(memory_bytes=256 * MIB)  # as the contract suite: one template boots for both
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > n.tmp; mv n.tmp count; sleep 0.1; done"


@pytest.fixture(scope="module", autouse=True)
def _works_here() -> None:
    require("microvm")


class Bench:
    """Machines of one test, all ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.label = f"test-{uuid.uuid4().hex[:12]}"
        self.backend = MicrovmBackend()
        self.streams: list[GuestStream] = []

    def spec(self, name: str) -> MachineSpec:
        return MachineSpec(name, self.label, Template("host"), LIMITS, name)

    def new(self, name: str) -> Path:
        (self.folder / name).mkdir(mode=0o700)
        return self.folder / name

    async def launch(self, name: str) -> QemuMachine:
        await self.backend.prepare(Template("host"), LIMITS, lambda what, share: None)
        return await self.backend.launch(self.spec(name), self.new(name))

    async def restore(self, name: str, image: Path) -> QemuMachine:
        return await self.backend.restore(self.spec(name), self.new(name), image)

    async def guest(self, machine: QemuMachine) -> Guest:
        stream = await GuestStream.open(machine.endpoint(), timeout_s=30)
        self.streams.append(stream)
        guest = Guest(stream)
        await guest.refresh(
            hostname=machine.spec.id, machine_id=hashlib.sha256(machine.spec.id.encode()).hexdigest()[:32]
        )
        return guest


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Bench], Awaitable[None]]], None]:
    async def main(work: Callable[[Bench], Awaitable[None]]) -> None:
        bench = Bench(tmp_path)
        try:
            await work(bench)
        finally:
            for stream in bench.streams:
                stream.close()
            await bench.backend.sweep(bench.label, set())

    return lambda work: asyncio.run(main(work))


async def count(guest: Guest) -> int:
    with contextlib.suppress(Exception):
        return int(await guest.read_file("count"))
    return 0


async def goes_on(guest: Guest) -> None:
    """The counter counts."""
    first = await count(guest)
    deadline = time.monotonic() + 60
    while await count(guest) <= first:
        assert time.monotonic() < deadline, "the counter stands still"
        await asyncio.sleep(0.02)


async def said(guest: Guest, command: str, timeout_s: float = 60.0) -> str:
    """Nothing while there is no room for another process."""
    with contextlib.suppress(GuestFileError):
        return (await guest.exec(command, timeout_s=timeout_s)).text
    return ""


async def digest(guest: Guest, path: str) -> str:
    return (await guest.exec(f"sha256sum {path}", timeout_s=300)).text.split()[0]


def fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()[: 64 * MIB]).hexdigest())
        for path in folder.iterdir()
    }


# -- pause and resume -------------------------------------------------------------------------------------------------
def test_a_saved_machine_is_whole_and_stays_as_it_is(run) -> None:
    """Three generations, each deleted when the next is there; an image may be restored twice at once."""

    async def work(bench: Bench) -> None:
        machine = await bench.launch("m0")
        guest = await bench.guest(machine)
        data = os.urandom(5_000_000)
        await guest.write_file("five", data)
        counter = await guest.start(COUNTER)
        await goes_on(guest)
        image = None
        for number in range(1, 4):
            new = bench.new(f"gen{number}")
            await machine.save(new, is_final=True)
            await machine.destroy()
            shutil.rmtree(machine.folder)
            if image:
                shutil.rmtree(image)
            image = new
            before = fingerprint(image)
            machine = await bench.restore(f"m{number}", image)
            guest = await bench.guest(machine)
            await goes_on(guest)
            await guest.exec("echo more >> log; sync")
            assert await digest(guest, "five") == hashlib.sha256(data).hexdigest()
            assert fingerprint(image) == before
        assert (await guest.read_file("log")).count(b"more") == 3
        assert image is not None
        twin = await bench.guest(await bench.restore("twin", image))
        assert (await twin.read_file("log")).count(b"more") == 2
        assert [info.pid for info in await twin.processes()] == [counter.pid]

    run(work)


def test_snapshot_of_a_running_machine_with_a_large_disk(run) -> None:
    """Its top layer is not copied: it becomes one that both share, and both write to their own."""

    async def work(bench: Bench) -> None:
        machine = await bench.launch("source")
        guest = await bench.guest(machine)
        await guest.start(COUNTER)
        await guest.exec(f"head -c {COPY_LIMIT_BYTES + 8 * MIB} /dev/urandom > big; sync", timeout_s=300)
        expected = await digest(guest, "big")
        images = [bench.new("image0"), bench.new("image1")]
        await machine.save(images[0], is_final=False)
        await goes_on(guest)
        top = machine.saved.layer
        assert (images[0] / f"disk-{top - 1}").samefile(machine.folder / f"disk-{top - 1}")
        await guest.exec("echo source > who; sync")
        await machine.save(images[1], is_final=False)
        assert machine.saved.layer == top  # little was written since
        await machine.destroy()
        shutil.rmtree(machine.folder)
        for name, image, who in (("a", images[0], ""), ("b", images[1], "source\n")):
            child = await bench.guest(await bench.restore(name, image))
            shutil.rmtree(image)
            await goes_on(child)
            assert (await child.exec("cat who")).text == who
            assert await digest(child, "big") == expected

    run(work)


def test_frozen_stays_frozen_through_a_snapshot(run) -> None:
    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        guest = await bench.guest(machine)
        await guest.start(COUNTER)
        await machine.freeze()
        await machine.freeze()
        await machine.save(bench.new("image"), is_final=False)
        assert (await machine._ask("query-status"))["status"] != "running"
        await machine.thaw()
        await machine.thaw()
        await goes_on(guest)

    run(work)


def test_a_clone_draws_its_own_numbers_and_knows_the_time(run) -> None:
    """B75, and a second snapshot within a second of the first is heard."""

    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        await bench.guest(machine)
        image = bench.new("image")
        await machine.save(image, is_final=False)
        script = "import os, uuid, time; print(os.urandom(8).hex(), uuid.uuid4(), time.time())"
        said = []
        for name in ("a", "b", "c"):
            child = await bench.restore(name, image)
            again = bench.new(f"{name}-image")
            await child.save(again, is_final=True)
            await child.destroy()
            guest = await bench.guest(await bench.restore(f"{name}2", again))
            before = time.time()
            said.append((await guest.exec(["python3", "-c", script])).text.split())
            assert before - 0.5 < float(said[-1][2]) < time.time() + 0.5
        assert len({words[0] for words in said}) == len({words[1] for words in said}) == 3

    run(work)


# -- faults -----------------------------------------------------------------------------------------------------------
def test_a_full_disk_while_saving(run, tmp_path: Path) -> None:
    """A 4 MiB file system: nothing fits, the machine goes on and can be saved elsewhere."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", small]).returncode:
        pytest.skip("a small file system needs the right to mount")

    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        guest = await bench.guest(machine)
        await guest.start(COUNTER)
        for is_final in (True, False):
            (small / f"image{is_final}").mkdir()
            with pytest.raises(StorageError):
                await machine.save(small / f"image{is_final}", is_final=is_final)
            shutil.rmtree(small / f"image{is_final}")
            await goes_on(guest)
        (small / "state-only").mkdir()
        with (small / "filler").open("wb") as filler, contextlib.suppress(OSError):
            filler.write(b"x" * 8 * MIB)
        with pytest.raises(StorageError):
            await machine.save(small / "state-only", is_final=False)
        await goes_on(guest)
        image = bench.new("image")
        await machine.save(image, is_final=True)
        await machine.destroy()
        await goes_on(await bench.guest(await bench.restore("again", image)))

    try:
        run(work)
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_killed_machine_is_noticed(run) -> None:
    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        guest = await bench.guest(machine)
        waiting = asyncio.ensure_future(guest.exec("sleep 600"))
        dead = asyncio.ensure_future(machine.wait_dead())
        await asyncio.sleep(0)
        assert not dead.done()
        machine.process.kill(signal.SIGKILL)
        assert await dead == FailReason.CRASH
        with pytest.raises(SandboxDiedError):
            await waiting
        with pytest.raises(SandboxDiedError):
            await machine.save(bench.new("image"), is_final=True)
        await machine.destroy()
        await machine.destroy()
        assert not Path(f"/proc/{machine.process.pid}").exists()

    run(work)


def test_a_panic_of_the_guest_ends_it_with_last_words(run) -> None:
    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        guest = await bench.guest(machine)
        assert (await guest.exec("echo c > /proc/sysrq-trigger; echo alive")).text == "alive\n"
        with pytest.raises(SandboxDiedError):
            await guest.exec("umount /proc/sysrq-trigger && echo c > /proc/sysrq-trigger")
        assert await machine.wait_dead() == FailReason.CRASH
        assert "sysrq triggered crash" in (machine.folder / "console.log").read_text()
        assert machine.usage().memory_bytes == 0

    run(work)


def test_a_memory_hog_and_a_fork_bomb_leave_the_agent_alive(run) -> None:
    async def work(bench: Bench) -> None:
        guest = await bench.guest(await bench.launch("m"))
        hog = "b = []\nwhile True: b.append(bytearray(4 << 20))"
        assert (await guest.exec(["python3", "-c", hog], timeout_s=300)).exit_code != 0
        await said(guest, "b() { b | b & }; b; while :; do sleep 600; done", timeout_s=20)
        deadline = time.monotonic() + 120
        while not (limit := await said(guest, "cat /proc/sys/kernel/threads-max")):
            assert time.monotonic() < deadline
        assert 0 < int(limit) <= LIMITS.processes + 96

    run(work)


@pytest.mark.parametrize("damage", ["state", "pages", "version", "format", "layer", "empty"])
def test_a_damaged_image_is_refused_and_leaves_nothing(run, damage: str) -> None:
    async def work(bench: Bench) -> None:
        machine = await bench.launch("m")
        await bench.guest(machine)
        image = bench.new("image")
        await machine.save(image, is_final=True)
        await machine.destroy()
        saved = Saved.read(image)
        if damage in ("state", "pages"):
            data = (image / damage).read_bytes()
            (image / damage).write_bytes(data[: len(data) // 2])
        elif damage == "version":
            replace(saved, identity="QEMU 1.0 tcg/max").write(image)
        elif damage == "format":
            replace(saved, format=99).write(image)
        elif damage == "layer":
            (image / "disk-1").unlink()
        else:
            shutil.rmtree(image)
            image.mkdir()
        with pytest.raises((SandboxStateError, SnapshotError, SandboxDiedError)):
            await bench.restore("again", image)
        assert await bench.backend.sweep(bench.label, set()) == []

    run(work)


def test_a_damaged_template_boots_again(run) -> None:
    async def work(bench: Bench) -> None:
        limits = replace(LIMITS, memory_bytes=200 * MIB)
        spec = replace(bench.spec("m"), limits=limits)
        await bench.backend.prepare(spec.template, limits, lambda what, share: None)
        assert bench.backend._templates is not None
        async with bench.backend._templates.held(spec.template, limits) as template:
            state = (template / "state").read_bytes()
            (template / "state").write_bytes(state[: len(state) // 2])
        with pytest.raises(SandboxError, match="try again"):
            await bench.backend.launch(spec, bench.new("m"))
        machine = await bench.backend.launch(spec, bench.new("again"))
        assert (await (await bench.guest(machine)).exec("echo alive")).text == "alive\n"

    run(work)


# -- after the end of a service ---------------------------------------------------------------------------------------
SERVICE = """
import asyncio, sys
from pathlib import Path
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from tests.sandbox.test_microvm import COUNTER, Bench

async def main():
    bench = Bench(Path(sys.argv[1]))
    bench.label = sys.argv[2]
    machine = await bench.launch("m")
    guest = await bench.guest(machine)
    await guest.start(COUNTER)
    if sys.argv[3] == "frozen":
        await machine.freeze()
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_a_machine_outlives_the_service_that_started_it(run, state: str) -> None:
    async def work(bench: Bench) -> None:
        root = Path(__file__).parents[2]
        service = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(bench.folder), bench.label, state],
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
            stdout=subprocess.PIPE,
        )
        try:
            assert service.stdout is not None
            assert await asyncio.to_thread(service.stdout.readline) == b"ready\n"
        finally:
            service.kill()
            service.communicate()
        assert await bench.backend.sweep(bench.label, {"m"}) == []
        machine = await bench.backend.attach(bench.spec("m"), bench.folder / "m")
        await machine.thaw()
        guest = await bench.guest(machine)
        await goes_on(guest)
        image = bench.new("image")
        await machine.save(image, is_final=True)
        await machine.destroy()
        await goes_on(await bench.guest(await bench.restore("again", image)))
        with pytest.raises(SandboxDiedError):
            await bench.backend.attach(bench.spec("m"), bench.folder / "m")

    run(work)


def test_attach_where_nothing_is(run) -> None:
    async def work(bench: Bench) -> None:
        with pytest.raises(SandboxDiedError) as caught:
            await bench.backend.attach(bench.spec("m"), bench.new("m"))
        assert caught.value.reason == FailReason.LOST

    run(work)


def test_sweep_ends_machines_of_its_label_only(run) -> None:
    """Also a machine that booted a template for a process which is gone, and one whose folder was removed."""

    async def work(bench: Bench) -> None:
        gone = subprocess.Popen(["true"])
        identity = ProcessId.of(gone.pid)
        gone.wait()
        start = identity.start if identity else 1
        me = ProcessId.of(os.getpid())
        assert me is not None
        marks = {
            "own": f"guest=moonlet/{bench.label}/a",
            "kept": f"guest=moonlet/{bench.label}/b",
            "other": f"guest=moonlet/{bench.label}-x/a",
            "below": f"guest=moonlet/x/{bench.label}/a",
            "orphan": f"guest=moonlet/template/{gone.pid}.{start}.x",
            "boots": f"guest=moonlet/template/{me.pid}.{me.start}.x",
            "homeless": f"guest=moonlet/{bench.label}-y/a",
        }
        homes = {name: bench.new(name) for name in marks}
        code = "import sys; sys.stdin.read()"
        children = {
            name: subprocess.Popen([sys.executable, "-c", code, mark], stdin=subprocess.PIPE, cwd=homes[name])
            for name, mark in marks.items()
        }
        try:
            homes["homeless"].rmdir()
            found = await bench.backend.sweep(bench.label, {"b"})
            assert len(found) >= 3
            killed = {name for name, child in children.items() if child.poll() is not None}
            assert killed == {"own", "orphan", "homeless"}
        finally:
            for child in children.values():
                child.kill()
                child.communicate()

    run(work)


# -- everything else --------------------------------------------------------------------------------------------------
def test_kvm_is_believed_only_if_a_guest_boots_with_it(run) -> None:
    async def work(bench: Bench) -> None:
        probe = await bench.backend.probe()
        assert probe.caps is not None and probe.caps.isolation == "vm"
        machine = await bench.launch("m")
        command = Path(f"/proc/{machine.process.pid}/cmdline").read_bytes().split(b"\0")
        assert (b"kvm" in command) == (" kvm/" in probe.version)
        if " tcg/" in probe.version:
            assert "emulated (TCG)" in probe.caps.notes[0]

    run(work)


def test_unchanged_memory_is_shared_and_a_machine_uses_what_it_changed(run) -> None:
    async def work(bench: Bench) -> None:
        machines = [await bench.launch(f"m{number}") for number in range(3)]
        for machine in machines:
            await bench.guest(machine)
        rams = {(machine.folder / "guest.ram").stat().st_ino for machine in machines}
        assert len(rams) == 1
        usage = machines[0].usage()
        assert 0 < usage.memory_bytes < 200 * MIB
        assert 0 < usage.disk_bytes < 8 * MIB
        image = bench.new("image")
        await machines[0].save(image, is_final=True)
        assert (image / "pages").stat().st_size < 96 * MIB
        assert {path.stat().st_mode & 0o077 for path in image.iterdir() if path.name in ("pages", "state")} <= {
            0,
            0o044,
        }

    run(work)


def test_cancelled_launches_leave_nothing(run) -> None:
    """B77: at ten points of a start."""

    async def work(bench: Bench) -> None:
        await (await bench.launch("warm")).destroy()
        for number in range(10):
            folder = bench.new(f"m{number}")
            task = asyncio.ensure_future(bench.backend.launch(bench.spec(f"m{number}"), folder))
            await asyncio.wait([task], timeout=0.012 * number)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).destroy()
        assert await bench.backend.sweep(bench.label, set()) == []

    run(work)


NOBODY = """
import asyncio, json, os, sys
from pathlib import Path
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.microvm.backend import MicrovmBackend

async def main():
    home = Path(sys.argv[1])
    backend = MicrovmBackend(home / "cache")
    spec = MachineSpec("m", "nobody", Template("host"), Limits(memory_bytes=192 << 20, disk_bytes=64 << 20), "m")
    await backend.prepare(spec.template, spec.limits, lambda what, share: None)
    folders = [home / name for name in ("live", "image", "again")]
    for folder in folders:
        folder.mkdir()
    machine = await backend.launch(spec, folders[0])
    try:
        stream = await GuestStream.open(machine.endpoint(), timeout_s=30)
        done = await Guest(stream).exec("id -u; stat -c %u /bin/ls; echo here > file; cat file")
        await machine.save(folders[1], is_final=True)
        await machine.destroy()
        machine = await backend.restore(spec, folders[2], folders[1])
        stream = await GuestStream.open(machine.endpoint(), timeout_s=30)
        again = await Guest(stream).exec("cat file")
        print(json.dumps([os.getuid(), done.text, again.text]))
    finally:
        await machine.destroy()

asyncio.run(main())
"""


def test_an_ordinary_user_needs_no_rights() -> None:
    """As nobody, from an empty cache: its own template, a save and a restore."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if os.geteuid() != 0 or not shutil.which("setpriv") or not python:
        pytest.skip("becoming another user needs root, setpriv and a system-wide python3")
    home = Path("/tmp") / f"moonlet-nobody-{uuid.uuid4().hex[:8]}"
    try:
        code = Path(__file__).parents[2] / "moonlet"
        shutil.copytree(code / "sandbox", home / "code/moonlet/sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "errors.py"):
            shutil.copy(code / name, home / "code/moonlet" / name)
        for kernel in MicrovmBackend()._cache.glob("kernel-*"):
            shutil.copytree(kernel, home / "cache" / kernel.name)
        for at, folders, files in os.walk(home):
            for name in (at, *(os.path.join(at, one) for one in folders + files)):
                os.chown(name, 65534, 65534)
        as_nobody = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(home / "code"), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*as_nobody, python, "-c", NOBODY, str(home)],
            env=env,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout) == [65534, "0\n0\nhere\n", "here\n"]
    finally:
        shutil.rmtree(home, ignore_errors=True)
