"""Commands of the guest agent: what they leave, how they end, that none of them outlives its kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from sandbox.guest_process import AgentProcess, find_processes, running_guest, wait_until, with_guest

from moonlet.errors import GuestFileError, SandboxNotFoundError
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.transcript import Launch

FOREVER = 3600.0


def test_streams_code_directory_and_environment(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        result = await guest.exec("echo out; echo err >&2; exit 7")
        assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, b"out\n", b"err\n", False)
        os.mkdir(tmp_path / "home" / "sub")
        result = await guest.exec(
            "pwd; echo $A$HOME; echo $PATH", cwd="sub", env={"A": "ü\udcff", "HOME": "/elsewhere"}
        )
        assert result.stdout.splitlines()[:2] == [
            os.fsencode(tmp_path / "home" / "sub"),
            "ü".encode() + b"\xff/elsewhere",
        ]
        assert b"/bin" in result.stdout.splitlines()[2]
        result = await guest.exec(["/bin/sh", "-c", 'printf %s "$1|$2"', "x", "two words", 'new\nline \\ " \t é 漢 😀'])
        assert result.text == 'two words|new\nline \\ " \t é 漢 😀'
        assert (await guest.exec(["true"])).exit_code == 0  # found by PATH

    with_guest(tmp_path, work)


def test_commands_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")

    async def work(guest: Guest) -> None:
        for command, cwd, code in (
            (["/no/such/program"], None, "ENOENT"),
            (["no-such-program"], None, "ENOENT"),
            (["true"], "nowhere", "ENOENT"),
            ([str(tmp_path / "plain")], None, "EACCES"),
            (["true"], str(tmp_path / "plain"), "ENOTDIR"),
            ([], None, "EINVAL"),
            (["a\0b"], None, "EINVAL"),
            (["x" * (2 << 20)], None, "E2BIG"),
        ):
            with pytest.raises(GuestFileError) as caught:
                await guest.exec(command, cwd=cwd)
            assert caught.value.code == code, command[:1]
        assert await guest.processes() == []

    with_guest(tmp_path, work)


def test_a_background_child_does_not_delay_the_end(tmp_path: Path) -> None:
    """B72: it holds the pipes, lives on, and its later output is still taken, so that it does not die of SIGPIPE."""

    async def work(guest: Guest) -> None:
        mark = f"86{os.getpid()}"
        started = time.monotonic()
        result = await guest.exec(f"sleep {mark} & echo hi", timeout_s=FOREVER)
        assert (result.exit_code, result.stdout) == (0, b"hi\n")
        assert time.monotonic() - started < 60  # the sleep lasts a day
        assert find_processes(mark)
        await guest.exec(
            "(while [ ! -e go ]; do sleep .01; done; echo late; touch written) & echo started", timeout_s=FOREVER
        )
        (tmp_path / "home" / "go").touch()
        await wait_until((tmp_path / "home" / "written").exists)

    with_guest(tmp_path, work)
    assert not find_processes(f"86{os.getpid()}")  # the agent's end is theirs


def test_later_output_of_a_background_child_is_kept(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        process = await guest.start("(while [ ! -e go ]; do sleep .01; done; echo late) & echo early")
        assert (await process.wait()).stdout == b"early\n"
        (tmp_path / "home" / "go").touch()
        async with asyncio.timeout(20):
            while (await guest.poll(process.command_id, (6, 0), 0)).stdout != b"late\n":
                await asyncio.sleep(0.01)

    with_guest(tmp_path, work)


def test_without_input_a_reader_sees_the_end_at_once(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        result = await guest.exec("read x; echo $?; cat; echo done", timeout_s=FOREVER)
        assert result.stdout == b"1\ndone\n"

    with_guest(tmp_path, work)


@pytest.mark.parametrize(
    "escape",
    [
        "sleep {} & wait",
        "setsid sleep {} & wait",
        "setsid setsid sh -c 'sleep {} & setsid sleep {} & wait' & sleep {}",
        "(setsid sh -c '(sleep {} &) ; (setsid nohup sleep {} >/dev/null 2>&1 &)' &) ; sleep {}",
        "trap '' TERM INT HUP; (trap '' TERM; sleep {}) & wait",
        "env -i setsid sleep {} & (exec env -i /bin/sh -c 'sleep {} & sleep {}') & wait",
    ],
    ids=["child", "session", "sessions", "orphans", "ignores signals", "empty environment"],
)
def test_a_timeout_kills_all_and_keeps_what_was_written(tmp_path: Path, escape: str) -> None:
    mark = f"97{os.getpid()}"

    async def work(guest: Guest) -> None:
        result = await guest.exec("echo partial; " + escape.replace("{}", mark), timeout_s=0.5)
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"partial\n")
        assert find_processes(mark) == []

    with_guest(tmp_path, work)


def test_a_kill_reaches_a_swarm(tmp_path: Path) -> None:
    """Processes that fork faster than they are looked for: each forks on and leaves, in a session of its own."""
    mark = f"swarm{os.getpid()}"
    script = f"""import os, sys, time
