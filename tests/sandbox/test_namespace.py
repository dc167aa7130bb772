"""The backend namespace: its own walls, limits, images, and what it leaves to be found."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moonlet.errors import SandboxDiedError, SandboxError, SandboxStateError, StorageError, TemplateError
from moonlet.sandbox.api import ExecResult, FailReason, Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.namespace import bwrap, cgroup, files, freeze
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.namespace.bwrap import Bubblewrap, find_bubblewrap
from moonlet.sandbox.namespace.machine import NamespaceMachine
from moonlet.sandbox.namespace.processes import ProcessId, all_pids, command_line, tree

MIB = 1 << 20
AS_ROOT = os.geteuid() == 0
PROGRAMS = ("sh", "cat", "ls", "id", "touch", "mkdir", "rm", "chmod", "stat", "ln", "sleep", "mv", "head", "dd")


@pytest.fixture(autouse=True, scope="module")
def _works(require_backend) -> None:
    require_backend("namespace")


@pytest.fixture
def label() -> Iterator[str]:
    """One that nobody else has; nothing of it may be left at the end."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert asyncio.run(NamespaceBackend().sweep(name, set())) == []


class Life:
    """Machines of one test, each with an open stream to its agent."""

    def __init__(self, folder: Path, label: str, backend: NamespaceBackend | None = None) -> None:
        self.backend = backend or NamespaceBackend()
        self.folder, self.label = folder, label
        self.machines: list[NamespaceMachine] = []
        self.guests: list[Guest] = []

    def spec(self, name: str = "one", template: Template | None = None, **limits: int) -> MachineSpec:
        return MachineSpec(name, self.label, template or Template("host"), Limits(**limits), hostname=name)  # type: ignore[arg-type]

    async def start(self, spec: MachineSpec | None = None, image: Path | None = None) -> tuple[NamespaceMachine, Guest]:
        spec = spec or self.spec()
        live = self.folder / spec.id
        live.mkdir()
        await self.backend.prepare(spec.template, spec.limits, lambda *_: None)
        made = self.backend.launch(spec, live) if image is None else self.backend.restore(spec, live, image)
        machine = await made
        assert isinstance(machine, NamespaceMachine)
        self.machines.append(machine)
        self.guests.append(Guest(await GuestStream.open(machine.endpoint(), is_fresh=True)))
        return machine, self.guests[-1]

    async def image(self, machine: NamespaceMachine, name: str = "image", *, is_final: bool = False) -> Path:
        image = self.folder / name
        image.mkdir()
        await machine.save(image, is_final=is_final)
        return image


@asynccontextmanager
async def life(folder: Path, label: str, backend: NamespaceBackend | None = None) -> AsyncIterator[Life]:
    one = Life(folder, label, backend)
    try:
        yield one
    finally:
        for guest in one.guests:
            guest.stream.close()
        for machine in one.machines:
            await machine.destroy()


