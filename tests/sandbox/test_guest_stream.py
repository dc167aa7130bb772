"""The stream: hosts that die in the middle of a frame, agents that lie, bytes that are no frames at all."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox.guest_process import AgentProcess, running_guest, wait_until, with_guest

from moonlet.errors import BackendUnavailableError, GuestFileError, SandboxDiedError, SandboxError, SandboxTimeoutError
from moonlet.sandbox.guest.build import build_agent
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import (
    MAX_BODY_BYTES,
    MAX_LINE_BYTES,
    FifoPair,
    FrameReader,
    GuestStream,
    Reply,
    UnixSocket,
)

SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def request(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@pytest.fixture(scope="module")
def sanitized() -> Path:
    try:
        return build_agent(SANITIZED)
    except BackendUnavailableError as error:
        pytest.skip(f"no sanitizers here: {error}")


# -- a host that dies and one that comes new ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "half",
    [
        b'{"id":1,"op":"pu',
        b'{"id":1,"op":"put","path":"victim","bytes":200000}\n' + b"x" * 5,
        b'{"id":1,"op":"put","path":"victim","bytes":4}\n',
        b'{"id":1,"op":"put","path":"victim","bytes":4}\nxxxx',
        b'{"id":1,"op":"put","path":"victim","bytes":262144}\n',
        b'{"id":1,"op":"list","path":"' + b"x" * 100_000,
        b"\xff\xfe\n\n{}{}[[[",
    ],
    ids=["line", "body", "no body", "no mark", "largest body", "long line", "junk"],
)
def test_a_new_host_takes_over_in_the_middle_of_a_frame(tmp_path: Path, half: bytes) -> None:
    """Whatever was half sent does nothing; the command goes on, and its output is read from where the old host was."""

    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            first = await agent.open()
            await first.write_file("victim", b"whole")
            process = await first.start("echo one; while [ ! -e go ]; do sleep .01; done; echo two")
            assert (await first.poll(process.command_id)).stdout == b"one\n"
            waiting = asyncio.ensure_future(first.poll(process.command_id, (4, 0)))
            await asyncio.sleep(0)
            os.write(first.stream._fds[0], half)
            first.stream.close()  # as a kill of the service would
            with pytest.raises(SandboxDiedError):
                await waiting
            second = await agent.open()
            assert second.stream.epoch == first.stream.epoch
            (tmp_path / "home" / "go").touch()
            poll = await second.poll(process.command_id, (4, 0))
            assert poll.stdout == b"two\n"
            assert await second.read_file("victim") == b"whole"
            second.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def test_half_an_input_does_not_reach_the_command(tmp_path: Path) -> None:
    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            first = await agent.open()
            process = await first.start("cat", stdin=True)
            os.write(first.stream._fds[0], request(id=9, op="stdin", command=process.command_id, bytes=1000) + b"half")
            first.stream.close()
            second = Guest(await GuestStream.open(agent.endpoint))
            again = await second.process(process.command_id)
            await again.write_stdin(b"whole", close=True)
            assert (await again.wait()).stdout == b"whole"
            second.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def test_a_host_that_is_killed_leaves_nothing_undone(tmp_path: Path) -> None:
    """A real process is killed while it uploads; the next host finds the command and uploads the same file."""
    script = f"""
import asyncio
from pathlib import Path
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import FifoPair, GuestStream
async def main():
    guest = Guest(await GuestStream.open(FifoPair(Path({str(tmp_path / "to_guest")!r}), Path({str(tmp_path / "from_guest")!r}))))
    await guest.start("echo started; sleep 3600", tag="kept")
    while True:
        await guest.write_file("file", b"v" * 3_000_000)
        print("written", flush=True)