'{mark}'
open('ready', 'w').close()
until = time.time() + 600
while time.time() < until:
    if os.fork():
        time.sleep(0.002)
        os._exit(0)
    os.setsid()
"""
    (tmp_path / "swarm.py").write_text(script)

    async def work(guest: Guest) -> None:
        command = f"for i in 1 2 3; do {sys.executable} {tmp_path}/swarm.py {mark} & done; wait; sleep 600"
        process = await guest.start(command)
        await wait_until((tmp_path / "home" / "ready").exists)
        await process.kill()
        assert find_processes(mark) == []
        assert (await process.wait()).exit_code == 128 + signal.SIGKILL

    with_guest(tmp_path, work)


def test_a_command_that_kills_its_supervisor_gains_nothing(tmp_path: Path) -> None:
    mark = f"98{os.getpid()}"

    async def work(guest: Guest) -> None:
        result = await guest.exec(f"setsid sleep {mark} & kill -9 $PPID; sleep {mark}", timeout_s=FOREVER)
        assert result.exit_code == 128 + signal.SIGKILL
        await wait_until(lambda: not find_processes(mark))
        assert (await guest.exec("echo fine")).stdout == b"fine\n"

    with_guest(tmp_path, work)


def test_more_output_than_is_kept_is_counted(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        result = await guest.exec("head -c 3000000 /dev/zero; head -c 5 /dev/zero >&2", output_bytes=1000)
        assert (len(result.stdout), result.num_stdout_bytes, len(result.stderr)) == (1000, 3000000, 5)
        assert result.is_truncated
        result = await guest.exec("printf 12345", output_bytes=5)
        assert result.stdout == b"12345" and not result.is_truncated

    with_guest(tmp_path, work)


def test_binary_output_of_both_streams(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192 + os.urandom(1 << 20)
    (tmp_path / "data").write_bytes(data)

    async def work(guest: Guest) -> None:
        result = await guest.exec(f"cat {tmp_path}/data & cat {tmp_path}/data >&2; wait")
        assert result.stdout == data and result.stderr == data and not result.is_truncated
        result = await guest.exec("printf '\\377\\000\\n{\"id\":1}'")
        assert result.stdout == b'\xff\0\n{"id":1}'
        assert result.text == '\ufffd\0\n{"id":1}'

    with_guest(tmp_path, work)


def test_input(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)

    async def work(guest: Guest) -> None:
        assert (await guest.exec("cat", stdin=data)).stdout == data
        assert (await guest.exec("cat", stdin=b"")).stdout == b""
        assert (await guest.exec("head -c 3; exec <&-; true", stdin=data)).stdout == data[
            :3
        ]  # reads no more: as in a pipe
        process = await guest.start("while read line; do echo got $line; done; echo end", stdin=True)
        await process.write_stdin(b"one\ntwo\n")
        await process.write_stdin(b"three\n", close=True)
        assert (await process.wait()).stdout == b"got one\ngot two\ngot three\nend\n"
        with pytest.raises(GuestFileError) as caught:
            await process.write_stdin(b"four\n")
        assert caught.value.code == "EPIPE"

    with_guest(tmp_path, work)


def test_input_that_nobody_reads_is_held_back(tmp_path: Path) -> None:
    """The sender waits; the agent holds a bounded amount and goes on serving."""

    async def work(guest: Guest) -> None:
        process = await guest.start("while [ ! -e go ]; do sleep .01; done; wc -c", stdin=True)
        sending = asyncio.ensure_future(process.write_stdin(b"x" * (4 << 20), close=True))
        assert (await guest.exec("echo alive")).stdout == b"alive\n"
        assert not sending.done()
        for piece in range(8):
            request = guest.stream.request("stdin", body=b"y" * (256 << 10), command=process.command_id)
            if piece == 7:
                with pytest.raises(GuestFileError) as caught:
                    await request.wait(20)
                assert caught.value.code == "EAGAIN"
        sending.cancel()
        await process.kill()

    with_guest(tmp_path, work)


def test_signals_reach_the_group(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        process = await guest.start("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep .01; done")
        async for piece in process.output():
            if piece.data == b"ready\n":
                await process.signal(signal.SIGUSR1)
        result = await process.wait()
        assert (result.exit_code, result.stdout) == (5, b"ready\ncaught\n")
        with pytest.raises(SandboxNotFoundError):
            await process.signal(signal.SIGTERM)
        process = await guest.start(["sleep", "3600"])
        await process.signal(signal.SIGTERM)
        assert (await process.wait()).exit_code == 128 + signal.SIGTERM
        with pytest.raises(GuestFileError):
            await process.signal(99999)

    with_guest(tmp_path, work)


def test_many_at_once_and_all_are_forgotten(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        results = await asyncio.gather(*(guest.exec(f"echo {i}; exit {i}") for i in range(60)))
        assert [(r.exit_code, r.text) for r in results] == [(i, f"{i}\n") for i in range(60)]
        assert await guest.processes() == []

    with_guest(tmp_path, work)


def test_processes_can_be_found_again(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        process = await guest.start("echo a; sleep 3600", tag="server")
        ended = await guest.start(["/bin/sh", "-c", "exit 3", "x" * 2000])
        await ended.wait()
        first, second = await guest.processes()
        assert (first.command_id, first.pid, first.tag, first.exit_code) == (
            process.command_id,
            process.pid,
            "server",
            None,
        )
        assert first.is_running and first.argv == ("/bin/sh", "-c", "echo a; sleep 3600")
        assert (second.is_running, second.exit_code) == (False, 3) and len(second.argv[3]) < 2000
        for name in ("server", process.pid, process.command_id):
            assert (await guest.process(name)).command_id == process.command_id
        with pytest.raises(SandboxNotFoundError):
            await guest.process("nobody")
        with pytest.raises(GuestFileError) as caught:
            await guest.reap(process.command_id)
        assert caught.value.code == "EBUSY"
        await guest.reap(process.command_id, kill=True)
        await guest.reap(ended.command_id)
        assert await guest.processes() == []

    with_guest(tmp_path, work)


def test_a_start_that_is_repeated_starts_once(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        launch = Launch.of("echo x >> count; sleep 3600")
        first = await guest.start(launch)
        assert (await guest.start(launch)).pid == first.pid
        await wait_until((tmp_path / "home" / "count").exists)
        assert (tmp_path / "home" / "count").read_text() == "x\n"

    with_guest(tmp_path, work)


def test_a_caller_that_is_cancelled_takes_its_command_along(tmp_path: Path) -> None:
    mark = f"96{os.getpid()}"

    async def work(guest: Guest) -> None:
        call = asyncio.ensure_future(guest.exec(f"setsid sleep {mark}; true", timeout_s=FOREVER))
        await wait_until(lambda: bool(find_processes(mark)))
        call.cancel()
        await wait_until(lambda: not find_processes(mark))
        assert await guest.processes() == []

    with_guest(tmp_path, work)


def test_a_terminal(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        script = "stty size; test -t 0 && test -t 1 && echo tty; trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep .01; done"
        process = await guest.start(script, pty=(33, 99))
        seen = b""
        async for piece in process.output():
            seen += piece.data
            if b"ready" in seen:
                await process.resize(44, 111)
                break
        result = await process.wait()
        assert result.exit_code == 4
        assert result.stdout.split(b"\r\n") == [b"33 99", b"tty", b"ready", b"44 111", b""]
        process = await guest.start("cat; echo end", pty=(24, 80))
        await process.write_stdin(b"typed\n")
        await process.write_stdin(b"", close=True)
        assert (await process.wait()).stdout.count(b"typed\r\n") == 2  # the echo and cat's own
        process = await guest.start(["cat"], pty=(24, 80))
        await process.write_stdin(b"\x03")  # the terminal's interrupt
        assert (await process.wait()).exit_code == 128 + signal.SIGINT
        plain = await guest.start("true")
        with pytest.raises(GuestFileError):
            await plain.resize(1, 1)

    with_guest(tmp_path, work)


def test_limits_hold_for_commands(tmp_path: Path) -> None:
    options = ("--memory-bytes", str(256 << 20), "--file-bytes", "1000000", "--open-files", "50", "--processes", "77")

    async def work(guest: Guest) -> None:
        result = await guest.exec("ulimit -Sn; ulimit -Hn; ulimit -v; ulimit -c; ulimit -u 2>/dev/null || ulimit -p")
        assert result.stdout.split() == [b"50", b"50", str(256 << 10).encode(), b"0", b"77"]
        result = await guest.exec("head -c 2000000 /dev/zero > big")
        assert result.exit_code != 0 and (tmp_path / "home" / "big").stat().st_size == 1000000
        assert (await guest.exec("cat /proc/self/oom_score_adj")).stdout == b"500\n"

    with_guest(tmp_path, work, *options)


def test_commands_start_with_a_clean_slate(tmp_path: Path) -> None:
    """No descriptor of the agent, of its supervisor or of another command; no ignored or blocked signal."""

    async def work(guest: Guest) -> None:
        await guest.start("sleep 3600", stdin=True)
        result = await guest.exec(
            "ls /proc/self/fd | wc -l; grep -E 'SigBlk|SigIgn' /proc/self/status | cut -f2; umask"
        )
        assert result.stdout.split() == [b"4", b"0" * 16, b"0" * 16, b"0022"]
        result = await guest.exec("ps -o sid= -p $$; echo $$")
        assert len(set(result.stdout.split())) == 1  # the leader of a session of its own

    with_guest(tmp_path, work)


def test_closing_the_input_of_one_does_not_depend_on_another(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        first = await guest.start("cat", stdin=True)
        await guest.start("sleep 3600", stdin=True)
        await first.write_stdin(b"x", close=True)
        assert (await first.wait()).stdout == b"x"

    with_guest(tmp_path, work)


def test_the_agent_stays_small_and_reaps(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_guest(tmp_path) as guest:
            pid = int(await _agent_pid(guest))
            await guest.exec("head -c 30000000 /dev/zero", output_bytes=32 << 20)
            for _ in range(20):
                await guest.exec("(sleep 0.01 &) ; (setsid sleep 0.01 &)")
            await wait_until(lambda: not _children(pid))
            status = Path(f"/proc/{pid}/status").read_text()
            assert int(status.split("RssAnon:")[1].split()[0]) < 1024  # KiB
            assert len(os.listdir(f"/proc/{pid}/fd")) == 3

    async def _agent_pid(guest: Guest) -> str:
        return (await guest.exec("ps -o ppid= -p $PPID")).text

    asyncio.run(run())


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_time_in_which_the_machine_was_frozen_does_not_count(tmp_path: Path) -> None:
    """As the freezer does: everything stops for longer than the command has left."""

    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            guest = await agent.open()
            process = await guest.start(["sleep", "3600"], timeout_s=4)
            agent.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(5)
            agent.process.send_signal(signal.SIGCONT)
            assert (await guest.poll(process.command_id, wait_s=0)).is_running
            assert (await process.wait()).timed_out
            guest.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())