def old_bubblewrap() -> Bubblewrap:
    program = bwrap._examine(Path(shutil.which("bwrap") or "/nowhere"))
    if program is None:
        pytest.skip("no bubblewrap on the PATH: apt-get install bubblewrap")
    return replace(program, has_overlay=False)


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system of a few programs with their libraries."""
    root = tmp_path_factory.mktemp("rootfs") / "root"
    for name in ("bin", "etc", "tmp", "lower/deep", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in PROGRAMS:
        program = Path(shutil.which(name) or "")
        shutil.copy(program, root / "bin" / name)
        for word in subprocess.run(["ldd", program], capture_output=True, text=True).stdout.split():
            if word.startswith("/") and not (root / word[1:]).exists():
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "lower/deep/file").write_text("of the template\n")
    (root / "lower/gone").write_text("of the template\n")
    return root


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


# -- images -----------------------------------------------------------------------------------------------------------
def test_an_image_keeps_what_files_are(tmp_path: Path, label: str) -> None:
    make = (
        "mkdir -p d/locked; echo x > d/locked/f; chmod 000 d/locked/f d/locked; ln -s /etc/passwd d/link; echo 1 > d/a; ln d/a d/b; "
        "chmod 4755 d/a; mkfifo d/pipe; truncate -s 50M d/sparse; touch -d '2020-02-02 02:02:02' d/old; "
        "printf y > \"d/line\nfeed\"; python3 -c \"import os; os.setxattr('d/a', 'user.note', b'kept'); open(b'd/\\xff', 'w')\""
    )
    look = (
        "chmod 700 d/locked; stat -c '%n %a %h %s %Y %F' d/locked/f d/link d/a d/pipe d/sparse d/old; readlink d/link; du -k d/sparse;"
        "python3 -c \"import os; print(os.getxattr('d/a', 'user.note'), sorted(os.listdir(b'd')))\""
    )

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            assert (await guest.exec(make)).exit_code == 0
            before = await _plain(guest.exec(look + "; chmod 000 d/locked"))
            for number, is_final in enumerate((False, True)):
                image = await one.image(machine, f"image{number}", is_final=is_final)
                _, other = await one.start(one.spec(f"copy{number}"), image)
                assert await _plain(other.exec(look)) == before
                assert sorted(path.name for path in image.iterdir()) == ["image.json", "upper"]

    asyncio.run(work())


async def _plain(running) -> str:
    done: ExecResult = await running
    return done.text.replace("\n", "|")


@pytest.mark.parametrize("age", ["this", "old"])
def test_changes_over_a_template_are_saved(tmp_path: Path, rootfs: Path, label: str, age: str) -> None:
    """What the overlay changed, removed and replaced comes back; the template stays as it is. With any bubblewrap."""
    backend = NamespaceBackend(old_bubblewrap() if age == "old" else None)
    template = Template("tiny", rootfs, env={"FROM": "template"})

    async def work() -> None:
        async with life(tmp_path, label, backend) as one:
            machine, guest = await one.start(one.spec("a", template))
            assert (await guest.exec("id -u; echo $FROM; pwd")).text == "0\ntemplate\n/workspace\n"
            done = await guest.exec(
                "echo more >> /etc/passwd && rm /lower/gone && rm -r /lower/deep && mkdir /lower/deep && "
                "touch /bin/added /lower/deep/new && echo home > f"
            )
            assert done.exit_code == 0, done.stderr
            image = await one.image(machine)
            _, other = await one.start(one.spec("b", template), image)
            look = "cat /etc/passwd f; ls /lower /lower/deep; ls /bin/added"
            assert (await other.exec(look)).text == (
                "root:x:0:0::/root:/bin/sh\nmore\nhome\n/lower:\ndeep\n\n/lower/deep:\nnew\n/bin/added\n"
            )
            assert (await other.exec("echo b > f; rm /bin/added")).exit_code == 0
            assert (await guest.exec("cat f; ls /bin/added")).text == "home\n/bin/added\n"

    before = sorted(str(path) for path in rootfs.rglob("*"))
    asyncio.run(work())
    assert sorted(str(path) for path in rootfs.rglob("*")) == before
    assert (rootfs / "etc/passwd").read_text() == "root:x:0:0::/root:/bin/sh\n"


def test_links_that_a_guest_lays_lead_nowhere(tmp_path: Path, rootfs: Path, label: str) -> None:
    """A saved root is what a guest made it: what will be mounted over must not be a link to somewhere else."""
    secret = tmp_path / "outside"
    secret.mkdir()
    template = Template("tiny", rootfs)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start(one.spec("a", template))
            image = await one.image(machine)
            upper = image / "upper"
            for name in ("proc", "dev", "workspace"):
                if (upper / name).exists():
                    shutil.rmtree(upper / name)
                (upper / name).symlink_to(secret)
            (upper / "etc").rename(upper / "etc2") if (upper / "etc").exists() else None
            (upper / "etc").symlink_to(secret)
            _, other = await one.start(one.spec("b", template), image)
            assert (await other.exec("echo here > f; cat /workspace/f")).text == "here\n"
            await other.refresh(hostname="b", machine_id="0" * 32)

    asyncio.run(work())
    assert list(secret.iterdir()) == []


def test_a_full_disk_during_a_save_changes_nothing(tmp_path: Path, label: str) -> None:
    if not AS_ROOT:
        pytest.skip("only root can make a small file system")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", small], check=True)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("head -c 4000000 /dev/urandom > data")
            with pytest.raises(StorageError, match="free some space"):
                await machine.save(small, is_final=False)
            assert (await guest.exec("stat -c %s data")).text == "4000000\n"

    try:
        asyncio.run(work())
    finally:
        subprocess.run(["umount", small], check=True)


def test_images_of_others_are_refused(tmp_path: Path, rootfs: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start()
            image = await one.image(machine)
            with pytest.raises(SandboxStateError, match="template"):
                await one.start(one.spec("b", Template("tiny", rootfs)), image)
            (image / "image.json").write_text(json.dumps({"format": 0, "template": "host"}))
            with pytest.raises(SandboxStateError, match="another version"):
                await one.start(one.spec("c"), image)

    asyncio.run(work())


def test_the_folder_of_a_dead_machine_is_an_image(tmp_path: Path, label: str) -> None:
    """So that files are not lost with a host that was restarted."""

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("echo kept > f")
            await machine.destroy()
            _, other = await one.start(one.spec("again"), tmp_path / "one")
            assert (await other.exec("cat f")).text == "kept\n"

    asyncio.run(work())


def test_sizes_are_measured_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "big").write_bytes(b"x" * MIB)
    (tmp_path / "in/link").symlink_to(tmp_path / "big")
    assert files.disk_bytes(tmp_path / "in") < MIB // 2
    assert files.disk_bytes(tmp_path / "nowhere") == 0


def test_processes_are_told_apart_by_their_start() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None and me.is_alive()
    assert not ProcessId(me.pid, me.start - 1).is_alive()
    assert not ProcessId(me.pid, me.start - 1).kill(0)
    assert ProcessId.of(1 << 30) is None


def test_a_shared_etc_holds_no_secret(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            _, guest = await one.start()
            await guest.refresh(hostname="one", machine_id="0" * 32)
            done = await guest.exec(
                "cat /etc/hostname; grep -c one /etc/hosts; wc -c < /etc/machine-id; hostname; ls /home /root /etc/ssh"
            )
            assert done.text.split() == ["one", "1", "33", "one", "/home:", "/root:"]

    asyncio.run(work())
    assert stat.S_IMODE(os.stat("/dev/null").st_mode) == 0o666


# -- as an ordinary user ----------------------------------------------------------------------------------------------
def test_as_an_ordinary_user(tmp_path_factory: pytest.TempPathFactory, rootfs: Path) -> None:
    """The same without privileges: limits by rlimits, pauses by signals, templates in a user namespace."""
    if not AS_ROOT:
        pytest.skip("all other tests are this test already")
    interpreter = _world_readable_python()
    base = Path("/var/tmp") / f"moonlet-test-{uuid.uuid4().hex[:8]}"
    try:
        (base / "home").mkdir(parents=True)
        base.chmod(0o755)
        shutil.copytree(
            Path(__file__).parents[2] / "moonlet", base / "moonlet", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(rootfs, base / "rootfs", symlinks=True)
        subprocess.run(["chown", "-R", "65534:65534", base / "home", base / "rootfs"], check=True)
        subprocess.run(["chmod", "-R", "a+rX", base], check=True)
        paths = os.pathsep.join([str(base), *(path for path in sys.path if path.endswith("-packages"))])
        words = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            interpreter,
            "-c",
            _ORDINARY,
            base,
        ]
        environment = {
            "HOME": str(base / "home"),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout)
        assert said["notes"] == 4
        assert said["user"] == "0 0000000000000000 2"
        assert said["grew"] and said["stood_still"]
        assert said["copy"] == "x\nlower\n"
        assert said["template"] == "root:x:0:0::/root:/bin/sh\nmore\n"
        assert said["bomb"] == "survived\n"
        assert said["left"] == []
    finally:
        subprocess.run(["rm", "-rf", base], check=True)


def _world_readable_python() -> str:
    for name in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", name, "-c"]
        done = subprocess.run(
            [*words, "import sys; sys.exit(sys.version_info < (3, 11))"], capture_output=True, cwd="/"
        )
        if done.returncode == 0:
            return name
    pytest.skip("there is no Python >= 3.11 that an ordinary user can read")


_ORDINARY = """
import asyncio, json, os, sys, time
from pathlib import Path
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.namespace.bwrap import Bubblewrap, find_bubblewrap

