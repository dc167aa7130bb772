"""`RemoteSandbox` against our own service and against one that is not ours."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from sandbox.foreign_service import ForeignService, running
from sandbox.scripted_backend import ScriptedBackend
from sandbox.service_thread import ServiceThread, wait_for

from moonlet.errors import (
    BackendUnavailableError,
    GuestFileError,
    SandboxDiedError,
    SandboxError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
    StorageError,
    TemplateError,
)
from moonlet.sandbox.api import Limits, SandboxSpec, State
from moonlet.sandbox.remote import RemoteSandbox
from moonlet.sandbox.remote_process import exit_code_of


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture
def foreign():
    with running(ForeignService()) as started:
        yield started


def use(service: ServiceThread, work, **spec):
    """Run `work(sandbox)` with a new sandbox of the service."""

    async def main():
        async with await RemoteSandbox.create(SandboxSpec(**spec), url=service.url, api_key=service.api_key) as sandbox:
            return await work(sandbox)

    return asyncio.run(main())


# -- ours -------------------------------------------------------------------------------------------------------------
def test_the_whole_seam_over_the_wire(service, tmp_path) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        result = await sandbox.exec("cat; echo err >&2; exit 3", stdin=b"in\xff")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"in\xff", b"err\n")
        assert (await sandbox.exec(["sh", "-c", "echo $A $B"], env={"B": "2"})).text == "1 2\n"
        await sandbox.make_dir("d/e")
        await sandbox.make_dir("d/e")
        await sandbox.write_file("d/f", b"data", mode=0o750)
        assert await sandbox.read_file("d/f") == b"data"
        info = await sandbox.stat("d/f")
        assert (info.kind, info.size, info.mode & 0o777, info.owner, info.name) == ("file", 4, 0o750, 0, "f")
        assert [each.name for each in await sandbox.list_files("d")] == ["e", "f"]
        await sandbox.rename("d/f", "g")
        await sandbox.remove("d")
        with pytest.raises(GuestFileError) as caught:
            await sandbox.remove("d")
        assert caught.value.code == "ENOENT"
        source = tmp_path / "source"
        source.write_bytes(os.urandom(3 << 20))
        source.chmod(0o640)
        await sandbox.upload(source, "up/there")
        await sandbox.download("up/there", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        assert (await sandbox.stat("up/there")).mode & 0o777 == 0o640
        state = await sandbox.info()
        assert (state.state, state.metadata, state.limits.memory_bytes) == (State.RUNNING, {"m": "1"}, 64 << 20)
        assert state.backend == "scripted" and state.caps.isolation == "weak" and state.template == "host"

    limits = Limits(memory_bytes=64 << 20)
    use(service, work, env={"A": "1"}, metadata={"m": "1"}, limits=limits)


def test_errors_come_back_as_what_they_were(service, tmp_path) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        for call, code in (
            (sandbox.read_file("none"), "ENOENT"),
            (sandbox.read_file("."), "EISDIR"),
            (sandbox.stat("none"), "ENOENT"),
            (sandbox.list_files("none"), "ENOENT"),
            (sandbox.rename("none", "x"), "ENOENT"),
            (sandbox.exec("true", cwd="/no/such"), "ENOENT"),
            (sandbox.exec(["/no/such"]), "ENOENT"),
            (sandbox.write_file("/proc/x", b""), None),
            (sandbox.upload(tmp_path / "none", "x"), "EINVAL"),
            (sandbox.download("none", tmp_path / "x"), "ENOENT"),
        ):
            with pytest.raises(GuestFileError) as caught:
                await call
            assert code in (None, caught.value.code)
        assert list(tmp_path.iterdir()) == []
        await sandbox.write_file("f", b"")
        with pytest.raises(StorageError):
            await sandbox.download("f", tmp_path / "no" / "dir")
        with pytest.raises(SandboxNotFoundError):
            await sandbox.process("none")

    use(service, work)

    async def refusals() -> None:
        place = {"url": service.url, "api_key": service.api_key}
        with pytest.raises(TemplateError):
            await RemoteSandbox.create(SandboxSpec(template="none"), **place)
        with pytest.raises(BackendUnavailableError):
            await RemoteSandbox.create(SandboxSpec(backend="gvisor"), **place)
        with pytest.raises(SandboxNotFoundError):
            await RemoteSandbox.attach("sbnone", **place)
        with pytest.raises(SandboxError, match="API key"):
            await RemoteSandbox.create(url=service.url, api_key="wrong")

    asyncio.run(refusals())


def test_background_commands(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        process = await sandbox.start("while read line; do echo got $line; done; exit 4", stdin=True, tag="loop")
        assert [(each.pid, each.tag, each.is_running) for each in await sandbox.processes()] == [
            (process.pid, "loop", True)
        ]
        await process.write_stdin(b"one\n")
        again = await sandbox.process("loop")
        assert again.pid == process.pid and again.command_id == process.command_id
        await again.write_stdin(b"two\n", close=True)
        for each in (process, again):
            pieces = [output.data async for output in each.output()]
            assert b"".join(pieces) == b"got one\ngot two\n"
            assert (await each.wait()).exit_code == 4
        sleeper = await sandbox.start("trap 'echo usr; exit 9' USR1; echo ready; while :; do sleep 0.05; done")
        async for output in sleeper.output():
            if output.data.startswith(b"ready"):
                await sleeper.signal(signal.SIGUSR1)
        assert (await sleeper.wait()).exit_code == 9
        tree = await sandbox.start("setsid sleep 31337 & sleep 31337")
        await tree.kill()
        assert (await tree.wait()).exit_code == 137
        await tree.kill()
        assert (await sandbox.exec("pgrep -f 'sleep 3133[7]'")).exit_code == 1
        terminal = await sandbox.start("stty size; read x; stty size", pty=(10, 20))
        await terminal.resize(30, 40)
        await terminal.write_stdin(b"\n")
        seen = (await terminal.wait()).stdout
        assert b"30 40" in seen

    use(service, work)


def test_time_limits_and_flood(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        started = time.monotonic()
        result = await sandbox.exec("echo kept; setsid sleep 31338 & wait", timeout_s=0.5)
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"kept\n")
        assert time.monotonic() - started < 20
        flood = await sandbox.exec("head -c 5000000 /dev/zero")
        assert len(flood.stdout) == 1000 and flood.num_stdout_bytes == 5_000_000 and flood.is_truncated
        assert (await sandbox.exec("read x; echo $?")).text == "1\n"
        big = b"x" * (5 << 20)
        assert (await sandbox.exec("wc -c", stdin=big)).text.strip() == str(len(big))
        assert (await sandbox.exec("true", stdin=big)).exit_code == 0

    use(service, work, limits=Limits(output_bytes=1000))


def test_a_caller_that_gives_up_leaves_nothing_running(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        task = asyncio.ensure_future(sandbox.exec("sleep 31339"))
        while not await sandbox.processes():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while await sandbox.processes():
            await asyncio.sleep(0.01)

    use(service, work)


def test_lifecycle(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        await sandbox.write_file("f", b"kept")
        await sandbox.pause()
        await sandbox.pause()
        with pytest.raises(SandboxStateError):
            await sandbox.read_file("f")
        with pytest.raises(SandboxStateError):
            await sandbox.exec("true")
        assert (await sandbox.info()).state is State.PAUSED
        await sandbox.resume()
        await sandbox.resume()
        await sandbox.set_timeout(77.5)
        info = await sandbox.info()
        assert info.expires_at is not None and abs(info.expires_at - time.time() - 77.5) < 30
        await sandbox.set_timeout(None)
        assert (await sandbox.info()).expires_at is None
        snapshot = await sandbox.snapshot("named")
        place = {"url": service.url, "api_key": service.api_key}
        copy = await RemoteSandbox.create(SandboxSpec(template=snapshot), **place)
        children = [child for child in await sandbox.fork(2) if isinstance(child, RemoteSandbox)]
        assert len({child.id for child in (sandbox, copy, *children)}) == 4
        for child in (copy, *children):
            assert await child.read_file("f") == b"kept"
            await child.destroy()
        again = await RemoteSandbox.attach(sandbox.id, **place)
        assert await again.read_file("f") == b"kept"
        await again.aclose()
        await sandbox.destroy()
        await sandbox.destroy()
        for call in (sandbox.exec("true"), sandbox.info(), sandbox.read_file("f"), sandbox.write_file("f", b"")):
            with pytest.raises(SandboxNotFoundError):
                await call

    use(service, work)


def test_who_still_holds_a_sandbox_that_another_destroyed_is_told(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        other = await RemoteSandbox.attach(sandbox.id, url=service.url, api_key=service.api_key)
        waiting = asyncio.ensure_future(sandbox.exec("sleep 100"))
        while not await other.processes():
            await asyncio.sleep(0.01)
        await other.destroy()
        for call in (waiting, sandbox.exec("true"), sandbox.info(), sandbox.pause(), sandbox.read_file("f")):
            with pytest.raises(SandboxNotFoundError):
                await call

    use(service, work)


def test_a_dead_machine_says_why(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        with pytest.raises(SandboxDiedError):
            await sandbox.exec("kill -9 $(cut -d' ' -f4 /proc/$PPID/stat) $PPID; sleep 60")
        with pytest.raises(SandboxDiedError) as caught:
            await sandbox.read_file("f")
        assert caught.value.reason == "crash"
        info = await sandbox.info()
        assert info.state is State.FAILED and info.reason == "crash"

    use(service, work)


def test_names_that_are_not_text(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        name = "d/" + os.fsdecode(b"x\xffy")
        await sandbox.write_file(name, b"data")
        (found,) = await sandbox.list_files("d")
        assert found.path.endswith(name)
        assert await sandbox.read_file(found.path) == b"data"
        await sandbox.rename(found.path, "d/plain")
        assert [each.name for each in await sandbox.list_files("d")] == ["plain"]

    use(service, work)


def test_watching(service) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        await sandbox.make_dir("w")
        seen = []

        async def watch() -> None:
            async for event in sandbox.watch("w"):
                seen.append(event)
                if event.path == "last":
                    return

        task = asyncio.ensure_future(watch())
        while not task.done():
            await sandbox.write_file("w/last", b"x")
            await asyncio.sleep(0.05)
        await task
        with pytest.raises(GuestFileError):
            async for _ in sandbox.watch("none"):
                pass

    use(service, work)


def test_a_command_is_followed_through_a_restart_of_the_service(tmp_path) -> None:
    """The machine outlives the service; so does the wait for a command, with every byte of its output once."""
    backend = ScriptedBackend(frees_memory=False)
    flag = tmp_path / "go"
    first = ServiceThread(tmp_path / "state", backend)
    first.pauses = True
    with first:
        port = int(first.url.rsplit(":", 1)[1])
        outcome: dict = {}

        async def client() -> None:
            sandbox = await RemoteSandbox.create(url=first.url, api_key=first.api_key)
            process = await sandbox.start(f"seq 1000; while [ ! -e {flag} ]; do sleep 0.02; done; seq 1001 2000")
            outcome["started"] = sandbox.id
            outcome["result"] = await process.wait()
            await sandbox.destroy()

        thread = threading.Thread(target=lambda: asyncio.run(client()))
        thread.start()
        wait_for(lambda: "started" in outcome and first.open_streams())
    with ServiceThread(tmp_path / "state", backend, port=port) as second:
        second.client.post(f"/sandboxes/{outcome['started']}/connect", json={})
        flag.touch()
        thread.join(60)
    assert outcome["result"].stdout == b"".join(b"%d\n" % number for number in range(1, 2001))


# -- not ours ---------------------------------------------------------------------------------------------------------
def place_of(foreign: ForeignService) -> dict[str, str]:
    return {"url": foreign.url, "api_key": "key"}


def test_the_old_paths_are_found_and_remembered(foreign) -> None:
    async def main() -> None:
        sandbox = await RemoteSandbox.create(SandboxSpec(allow_hosts=("a.b",)), **place_of(foreign))
        for _ in range(3):
            await sandbox.info()
        await sandbox.pause()
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.set_timeout(None)
        await sandbox.destroy()

    asyncio.run(main())
    paths = foreign.paths()
    assert paths["POST /v2/sandboxes"] == paths["POST /sandboxes"] == 1
    assert paths["GET /v2/sandboxes/fx1"] == 1 and paths["GET /sandboxes/fx1"] >= 3
    assert all(headers["x-api-key"] == "key" for _, path, headers in foreign.requests if "sandboxes" in path)


def test_what_is_known_of_a_foreign_service_is_said(foreign) -> None:
    async def main() -> None:
        sandbox = await RemoteSandbox.create(**place_of(foreign))
        info = await sandbox.info()
        assert (info.caps.isolation, info.backend, info.template) == ("remote", "remote", "base")
        assert (info.limits.memory_bytes, info.limits.cpus, info.metadata) == (512 << 20, 2.0, {"a": "b"})
        assert info.expires_at == info.created_at + 299.5
        children = await sandbox.fork(2)
        assert isinstance(children[0], RemoteSandbox) and isinstance(children[1], SandboxError)
        assert await sandbox.snapshot() == "snap1"

    asyncio.run(main())


def test_commands_and_files_of_a_foreign_service(foreign, tmp_path) -> None:
    async def main() -> None:
        sandbox = await RemoteSandbox.create(**place_of(foreign))
        assert (await sandbox.exec("fine")).stdout == b"fine"
        assert (await sandbox.exec("killed")).exit_code == 137
        slow = await sandbox.exec("slow")
        assert (slow.exit_code, slow.timed_out, slow.stdout) == (124, True, b"slow")
        with pytest.raises(SandboxTimeoutError):
            await sandbox.exec("break")
        await sandbox.write_file("f", b"abc")  # as a form: its version takes no octet streams
        (tmp_path / "g").write_bytes(b"x" * 100_000)
        await sandbox.upload(tmp_path / "g", "g")
        assert await sandbox.read_file("f") == b"abc" and foreign.files["g"] == b"x" * 100_000
        assert (await sandbox.stat("f")).owner == -1
        for call in (sandbox.read_file("none"), sandbox.stat("none"), sandbox.remove("none")):
            with pytest.raises(GuestFileError) as caught:
                await call
            assert caught.value.code == "ENOENT"
        foreign.state = "paused"
        with pytest.raises(SandboxStateError, match="paused"):
            await sandbox.stat("f")
        headers = next(headers for _, path, headers in foreign.requests if path == "/files")
        assert (headers["e2b-sandbox-id"], headers["x-access-token"]) == ("fx1", "tok")

    asyncio.run(main())


def test_safe_requests_are_repeated_after_the_time_that_is_asked_for(foreign) -> None:
    async def main() -> None:
        sandbox = await RemoteSandbox.create(**place_of(foreign))
        await sandbox.info()
        for status in (429, 502, 503):
            foreign.requests.clear()
            foreign.troubles = [(status, {"Retry-After": "1"}), (status, {})]
            before = time.monotonic()
            await sandbox.info()
            assert len(foreign.requests) == 3 and time.monotonic() - before >= 1
        foreign.requests.clear()
        foreign.troubles = [(429, {"Retry-After": "3600"})]
        with pytest.raises(SandboxLimitError) as caught:
            await sandbox.info()
        assert caught.value.retry_after_s == 3600 and len(foreign.requests) == 1
        foreign.troubles = [(500, {})]
        with pytest.raises(SandboxError):
            await sandbox.info()
        foreign.troubles = [(507, {})]
        with pytest.raises(StorageError):
            await sandbox.info()

    asyncio.run(main())


def test_a_create_is_repeated_with_its_key_and_a_limit_is_told_at_once(foreign) -> None:
    async def main() -> None:
        foreign.troubles = [(429, {"Retry-After": "7"})]
        with pytest.raises(SandboxLimitError) as caught:
            await RemoteSandbox.create(**place_of(foreign))
        assert caught.value.retry_after_s == 7
        foreign.requests.clear()
        foreign.troubles = [(503, {}), (503, {})]
        await RemoteSandbox.create(**place_of(foreign))

    asyncio.run(main())
    keys = {headers["idempotency-key"] for _, path, headers in foreign.requests if path == "/v2/sandboxes"}
    assert len(keys) == 1 and foreign.paths()["POST /v2/sandboxes"] == 3


def test_a_service_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(BackendUnavailableError, match="cannot reach"):
            await RemoteSandbox.create(url="http://127.0.0.1:9", api_key="x")

    asyncio.run(main())


def test_ends_of_commands() -> None:
    assert exit_code_of({}) == 0
    assert exit_code_of({"exitCode": 5}) == 5
    assert exit_code_of({"exitCode": -1, "status": "signal: killed"}) == 137
    assert exit_code_of({"exitCode": -1, "status": "signal: segmentation fault (core dumped)"}) == 139
    assert exit_code_of({"exitCode": -1, "status": "?"}) == 255