asyncio.run(main())
"""

    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            for life in range(3):
                host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
                assert host.stdout is not None and host.stdout.readline()
                host.kill()
                host.wait()
                host.stdout.close()
                guest = await agent.open()
                assert (await guest.poll((await guest.process("kept")).command_id)).stdout == b"started\n"
                assert len(await guest.processes()) == life + 1
                await guest.write_file("file", b"whole")
                assert await guest.read_file("file") == b"whole"
                guest.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def test_answers_to_a_host_that_is_gone_are_not_heard(tmp_path: Path) -> None:
    """It asked for more than the pipe holds and never read: the next one hears only what it asked for itself."""

    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            first = await agent.open()
            await first.write_file("file", b"x" * MAX_BODY_BYTES)
            loop = asyncio.get_running_loop()
            loop.remove_reader(first.stream._fds[1])
            asked = [first.stream.request("read", path="file") for _ in range(100)]
            first.stream.close()
            for call in asked:
                call.cancel()
            second = await agent.open()
            assert (await second.exec("echo clear")).stdout == b"clear\n"
            second.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def test_an_agent_without_a_host_ends_no_command_and_does_not_spin(tmp_path: Path) -> None:
    """Pipes whose host side is really closed: end-of-file again and again, until one comes back."""

    async def run() -> None:
        agent = AgentProcess(tmp_path, read_only=True)
        try:
            first = await agent.open()
            await first.start("sleep 3600", tag="kept")
            first.stream.close()
            before = _cpu_ticks(agent.process.pid)
            await asyncio.sleep(0.5)
            assert _cpu_ticks(agent.process.pid) - before < 25
            second = await agent.open()
            assert (await second.process("kept")).pid
            second.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_socket_that_ends_ends_the_agent_and_its_commands(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "home").mkdir()
    agent = AgentProcess(tmp_path, stream=theirs)
    theirs.close()

    async def run() -> None:
        ours.setblocking(False)
        number = os.dup(ours.fileno())
        stream = GuestStream(number, number)
        await stream._greet(is_fresh=True)
        guest = Guest(stream)
        assert (await guest.exec("echo over a socket")).stdout == b"over a socket\n"
        process = await guest.start("sleep 3600")
        stream.close()
        ours.close()
        await wait_until(lambda: agent.process.poll() == 0 and not Path(f"/proc/{process.pid}").exists())

    asyncio.run(run())


# -- an agent that is asked nonsense --------------------------------------------------------------------------------------
def test_requests_of_wrong_kinds_are_errors(tmp_path: Path, sanitized: Path) -> None:
    ops = (
        "start poll stdin signal resize reap commands read write put begin rename stat mkdir list remove watch changes"
    )
    ops += " unwatch relay net.send net.end net.close net.ack settime reseed sync usage identity nothing"
    odd: list[Any] = [None, True, -1, 0, 1.5, 1e300, 2**63, "", "x", "\0", "x" * 5000, [], [1], {}, {"a": 1}, [[]] * 9]
    names = "command argv env cwd stdin timeout_s output_bytes tag pty stdout stderr max wait_s close signal tree rows columns"
    names += (
        " kill path offset length mode make_dirs truncate to depth after limit watch recursive port channel count time"
    )
    fields = names.split()
    draw = random.Random(3)

    async def run() -> None:
        async with running_guest(tmp_path, binary=sanitized) as guest:
            for op in ops.split():
                for _ in range(40):
                    asked = {name: draw.choice(odd) for name in draw.sample(fields, 8)}
                    asked.pop("path", None)  # "." would be removed, and the home with it
                    if op == "remove":
                        asked["path"] = "absent"
                    call = guest.stream.request(op, body=draw.choice([b"", b"body"]), **asked)
                    call.cancel()
            assert (await guest.exec("echo fine")).stdout == b"fine\n"
            with pytest.raises(GuestFileError) as caught:
                await guest.stream.call("nothing")
            assert caught.value.code == "ENOSYS"

    asyncio.run(run())


JUNK = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace") + b"\n"),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
        max_leaves=20,
    ).map(lambda value: json.dumps(value).encode() + b"\n"),
    st.integers(1, 100_000).map(lambda depth: b"[" * depth + b"\n"),
    st.integers(1, 100_000).map(lambda depth: b'{"a":' * depth + b"\n"),
    st.integers(-5, 2 * MAX_BODY_BYTES).map(lambda size: request(id=1, op="put", path="junk", bytes=size) + b"x" * 100),
    st.sampled_from(
        [
            b'{"id":1,"op":"list","path":"\\ud800"}\n',
            b'{"id":1,"op":"list","path":"\\udc80\\u0000"}\n',
            b'{"id":1,"op":"list","path":"\\u12"}\n',
            b'{"id":1e308,"op":"usage"}\n',
            b'{"id":' + b"9" * 5000 + b',"op":"usage"}\n',
            b'{"id":1,"op":"list","path":"' + b"x" * MAX_LINE_BYTES + b'"}\n',
            b"0," * (MAX_LINE_BYTES // 2) + b"\n",
            b'{"a":[' + b"0," * 400_000 + b"0]}\n",
            b'{"op":"hello","nonce":7}\n',
            b'{"op":"hello"}\n',
            b"\0" * 5000 + b"\n",
        ]
    ),
)


@pytest.fixture(scope="module")
def shared_agent(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    agent = AgentProcess(tmp_path_factory.mktemp("fuzz"), binary=sanitized)
    yield agent
    assert agent.end() == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.lists(JUNK, max_size=8), greets=st.booleans(), draw=st.randoms(use_true_random=False))
def test_no_bytes_harm_the_agent(shared_agent: AgentProcess, junk: list[bytes], greets: bool, draw: Any) -> None:
    """Junk in pieces of any size, before and after a hello; a host that comes then is served."""

    async def run() -> None:
        sent = (request(op="hello", nonce="n") if greets else b"") + b"".join(junk)
        await _send_in_pieces(shared_agent.endpoint, sent, draw)
        guest = await shared_agent.open()
        assert (await guest.stream.call("stat", path=".")).fields["entry"]["kind"] == "dir"
        guest.stream.close()

    asyncio.run(run())


async def _send_in_pieces(endpoint: FifoPair, data: bytes, draw: Any) -> None:
    """Reads along, so that the agent is never stopped by a full pipe."""
    to_guest, from_guest = (
        os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (endpoint.to_guest, endpoint.from_guest)
    )
    try:
        at = 0
        while at < len(data):
            piece = data[at : at + draw.choice([1, 2, 7, 100, 5000, 65536])]
            try:
                at += os.write(to_guest, piece)
            except BlockingIOError:
                await asyncio.sleep(0.001)
            try:
                os.read(from_guest, 1 << 20)
            except BlockingIOError:
                continue
    finally:
        os.close(to_guest)
        os.close(from_guest)


def test_junk_ends_the_trust_until_a_hello(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        os.write(guest.stream._fds[0], b"no json\n" + request(id=1, op="put", path="hidden", bytes=1) + b"x.")
        await wait_until(lambda: guest.stream.is_closed)
        assert os.listdir(tmp_path / "home") == []
        with pytest.raises(SandboxDiedError, match="again"):
            await guest.stream.call("usage")

    with_guest(tmp_path, work)


# -- a guest that lies ----------------------------------------------------------------------------------------------------
FRAMES = st.lists(
    st.tuples(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.binary(max_size=50)), max_size=6
)


def encode(fields: dict[str, Any], body: bytes) -> bytes:
    fields = {name: value for name, value in fields.items() if name != "bytes"}
    return request(**(fields | ({"bytes": len(body)} if body else {}))) + body


@given(frames=FRAMES, before=st.lists(JUNK, max_size=3), draw=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_frames_survive_any_splitting(
    frames: list[tuple[dict[str, Any], bytes]], before: list[bytes], draw: Any
) -> None:
    reader = FrameReader("secret")
    junk = b"".join(before)
    hello = request(hello="secret")
    wire = junk + b"\n" + hello + b"".join(encode(*frame) for frame in frames)
    got: list[Reply] = []
    at = 0
    while at < len(wire):
        step = draw.choice([1, 3, 50, 1000, 70_000]) if len(wire) < 5000 else 70_000
        got += reader.feed(wire[at : at + step])
        at += step
    assert dict(got[0].fields) == {"hello": "secret"}
    expected = [{name: value for name, value in fields.items() if name != "bytes"} for fields, _ in frames]
    assert [{name: value for name, value in reply.fields.items() if name != "bytes"} for reply in got[1:]] == expected
    assert [reply.body for reply in got[1:]] == [body for _, body in frames]


@given(junk=st.lists(JUNK, max_size=10))
@settings(deadline=None, max_examples=100)
def test_no_bytes_harm_the_host(junk: list[bytes]) -> None:
    reader = FrameReader("n")
    reader.feed(request(hello="n"))
    for piece in junk:
        for reply in reader.feed(piece):
            assert isinstance(reply.fields, dict) and len(reply.body) <= MAX_BODY_BYTES
    assert len(reader._buffer) <= MAX_LINE_BYTES + MAX_BODY_BYTES


Answers = Callable[[dict[str, Any]], bytes]


@asynccontextmanager
async def lying_guest(folder: Path, answers: Answers) -> AsyncIterator[Guest]:
    """A guest over a Unix socket that greets as it should and then says what `answers` makes of each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip():
                asked = json.loads(line)
                body = await reader.readexactly(asked["bytes"] + 1) if asked.get("bytes") else b""
                del body
                nonce = asked.get("nonce")
                writer.write(request(hello=nonce, protocol=1, epoch="e", time=1.0) if nonce else answers(asked))
        writer.close()

    path = folder / "socket"
    server = await asyncio.start_unix_server(serve, path, limit=4 << 20)
    try:
        stream = await GuestStream.open(UnixSocket(path), timeout_s=20)
        yield Guest(stream)
        stream.close()
    finally:
        server.close()


