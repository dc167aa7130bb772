"""The backend namespace: its own walls, limits, images, and what it leaves to be found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moonlet.errors import SandboxDiedError, SandboxError, TemplateError
from moonlet.sandbox.api import FailReason, Limits
from moonlet.sandbox.backend import Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.namespace import bwrap, cgroup, freeze
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.namespace.bwrap import Bubblewrap, find_bubblewrap
from moonlet.sandbox.namespace.machine import NamespaceMachine
from moonlet.sandbox.processes import tree
from tests.sandbox.namespace_life import Life, life

MIB = 1 << 20
AS_ROOT = os.geteuid() == 0
PROGRAMS = ("sh", "cat", "ls", "id", "touch", "mkdir", "rm", "chmod", "stat", "ln", "sleep", "mv", "head", "dd")


@pytest.fixture(autouse=True, scope="module")
def _works(require_backend) -> None:
    require_backend("namespace")


# -- start and end ----------------------------------------------------------------------------------------------------
def test_nothing_of_the_host_is_open_in_the_guest(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start()
            at = Path(f"/proc/{machine.init.pid}/fd")
            opened = {os.readlink(at / name) for name in os.listdir(at)}
            ours = {str(tmp_path / "one" / name) for name in ("to_guest", "from_guest", "machine.log")}
            assert {name for name in opened if name.startswith("/")} <= ours | {"/dev/null"}, opened

    asyncio.run(work())


def test_a_machine_runs_under_a_user_of_its_own(tmp_path: Path, label: str) -> None:
    if not AS_ROOT:
        pytest.skip("only root can give it another user")

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machines = [(await one.start(one.spec(name)))[0] for name in ("a", "b")]
            users = [os.stat(f"/proc/{machine.init.pid}").st_uid for machine in machines]
            # Not the mode of /proc/PID alone: the agent cannot be dumped, so /proc shows it as root's.
            status = [Path(f"/proc/{machine.init.pid}/status").read_text() for machine in machines]
            users = [int(text.split("Uid:")[1].split()[0]) for text in status]
            assert len({0, *users}) == 3

    asyncio.run(work())


def test_death_is_noticed(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start()
            watching = asyncio.ensure_future(machine.wait_dead())
            await machine.joined()
            machine.init.kill()
            assert await asyncio.wait_for(watching, 30) == FailReason.CRASH

    asyncio.run(work())


def test_a_failed_start_says_why_and_leaves_nothing(tmp_path: Path, label: str) -> None:
    """Whether bubblewrap refuses at once or after it has made its namespaces."""
    program = find_bubblewrap()
    assert program is not None
    tmp_path.chmod(0o755)
    early = tmp_path / "early"
    early.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    late = tmp_path / "late"
    late.write_text(f'#!/bin/sh\nexec {program.path} --ro-bind /not/there /x "$@"\n')
    for script in (early, late):
        script.chmod(0o755)

    async def work() -> None:
        for script, words in ((early, "no such luck"), (late, "/not/there")):
            one = Life(tmp_path / script.name[0], label, NamespaceBackend(Bubblewrap(script, "0", True)))
            one.folder.mkdir()
            with pytest.raises(SandboxError, match=words):
                await one.start()
        one = Life(tmp_path, label)
        with pytest.raises(TemplateError, match="build it again"):
            await one.start(one.spec(template=Template("t", tmp_path / "missing")))

    asyncio.run(work())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path, label: str) -> None:
    """B77: wherever it is cut."""

    async def work() -> None:
        one = Life(tmp_path, label)
        spec = one.spec()
        await one.backend.prepare(spec.template, spec.limits, lambda *_: None)
        for number in range(20):
            live = tmp_path / str(number)
            live.mkdir()
            task = asyncio.ensure_future(one.backend.launch(one.spec(f"m{number}"), live))
            await asyncio.sleep(number * 0.0007)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(done, NamespaceMachine):  # it was quicker
                await done.destroy()

    asyncio.run(work())


def test_a_kernel_that_forbids_user_namespaces_is_refused_with_advice() -> None:
    """As in a user namespace that may have no others below it."""
    script = (
        "import asyncio; from moonlet.sandbox.namespace.backend import NamespaceBackend\n"
        "probe = asyncio.run(NamespaceBackend().probe()); print(probe.caps, probe.reason)"
    )
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--", "/bin/sh", "-c", shell, "sh", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("None ") and "sysctl user.max_user_namespaces" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_machine_is_found_again(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("echo kept > file")
            again = await NamespaceBackend().attach(one.spec(), tmp_path / "one")
            assert isinstance(again, NamespaceMachine) and again.init == machine.init
            other = Guest(await GuestStream.open(again.endpoint()))
            assert (await other.exec("cat file")).text == "kept\n"
            other.stream.close()
            await again.destroy()
            with pytest.raises(SandboxDiedError):
                await NamespaceBackend().attach(one.spec(), tmp_path / "one")

    asyncio.run(work())


def test_a_reused_pid_is_not_taken_for_the_machine(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            await one.start()
            note = tmp_path / "one" / "machine.json"
            record = json.loads(note.read_text())
            kept = note.read_text()
            record["init"]["start"] -= 1
            note.write_text(json.dumps(record))
            with pytest.raises(SandboxDiedError):
                await NamespaceBackend().attach(one.spec(), tmp_path / "one")
            note.write_text(json.dumps({**json.loads(kept), "boot": "another"}))
            with pytest.raises(SandboxDiedError, match="restarted"):
                await NamespaceBackend().attach(one.spec(), tmp_path / "one")

    asyncio.run(work())


def test_a_sweep_takes_what_nobody_knows_and_nothing_else(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            kept, _ = await one.start(one.spec("kept"))
            lost, guest = await one.start(one.spec("lost"))
            await guest.exec("setsid sleep 600 & exit")
            await kept.joined()
            await lost.joined()
            bystander = subprocess.Popen(["sleep", "600", bwrap.mark(label, "lost")][:2])
            named = subprocess.Popen(
                [sys.executable, "-c", "input()", bwrap.mark(label, "lost")], stdin=subprocess.PIPE
            )
            try:
                found = await one.backend.sweep(label, {"kept"})
                assert any("lost" in text for text in found) and not any("kept" in text for text in found)
                assert kept.init.is_alive() and not lost.init.is_alive()
                assert bystander.poll() is None and named.poll() is None
                assert await one.backend.sweep(label, {"kept"}) == []
                assert await one.backend.sweep(label + "x", set()) == []
                assert kept.init.is_alive()
            finally:
                bystander.kill()
                named.kill()
                bystander.wait()
                named.communicate()

    asyncio.run(work())


# -- limits -----------------------------------------------------------------------------------------------------------
def test_control_groups_hold_the_limits(tmp_path: Path, label: str) -> None:
    if not cgroup.hierarchies().has("memory"):
        pytest.skip("control groups cannot be written here")

    async def work() -> None:
        async with life(tmp_path, label) as one:
            spec = one.spec(memory_bytes=96 * MIB, processes=40)
            machine, guest = await one.start(spec)
            await machine.joined()
            await guest.exec("sleep 600 & sleep 600 & exit")
            group = cgroup.Cgroup(label, "one")
            assert group.processes() == set(tree(machine.init.pid))
            hog = await guest.exec(["python3", "-c", "x = bytearray(300 << 20); print(len(x))"], timeout_s=60)
            assert hog.exit_code == 128 + signal.SIGKILL
            assert group.num_oom_kills() >= 1
            assert (await guest.exec("echo alive")).text == "alive\n"

    asyncio.run(work())


def test_disk_use_is_seen(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start(one.spec(disk_bytes=8 * MIB))
            await guest.exec("for at in /workspace/a /tmp/b /var/tmp/c; do head -c 1000000 /dev/zero > $at; done")
            usage = await asyncio.to_thread(machine.usage)
            assert 3_000_000 <= usage.disk_bytes < 4_000_000
            assert (await guest.exec("head -c 20000000 /dev/zero > big; stat -c %s big")).text.strip() == str(8 * MIB)

    asyncio.run(work())


def test_an_idle_machine_is_small(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("true")
            assert 0 < (await asyncio.to_thread(machine.usage)).memory_bytes <= 8 * MIB

    asyncio.run(work())


def test_shared_memory_is_bounded(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            _, guest = await one.start(one.spec(memory_bytes=64 * MIB))
            done = await guest.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=64; stat -c %s /dev/shm/x; touch /dev/x")
            assert int(done.text) == 16 * MIB
            assert "Read-only" in done.stderr.decode()

    asyncio.run(work())


# -- freezing ---------------------------------------------------------------------------------------------------------
async def _stands_still(machine: NamespaceMachine, guest: Guest, path: Path) -> None:
    async def count() -> int:
        return int(path.read_text() or "0") if path.exists() else 0

    async def beyond(number: int) -> None:
        while await count() <= number:
            await asyncio.sleep(0.01)

    await guest.stream.call("start", command="c", argv=["sh", "-c", _COUNT], env={}, cwd="/workspace")
    await asyncio.wait_for(beyond(3), 30)


_COUNT = "i=0; while :; do i=$((i+1)); echo $i > t; mv t count; sleep 0.005 & wait; done"


@pytest.mark.parametrize("how", ["groups", "signals", "v2"])
def test_a_frozen_tree_stands_still(tmp_path: Path, label: str, how: str) -> None:
    """By whatever means: control groups of both versions, or signals where there are none."""
    found = cgroup.hierarchies()
    if how == "groups" and not found.can_freeze:
        pytest.skip("control groups cannot be written here")
    if how == "v2":
        if found.v2 is None:
            pytest.skip("there is no second version of control groups that can be written")
        found = cgroup.Hierarchies({}, found.v2)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await machine.joined()
            group = cgroup.Cgroup(label, "v2" if how == "v2" else "one", found)
            if how == "v2":
                group.create(Limits())
                group.join(machine.init.pid)
            path = tmp_path / "one/upper/workspace/count"
            await _stands_still(machine, guest, path)
            stop = (lambda: freeze.stop_tree(machine.init)) if how == "signals" else group.freeze
            go_on = (lambda: freeze.continue_tree(machine.init)) if how == "signals" else group.thaw
            for _ in range(3):
                await asyncio.to_thread(stop)
                before = path.read_text()
                await asyncio.sleep(0.1)
                assert path.read_text() == before
                await asyncio.to_thread(go_on)
                while path.read_text() == before or not path.read_text():
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(stop)
            machine.init.kill()
            go_on()
            await machine.destroy()
            if how == "v2":
                group.remove()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_parent_that_waits_for_its_vforked_child_is_no_obstacle(tmp_path: Path, label: str) -> None:
    """Stopped between vfork() and exec(), the child keeps its parent in the kernel."""
    source = "#include <unistd.h>\nint main(void) { if (!vfork()) { sleep(600); _exit(0); } return 0; }\n"
    (tmp_path / "parent.c").write_text(source)
    subprocess.run(["cc", "-static", "-o", tmp_path / "parent", tmp_path / "parent.c"], check=True)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.upload(tmp_path / "parent", "parent")
            await guest.stream.call("start", command="c", argv=["./parent"], env={}, cwd="/workspace")
            while len(tree(machine.init.pid)) < 4:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(freeze.stop_tree, machine.init)
            await asyncio.to_thread(freeze.continue_tree, machine.init)
            assert (await guest.exec("echo on")).text == "on\n"

    asyncio.run(asyncio.wait_for(work(), 60))
