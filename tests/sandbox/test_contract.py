"""What every backend must do, through the public seam. Where they differ, `bench.caps` says what is to be expected."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from moonlet.errors import GuestFileError, SandboxDiedError, SandboxError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import ExecResult, FailReason, Limits, Sandbox, State
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.state_dir import label_of
from tests.sandbox.conftest import Bench

MIB = 1 << 20
COUNT = "i=0; while :; do i=$((i+1)); echo $i > count.tmp; mv count.tmp count; sleep 0.02; done"


@pytest.fixture
def box(bench: Bench) -> Sandbox:
    return bench.shared()


def sh(bench: Bench, box: Sandbox, command: str, **options) -> ExecResult:
    return bench.run(box.exec(command, **options))


async def until(condition, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def count(box: Sandbox) -> int:
    try:
        return int(await box.read_file("count") or b"0")
    except GuestFileError:
        return 0


# -- commands ---------------------------------------------------------------------------------------------------------
def test_exec_returns_output_and_exit_code(bench: Bench, box: Sandbox) -> None:
    done = sh(bench, box, "echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (3, b"out\n", b"err\n", False)


def test_arguments_reach_the_program_as_they_are(bench: Bench, box: Sandbox) -> None:
    odd = ["a b", "", "$HOME", "*", "line\nfeed", "ünïcödé"]
    done = bench.run(box.exec(["printf", "%s|", *odd]))
    assert done.text == "".join(f"{word}|" for word in odd)


def test_a_program_that_is_not_there_is_an_error(bench: Bench, box: Sandbox) -> None:
    with pytest.raises(SandboxError):
        bench.run(box.exec(["/no/such/program"]))
    assert sh(bench, box, "no-such-program").exit_code == 127


def test_a_signal_becomes_128_and_its_number(bench: Bench, box: Sandbox) -> None:
    assert sh(bench, box, "kill -TERM $$").exit_code == 128 + signal.SIGTERM


def test_environment_and_directory(bench: Bench, box: Sandbox) -> None:
    done = sh(bench, box, 'echo "$A|$HOME|$(pwd)"', env={"A": "x y"}, cwd="/tmp")
    assert done.text == "x y|/workspace|/tmp\n"
    assert sh(bench, box, "pwd").text == "/workspace\n"


def test_environment_of_the_service_stays_out(bench: Bench, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONLET_TEST_SECRET", "hidden")
    assert "hidden" not in sh(bench, box, "env; cat /proc/self/environ /proc/1/environ").text


def test_stdin_is_read_to_its_end(bench: Bench, box: Sandbox) -> None:
    data = os.urandom(3 * MIB)
    done = sh(bench, box, "sha256sum", stdin=data)
    assert done.text.split()[0] == hashlib.sha256(data).hexdigest()


def test_without_stdin_a_command_reads_the_end_at_once(bench: Bench, box: Sandbox) -> None:
    assert sh(bench, box, "read line; echo $?").text == "1\n"


def test_output_that_is_no_text(bench: Bench, box: Sandbox) -> None:
    assert sh(bench, box, r"printf '\377\000\376'").stdout == b"\xff\x00\xfe"


def test_timeout_kills_the_whole_tree_and_keeps_output(bench: Bench, box: Sandbox) -> None:
    """B72: children that left the session die too, and what was written before is there."""
    mark = f"9{uuid.uuid4().int % 10**8}"
    script = f"echo kept; (setsid sh -c 'sleep {mark} & sleep {mark}' &) ; sleep {mark} & wait"
    done = sh(bench, box, script, timeout_s=1.5)
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, b"kept\n")
    assert sh(bench, box, f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'slee[p] {mark}'").text == "0\n"


def test_a_background_child_does_not_hold_the_command(bench: Bench, box: Sandbox) -> None:
    """B72: it holds the pipe, but the command has ended."""
    done = sh(bench, box, "sleep 600 & echo hi", timeout_s=60)
    assert (done.exit_code, done.text, done.timed_out) == (0, "hi\n", False)


def test_background_commands_outlive_their_handles(bench: Bench, box: Sandbox) -> None:
    async def work() -> None:
        process = await box.start("echo begin; read line; echo got $line; exit 7", stdin=True, tag="job")
        again = await box.process("job")
        assert again.pid == process.pid
        await again.write_stdin(b"this\n", close=True)
        done = await again.wait()
        assert (done.exit_code, done.text) == (7, "begin\ngot this\n")
        assert b"".join([part.data async for part in process.output()]) == b"begin\ngot this\n"

    bench.run(work())


def test_signal_and_kill(bench: Bench, box: Sandbox) -> None:
    async def work() -> None:
        polite = await box.start("trap 'echo bye; exit 5' INT; echo ready; while :; do sleep 0.05; done")
        async for part in polite.output():
            if b"ready" in part.data:
                await polite.signal(signal.SIGINT)
        assert (await polite.wait()).exit_code == 5
        deaf = await box.start("trap '' TERM INT; sleep 600 & wait")
        await deaf.kill()
        assert (await deaf.wait()).exit_code == 128 + signal.SIGKILL

    bench.run(work())


def test_many_commands_at_once(bench: Bench, box: Sandbox) -> None:
    async def work() -> list[ExecResult]:
        return await asyncio.gather(*(box.exec(f"sleep 0.1; echo {number}") for number in range(16)))

    assert [done.text for done in bench.run(work())] == [f"{number}\n" for number in range(16)]


# -- files ------------------------------------------------------------------------------------------------------------
def test_sixteen_mebibytes_there_and_back(bench: Bench, box: Sandbox, tmp_path: Path) -> None:
    data = os.urandom(16 * MIB)
    (tmp_path / "up").write_bytes(data)

    async def work() -> None:
        await box.upload(tmp_path / "up", "deep/er/big.bin")
        assert (await box.exec("sha256sum deep/er/big.bin")).text.split()[0] == hashlib.sha256(data).hexdigest()
        await box.download("deep/er/big.bin", tmp_path / "down")
        assert await box.read_file("deep/er/big.bin") == data
        await box.remove("deep")

    bench.run(work())
    assert (tmp_path / "down").read_bytes() == data


@pytest.mark.parametrize("name", ["with space", "ünï-文件", "line\nfeed", "-dash", "quote'\"", "*"], ids=repr)
def test_odd_names(bench: Bench, box: Sandbox, name: str) -> None:
    async def work() -> None:
        await box.write_file(f"odd/{name}", b"x")
        assert [info.name for info in await box.list_files("odd")] == [name]
        assert (await box.stat(f"odd/{name}")).size == 1
        assert await box.read_file(f"odd/{name}") == b"x"
        await box.rename(f"odd/{name}", "odd/plain")
        await box.remove("odd")

    bench.run(work())


def test_listing_says_what_things_are(bench: Bench, box: Sandbox) -> None:
    sh(bench, box, "mkdir -p tree/sub; echo hey > tree/sub/f; chmod 640 tree/sub/f; ln -s sub/f tree/link")
    found = {info.path: info for info in bench.run(box.list_files("tree", depth=2))}
    assert {path: info.kind for path, info in found.items()} == {
        "/workspace/tree/sub": "dir",
        "/workspace/tree/sub/f": "file",
        "/workspace/tree/link": "symlink",
    }
    file = found["/workspace/tree/sub/f"]
    assert (file.size, stat.S_IMODE(file.mode)) == (4, 0o640)


def test_file_errors_have_codes(bench: Bench, box: Sandbox) -> None:
    with pytest.raises(GuestFileError) as caught:
        bench.run(box.read_file("not/there"))
    assert caught.value.code == "ENOENT"


def test_watching_a_folder(bench: Bench, box: Sandbox) -> None:
    async def work() -> None:
        await box.make_dir("watched")
        events = box.watch("watched")
        first = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        for number in range(600):
            await box.write_file(f"watched/new{number}", b"1")
            if (await asyncio.wait([first], timeout=0.1))[0]:
                break
        assert (await first).path.startswith("new") or (await first).kind in ("create", "rename", "write")
        await events.aclose()  # type: ignore[attr-defined]

    bench.run(work())


def test_paths_stay_inside(bench: Bench, box: Sandbox) -> None:
    name = f"escape-{uuid.uuid4().hex}"

    async def work() -> None:
        await box.exec(
            "ln -s /. root-link; ln -s ../../../../../.. up-link"
        )  # to / alone leads astray in a Sentry of 2022
        for path in (f"../../../../../../tmp/{name}", f"root-link/tmp/{name}", f"up-link/tmp/{name}"):
            await box.write_file(path, b"x")
            assert (await box.exec(f"cat /tmp/{name}")).text == "x"
            await box.remove(path)
            await box.write_file(path, b"x")

    bench.run(work())
    assert not Path("/tmp", name).exists()


# -- isolation --------------------------------------------------------------------------------------------------------
def test_files_of_the_host_are_invisible(bench: Bench, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the host's")
    tmp_path.chmod(0o755)
    for path in (tmp_path / "secret", bench.state_dir / "sandboxes.sqlite3", Path.home() / ".ssh", Path(__file__)):
        assert sh(bench, box, f"ls {path}").exit_code != 0, path
        assert sh(bench, box, f"ls /proc/1/root{path}").exit_code != 0, path
    assert sh(bench, box, "cat /etc/shadow").text.count(":") <= 8 * 40
    assert Path("/etc/machine-id").read_text().strip() not in sh(bench, box, "cat /etc/machine-id").text


def test_processes_of_the_host_are_invisible(bench: Bench, box: Sandbox) -> None:
    mine = f"moonlet-visible-{uuid.uuid4().hex}"
    with subprocess.Popen([sys.executable, "-c", "input()", mine], stdin=subprocess.PIPE) as process:
        try:
            assert mine not in sh(bench, box, "cat /proc/[0-9]*/cmdline").text
            assert sh(bench, box, f"kill -0 {process.pid} && cat /proc/{process.pid}/cmdline").text.count(mine) == 0
        finally:
            process.kill()


def test_there_is_no_network(bench: Bench, box: Sandbox) -> None:
    devices = sh(bench, box, "cat /proc/net/dev").text.splitlines()[2:]
    assert {line.split(":")[0].strip() for line in devices} <= {"lo"}
    assert sh(bench, box, ["sh", "-c", "exec 3<>/dev/tcp/1.1.1.1/53"]).exit_code != 0
    assert sh(bench, box, ["bash", "-c", "exec 3<>/dev/tcp/1.1.1.1/53"], timeout_s=20).exit_code != 0


def test_no_capabilities_and_a_filter(bench: Bench, box: Sandbox) -> None:
    if bench.caps.isolation != "namespaces":
        pytest.skip(f"its wall is another one: {bench.caps.isolation}")
    status = sh(bench, box, "cat /proc/self/status").text
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def test_settings_of_the_kernel_cannot_be_changed(bench: Bench, box: Sandbox) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text(), os.uname().nodename
    sh(bench, box, "echo evil > /proc/sys/kernel/core_pattern; echo c > /proc/sysrq-trigger; hostname evil")
    assert (Path("/proc/sys/kernel/core_pattern").read_text(), os.uname().nodename) == before
    if bench.caps.isolation == "namespaces":
        assert sh(bench, box, "echo evil > /proc/sys/kernel/core_pattern").exit_code != 0


def test_the_agent_cannot_be_looked_into(bench: Bench, box: Sandbox) -> None:
    if bench.caps.isolation != "namespaces":
        pytest.skip("its agent holds nothing that leads to the host")
    for path in ("root/etc/passwd", "fd/0", "cwd/etc/passwd", "exe", "mem", "environ", "maps"):
        assert sh(bench, box, f"head -c 1 /proc/1/{path}").exit_code != 0, path
    assert sh(bench, box, "ls /proc/1/root/ || ls /proc/1/cwd/").exit_code != 0
    sh(bench, box, "kill -KILL 1; kill -STOP 1")
    assert sh(bench, box, "echo alive").text == "alive\n"


def test_a_guest_cannot_end_its_machine_by_a_signal(bench: Bench, box: Sandbox) -> None:
    deadly = () if bench.caps.isolation == "user-kernel" else ("KILL",)  # gVisor's first process has no privilege there
    for name in ("TERM", "INT", "HUP", "USR1", *deadly):
        sh(bench, box, f"kill -{name} 1")
    assert sh(bench, box, "echo alive").text == "alive\n"


def test_devices_of_the_host_keep_their_modes(bench: Bench, box: Sandbox) -> None:
    before = os.stat("/dev/null")
    sh(bench, box, "chmod 000 /dev/null; touch -d 2001-01-01 /dev/zero; rm -f /dev/urandom; mknod disk b 254 0")
    after = os.stat("/dev/null")
    assert (before.st_mode, before.st_uid) == (after.st_mode, after.st_uid)
    assert os.stat("/dev/zero").st_mtime > 1e9 + 1e8 and os.path.exists("/dev/urandom")
    sh(bench, box, "chmod 666 /dev/null; rm -f disk")


# -- limits -----------------------------------------------------------------------------------------------------------
def test_a_fork_bomb_stays_inside(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create(limits=Limits(memory_bytes=256 * MIB, processes=64))
        done = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 2; echo survived", timeout_s=30)
        assert "survived" in done.text or done.exit_code != 0
        await until(lambda: _answers(box), "the agent does not answer after a fork bomb")
        await box.destroy()

    bench.run(work())


async def _answers(box: Sandbox) -> bool:
    try:
        return bool(await box.list_files("/"))
    except SandboxError:
        return False


def test_a_memory_hog_dies_alone(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create(limits=Limits(memory_bytes=128 * MIB))
        try:
            done = await box.exec("head -c 400000000 /dev/zero | tail | wc -c", timeout_s=120)
            assert done.text.strip() in ("", "0")
            assert (await box.exec("echo alive")).text == "alive\n"
        except SandboxDiedError as error:
            assert bench.caps.isolation == "user-kernel"  # whose limit is that of the whole machine
            assert error.reason == FailReason.OOM
        await box.destroy()

    bench.run(work())


def test_a_flood_of_output_is_cut(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create(limits=Limits(memory_bytes=256 * MIB, output_bytes=MIB))
        done = await box.exec("head -c 20000000 /dev/zero; echo end >&2", timeout_s=120)
        assert len(done.stdout) == MIB and done.is_truncated
        assert (done.num_stdout_bytes, done.stderr, done.exit_code) == (20_000_000, b"end\n", 0)
        await box.destroy()

    bench.run(work())


def test_a_full_disk_is_the_guests_problem(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create(limits=Limits(memory_bytes=256 * MIB, disk_bytes=32 * MIB))
        done = await box.exec("head -c 100000000 /dev/zero > full; wc -c < full", timeout_s=120)
        assert int(done.text.strip() or "0") <= 64 * MIB
        await box.destroy()

    bench.run(work())


# -- pause, fork, snapshot --------------------------------------------------------------------------------------------
def test_three_pauses_lose_nothing(bench: Bench) -> None:
    """B73: every byte of a file and every running process are there after each of them."""
    data = os.urandom(5_000_000)
    digest = hashlib.sha256(data).hexdigest()

    async def work() -> None:
        box = await bench.create()
        await box.write_file("five", data)
        counter = await box.start(COUNT, tag="counter")
        await until(lambda: _reaches(box, 1), "the counter did not start")
        for _ in range(3):
            await box.pause()
            assert (await box.info()).state == State.PAUSED
            await box.pause()
            await box.resume()
            await box.resume()
            reached = await count(box)
            await until(lambda reached=reached: _reaches(box, reached + 2), "the counter does not go on")
            assert (await box.exec("sha256sum five")).text.split()[0] == digest
        assert (await box.process("counter")).pid == counter.pid
        await box.destroy()

    bench.run(work())


async def _reaches(box: Sandbox, number: int) -> bool:
    return await count(box) >= number


def test_forks_go_their_own_ways(bench: Bench) -> None:
    """B75: names, numbers and clocks are each one's own; files diverge; processes are there if the caps say so."""

    async def work() -> None:
        box = await bench.create()
        await box.write_file("shared", b"from the parent")
        await box.start(COUNT, tag="counter")
        await until(lambda: _reaches(box, 1), "the counter did not start")
        children = [child for child in await box.fork(3) if isinstance(child, Sandbox)]
        assert len(children) == 3
        family = [box, *children]
        for number, member in enumerate(family):
            await member.write_file("who", str(number).encode())
        for number, member in enumerate(family):
            assert await member.read_file("who") == str(number).encode()
            assert await member.read_file("shared") == b"from the parent"
        await _differ(family, "head -c 16 /dev/urandom | od -An -tx1")
        await _differ(family, "cat /proc/sys/kernel/random/uuid || python3 -c 'import uuid; print(uuid.uuid4())'")
        await _differ(family, "hostname")
        await _differ(family, "cat /etc/machine-id")
        for member in family:
            before = time.time()
            guest = float((await member.exec("date +%s.%N")).text)
            assert before - 1.0 < guest < time.time() + 1.0
        for child in children:
            running = [info for info in await child.processes() if info.is_running]
            assert [info.tag for info in running] == (["counter"] if bench.caps.fork_processes else [])
        for member in family:
            await member.destroy()

    bench.run(work())