def poll_reply(asked: dict[str, Any], **changes: Any) -> bytes:
    names = ("stdout_bytes", "stderr_bytes", "stdout_kept", "stderr_kept", "stdout_total", "stderr_total")
    fields = {"id": asked["id"], "ok": True, "running": False, "exit_code": 0, **dict.fromkeys(names, 0)}
    return request(**(fields | changes))


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        (lambda guest: guest.stat("x"), lambda asked: request(id=asked["id"], ok=True)),
        (
            lambda guest: guest.stat("x"),
            lambda asked: request(id=asked["id"], ok=True, entry={"path": 5, "kind": "file"}),
        ),
        (lambda guest: guest.list_files("x"), lambda asked: request(id=asked["id"], ok=True, entries=7)),
        (lambda guest: guest.list_files("x"), lambda asked: request(id=asked["id"], ok=True, entries=[{}], more=True)),
        (
            lambda guest: guest.usage(),
            lambda asked: request(id=asked["id"], ok=True, processes="many", memory_bytes=True),
        ),
        (lambda guest: guest.processes(), lambda asked: request(id=asked["id"], ok=True, commands=[1])),
        (lambda guest: guest.processes(), lambda asked: request(id=asked["id"], ok=True, commands=[{"pid": "x"}])),
        (lambda guest: guest.poll("x"), lambda asked: request(id=asked["id"], ok=True)),
        (lambda guest: guest.poll("x"), lambda asked: poll_reply(asked, stdout_bytes=5)),
        (lambda guest: guest.poll("x"), lambda asked: poll_reply(asked, stdout_bytes=-5, stderr_bytes=5)),
        (lambda guest: guest.start("x"), lambda asked: request(id=asked["id"], ok=True, pid="one")),
        (lambda guest: guest.upload(Path(__file__), "x"), lambda asked: request(id=asked["id"], ok=True, temporary=1)),
        (lambda guest: guest.usage(), lambda asked: request(id=asked["id"], ok="yes", error=["E"], message={})),
        (
            lambda guest: guest.usage(),
            lambda asked: request(id=asked["id"], ok=False, error="x" * 99, message="\ud800\udcff"),
        ),
    ],
)
def test_a_guest_that_answers_nonsense_is_an_error(
    tmp_path: Path, operation: Callable[[Guest], Awaitable[object]], answer: Answers
) -> None:
    async def run() -> None:
        async with lying_guest(tmp_path, answer) as guest:
            with pytest.raises(SandboxError) as caught:
                await operation(guest)
            str(caught.value).encode()  # it can be printed

    asyncio.run(run())