base = Path(sys.argv[1])
state = base / "home" / "state"
state.mkdir()

async def main():
    backend, said, alive = NamespaceBackend(), {}, []
    probe = await backend.probe()
    assert probe.caps is not None, probe.reason
    said["notes"] = len(probe.caps.notes)

    async def start(name, template=Template("host"), image=None, **limits):
        await backend.prepare(template, Limits(), lambda *_: None)
        (state / name).mkdir()
        spec = MachineSpec(name, "ordinary", template, Limits(**limits), name)
        machine = await (backend.restore(spec, state / name, image) if image else backend.launch(spec, state / name))
        guest = Guest(await GuestStream.open(machine.endpoint()))
        alive.append((machine, guest))
        return machine, guest

    machine, guest = await start("one", processes=40)
    done = await guest.exec("echo $(id -u) $(grep CapBnd /proc/self/status | cut -f2) $(grep Seccomp: /proc/self/status | cut -f2)")
    said["user"] = done.text.strip()
    await guest.exec("mkdir d; echo x > d/f; chmod 000 d/f d")
    counter = state / "one/upper/workspace/count"
    start_counting = "i=0; while :; do i=$((i+1)); echo $i > t; mv t count; sleep 0.005; done"
    await guest.stream.call("start", command="c", argv=["sh", "-c", start_counting], env={}, cwd="/workspace")
    while not counter.exists():
        await asyncio.sleep(0.01)
    await machine.freeze()
    first = counter.read_text()
    await asyncio.sleep(0.1)
    said["stood_still"] = counter.read_text() == first
    image = state / "image"
    image.mkdir()
    await machine.save(image, is_final=False)
    while counter.read_text() == first:
        await asyncio.sleep(0.01)
    said["grew"] = True
    await guest.exec("chmod 755 d; chmod 644 d/f; echo changed > d/f")
    _, copy = await start("copy", image=image)
    said["copy"] = (await copy.exec("chmod 755 d; chmod 644 d/f; cat d/f; touch lower; ls lower")).text
    tiny, inside = await start("tiny", Template("tiny", base / "rootfs"))
    said["template"] = (await inside.exec("echo more >> /etc/passwd; cat /etc/passwd")).text
    bomb = await guest.exec("bomb() { bomb | bomb & }; bomb; sleep 1; echo survived", timeout_s=30)
    said["bomb"] = bomb.text
    for machine, guest in alive:
        guest.stream.close()
        await machine.destroy()
    said["left"] = await backend.sweep("ordinary", set())
    print(json.dumps(said))