async def _differ(family: list[Sandbox], command: str) -> None:
    said = [(await member.exec(command)).text.strip() for member in family]
    assert len(set(said)) == len(family), (command, said)


def test_a_snapshot_is_a_template(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create()
        await box.exec("mkdir d; echo one > d/f; ln -s f d/link; ln d/f d/hard; chmod 4711 d/f; mkfifo d/pipe")
        snapshot = await box.snapshot()
        await box.exec("echo two > d/f")
        await box.destroy()
        for _ in range(2):
            again = await bench.create(template=snapshot)
            listing = await again.exec(
                "cd d; cat f hard; readlink link; stat -c '%h %a %F' f; test -p pipe && echo pipe"
            )
            assert listing.text == "one\none\nf\n2 4711 regular file\npipe\n"
            await again.destroy()

    bench.run(work())


# -- the end ----------------------------------------------------------------------------------------------------------
def traces(bench: Bench, sandbox_id: str) -> list[str]:
    """What bears the id of a sandbox on this host: processes, mounts, control groups, folders."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if sandbox_id.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(f"process {name}")
        except OSError:
            continue
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if sandbox_id in line]
    for at, names, _ in os.walk("/sys/fs/cgroup"):
        found += [os.path.join(at, name) for name in names if sandbox_id in name]
    return found + [str(path) for path in bench.state_dir.glob("*/*") if sandbox_id in path.name]


def test_destroy_leaves_nothing(bench: Bench) -> None:
    async def work() -> str:
        box = await bench.create()
        await box.start("setsid sleep 600 & sleep 600")
        await box.exec("mkdir -p locked/in; chmod 000 locked")
        await box.exec(["python3", "-c", "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')"])
        assert traces(bench, box.id) != []
        await box.destroy()
        await box.destroy()
        with pytest.raises(SandboxNotFoundError):
            await box.exec("true")
        return box.id

    assert traces(bench, bench.run(work())) == []


def test_destroy_of_a_paused_one_leaves_nothing(bench: Bench) -> None:
    async def work() -> str:
        box = await bench.create()
        await box.start("sleep 600")
        await box.pause()
        await box.destroy()
        return box.id

    assert traces(bench, bench.run(work())) == []


def test_a_paused_one_refuses_to_work(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.create()
        await box.pause()
        with pytest.raises(SandboxStateError):
            await box.read_file("x")
        await box.destroy()

    bench.run(work())


_SERVICE = """
import asyncio, sys
from pathlib import Path
from moonlet.sandbox.api import Limits, SandboxSpec
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager, ServiceConfig

async def main():
    async with Manager(ServiceConfig(Path(sys.argv[1]), backend=sys.argv[2])) as manager:
        spec = SandboxSpec(ttl_s=600.0, limits=Limits(memory_bytes=256 << 20))
        box = LocalSandbox(manager, (await manager.create(spec)).id)
        await box.write_file("five", b"5" * 5_000_000)
        await box.start(sys.argv[3], tag="counter")
        if sys.argv[4] == "paused":
            await box.pause()
        print(box.id, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["running", "paused"])
def test_machines_outlive_their_service(bench: Bench, tmp_path: Path, state: str) -> None:
    """kill -9 of the service, and the next one takes the machine up with all that ran in it."""
    if bench.backend == "remote":
        pytest.skip("the service below is the one that is tested")
    from moonlet.sandbox.local import LocalSandbox
    from moonlet.sandbox.manager import Manager, ServiceConfig

    async def work(sandbox_id: str) -> None:
        async with Manager(ServiceConfig(tmp_path / "s", backend=bench.backend)) as manager:
            box = LocalSandbox(manager, sandbox_id)
            assert (await box.info()).state == State(state)
            await box.resume()
            reached = await count(box)
            await until(lambda: _reaches(box, reached + 2), "the counter does not go on")
            assert len(await box.read_file("five")) == 5_000_000
            await box.destroy()

    words = [sys.executable, "-c", _SERVICE, str(tmp_path / "s"), bench.backend, COUNT, state]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            sandbox_id = service.stdout.readline().strip()
            service.kill()
        assert sandbox_id, "the service did not start"
        asyncio.run(work(sandbox_id))
        assert traces(bench, sandbox_id) == []
    finally:  # a failed test leaves no machine behind
        asyncio.run(make_backend(bench.backend).sweep(label_of(tmp_path / "s"), set()))