def test_a_guest_that_keeps_silent_or_goes_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with lying_guest(tmp_path, lambda asked: b'{"id":77777,"ok":true}\n[]\n{"event":"strange"}\n') as guest:
            with pytest.raises(SandboxTimeoutError):
                await guest.stream.call("usage", timeout_s=0.1)
        with pytest.raises(SandboxTimeoutError):
            await GuestStream.open(UnixSocket(tmp_path / "absent"), timeout_s=0.1)
        agent = AgentProcess(tmp_path / "agent")
        guest = await agent.open()
        agent.end()
        with pytest.raises(SandboxTimeoutError):  # nobody is there any more, and a pipe does not tell
            await guest.stream.call("usage", timeout_s=0.1)
        guest.stream.close(SandboxDiedError("it is gone", "crash"))
        with pytest.raises(SandboxDiedError, match="it is gone"):
            await guest.stream.call("usage")

    asyncio.run(run())


def test_a_stream_that_ends_fails_all_calls(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "socket"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while b"hello" not in (line := await reader.readline()):
                pass
            writer.write(request(hello=json.loads(line)["nonce"], protocol=1))
            await reader.readline()
            writer.close()

        async with await asyncio.start_unix_server(serve, path):
            stream = await GuestStream.open(UnixSocket(path))
            results = await asyncio.gather(*(stream.call("usage") for _ in range(5)), return_exceptions=True)
            assert [type(result) for result in results] == [SandboxDiedError] * 5
            assert stream.is_closed
            stream.post("usage")  # silent
            stream.close()

    asyncio.run(run())


def test_a_guest_cannot_fill_the_memory_with_output(tmp_path: Path) -> None:
    """It claims ever more output; the transcript stops believing it."""
    piece = b"x" * MAX_BODY_BYTES

    def flood(asked: dict[str, Any]) -> bytes:
        if asked["op"] != "poll":
            return request(id=asked.get("id", 0), ok=True, pid=1)
        sizes = {"stdout_bytes": len(piece), "stdout_kept": 1 << 60, "stdout_total": 1 << 60, "bytes": len(piece)}
        return poll_reply(asked, running=True, **sizes) + piece

    async def run() -> None:
        async with lying_guest(tmp_path, flood) as guest:
            with pytest.raises(SandboxError, match="more output"):
                await guest.exec("x", output_bytes=1 << 20)

    asyncio.run(run())


def test_what_is_too_long_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        with pytest.raises(GuestFileError) as caught:
            await guest.stream.call("stat", path="x" * (MAX_LINE_BYTES + 1))
        assert caught.value.code == "E2BIG"
        with pytest.raises(ValueError, match="body"):
            await guest.stream.call("put", path="x", body=b"x" * (MAX_BODY_BYTES + 1))
        assert (await guest.exec(["true"], env={"BIG": "x" * 100_000})).exit_code == 0

    with_guest(tmp_path, work)