asyncio.run(main())
"""


# -- many -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_five_hundred_machines_leave_nothing(tmp_path: Path) -> None:
    """Started, used and destroyed with 50 alive at once: no process, mount, group, folder or descriptor is left."""
    from moonlet.sandbox.api import SandboxSpec
    from moonlet.sandbox.local import LocalSandbox
    from moonlet.sandbox.manager import Manager, ServiceConfig

    async def one(manager: Manager, number: int) -> int:
        spec = SandboxSpec(limits=Limits(memory_bytes=128 * MIB), ttl_s=600)
        box = LocalSandbox(manager, (await manager.create(spec)).id)
        await box.write_file("n", str(number).encode())
        assert (await box.exec("setsid sleep 600 & cat n")).text == str(number)
        usage = await manager.usage(box.id)
        await box.destroy()
        return usage.memory_bytes

    async def work() -> list[int]:
        config = ServiceConfig(tmp_path / "s", backend="namespace", max_running=64)
        async with Manager(config, backends={"namespace": NamespaceBackend()}) as manager:
            gate = asyncio.Semaphore(50)

            async def guarded(number: int) -> int:
                async with gate:
                    return await one(manager, number)

            await guarded(-1)
            before = _resources(manager._core.label)
            used = await asyncio.gather(*(guarded(number) for number in range(500)))
            assert list((tmp_path / "s/sandboxes").iterdir()) == []
            assert _resources(manager._core.label) == before
        return used

    used = asyncio.run(work())
    assert sorted(used)[len(used) // 2] <= 8 * MIB


def _resources(label: str) -> dict[str, object]:
    """What is held now, on this host, by this process and by machines of this label."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "groups": [at for at, _, _ in os.walk("/sys/fs/cgroup") if f"/{label}/" in at],
        "processes": [pid for pid in all_pids() if any(f"/{label}/" in word for word in command_line(pid))],
    }
