"""Everything that a user of the `e2b` package does, run by a Python that has one; `sync` or `async` as the argument.

The service is where E2B_API_URL and E2B_SANDBOX_URL say. MEMORY is 1 if pauses and forks keep running processes.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import sys
import time
import urllib.request
import uuid
from typing import Any

import e2b
from e2b import CommandExitException, NotFoundException, TimeoutException

KIND = sys.argv[1]
SANDBOX: Any = e2b.AsyncSandbox if KIND == "async" else e2b.Sandbox
KEEPS_PROCESSES = os.environ["MEMORY"] == "1"


async def do(value: Any) -> Any:
    """The value of a call of either kind of client."""
    return await value if inspect.isawaitable(value) else value


async def raises(kind: Any, call: Any) -> Any:
    try:
        await do(call())
    except kind as error:
        return error
    raise AssertionError(f"{kind} was expected")


async def commands(box: Any) -> None:
    result = await do(box.commands.run("echo out; echo err >&2", envs={"X": "1"}))
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0), result
    failed = await raises(CommandExitException, lambda: box.commands.run("exit 3"))
    assert failed.exit_code == 3
    seen: list[str] = []
    await do(box.commands.run("printf 'a\\303\\244\\377b'", on_stdout=seen.append))
    assert "".join(seen) == "aä\ufffdb", seen
    assert (
        await do(box.commands.run("echo $GIVEN $HERE; pwd", envs={"HERE": "2"}, cwd="/tmp"))
    ).stdout == "1 2\n/tmp\n"
    await raises(TimeoutException, lambda: box.commands.run("sleep 60", timeout=0.5))
    big = await do(box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x"))
    assert len(big.stdout) == 3_000_000


async def background(box: Any) -> None:
    handle = await do(box.commands.run("read line; echo got $line; sleep 0.2; echo end", background=True, stdin=True))
    listed = await do(box.commands.list())
    assert [each.pid for each in listed] == [handle.pid], listed
    again = await do(box.commands.connect(handle.pid))
    await do(box.commands.send_stdin(handle.pid, "words\n"))
    for each in (handle, again):
        assert (await do(each.wait())).stdout == "got words\nend\n"
    killed = await do(box.commands.run("sleep 60", background=True))
    assert await do(killed.kill()) is True
    await raises(CommandExitException, killed.wait)
    assert await do(box.commands.kill(killed.pid)) is False
    assert await do(box.commands.list()) == []
    left = await do(box.commands.run("sleep 60", background=True, timeout=0))
    await do(left.disconnect())
    assert [each.pid for each in await do(box.commands.list())] == [left.pid]
    assert await do(box.commands.kill(left.pid)) is True
    counting = await do(box.commands.run("wc -c", background=True, stdin=True))
    for _ in range(3):
        await do(box.commands.send_stdin(counting.pid, "x" * 100_000))
    await do(box.commands.close_stdin(counting.pid))
    assert (await do(counting.wait())).stdout.strip() == "300000"
    if hasattr(box.commands, "stream_input"):
        reader = await do(box.commands.run("cat", background=True, stdin=True))
        if KIND == "async":
            async with box.commands.stream_input(reader.pid) as stream:
                await stream.send("one")
                await stream.send(b"two")
        else:
            box.commands.stream_input(reader.pid, iter(["one", b"two"]))
        await do(box.commands.close_stdin(reader.pid))
        assert (await do(reader.wait())).stdout == "onetwo"


async def terminal(box: Any) -> None:
    seen = bytearray()
    size = e2b.PtySize(rows=20, cols=70)
    if KIND == "async":
        handle = await box.pty.create(size=size, on_data=seen.extend)
    else:
        handle = box.pty.create(size=size)
    await do(box.pty.send_stdin(handle.pid, b"stty size\n"))
    await do(box.pty.resize(handle.pid, e2b.PtySize(rows=30, cols=90)))
    await do(box.pty.send_stdin(handle.pid, b"stty size; exit 4\n"))
    try:
        await do(handle.wait() if KIND == "async" else handle.wait(on_pty=seen.extend))
    except CommandExitException as error:
        assert error.exit_code == 4
    assert b"30 90" in seen, bytes(seen)


async def files(box: Any) -> None:
    written = await do(box.files.write("dir/file.txt", "text ä"))
    assert written.name == "file.txt" and written.path.endswith("/dir/file.txt")
    assert await do(box.files.read("dir/file.txt")) == "text ä"
    data = os.urandom(700_000)
    await do(box.files.write("blob", data))
    assert bytes(await do(box.files.read("blob", format="bytes"))) == data
    await do(box.files.write("from_io", io.BytesIO(data)))
    assert bytes(await do(box.files.read("from_io", format="bytes"))) == data
    pieces = await do(box.files.read("blob", format="stream"))
    joined = b"".join([each async for each in pieces]) if KIND == "async" else b"".join(pieces)
    assert joined == data
    many = await do(box.files.write_files([{"path": f"many/{index}", "data": str(index)} for index in range(20)]))
    assert len(many) == 20 and await do(box.files.read("many/7")) == "7"
    await do(box.files.write("packed", data, gzip=True))
    assert bytes(await do(box.files.read("packed", format="bytes"))) == data
    assert await do(box.files.exists("blob")) is True and await do(box.files.exists("none")) is False
    assert await do(box.files.make_dir("fresh/deep")) is True and await do(box.files.make_dir("fresh/deep")) is False
    entries = {entry.name: entry for entry in await do(box.files.list("dir"))}
    assert entries["file.txt"].type == e2b.FileType.FILE and entries["file.txt"].size == 7
    info = await do(box.files.get_info("blob"))
    assert (info.size, info.permissions, info.mode) == (700_000, "rw-r--r--", 0o644)
    await do(box.commands.run("ln -s blob link"))
    assert (await do(box.files.get_info("link"))).symlink_target == "blob"
    moved = await do(box.files.rename("dir/file.txt", "other/place.txt"))
    assert moved.name == "place.txt" and await do(box.files.read("other/place.txt")) == "text ä"
    await do(box.files.remove("other"))
    await do(box.files.remove("other"))
    assert await do(box.files.exists("other")) is False
    await raises(NotFoundException, lambda: box.files.read("none"))
    await raises(NotFoundException, lambda: box.files.list("none"))
    url = box.download_url("blob", use_signature_expiration=60)
    assert urllib.request.urlopen(url).read() == data


async def watch(box: Any) -> None:
    await do(box.files.make_dir("seen"))
    names: list[str] = []
    if KIND == "async":
        handle = await box.files.watch_dir("seen", on_event=lambda event: names.append(event.name))
    else:
        handle = box.files.watch_dir("seen")
    await do(box.files.write("seen/new", "x"))
    deadline = time.monotonic() + 20
    while "new" not in names and time.monotonic() < deadline:
        if KIND == "sync":
            names += [event.name for event in handle.get_new_events()]
        await asyncio.sleep(0.02)
    assert "new" in names, names
    await do(handle.stop())


async def lifecycle(box: Any) -> None:
    await do(box.files.write("kept", "before"))
    counter = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.05; done"
    running = await do(box.commands.run(counter, background=True, timeout=0))
    await do(running.disconnect())
    await counted(box)
    assert await do(box.is_running()) is True
    assert await do(box.pause())
    assert await do(box.is_running()) is False
    await raises(TimeoutException, lambda: box.commands.run("true"))
    await raises(TimeoutException, lambda: box.files.read("kept"))
    assert not await do(box.pause()), "a second pause tells that it was paused"
    paused = await do(SANDBOX.list(query=e2b.SandboxQuery(state=[e2b.SandboxState.PAUSED])).next_items())
    assert box.sandbox_id in [each.sandbox_id for each in paused]
    again = await do(SANDBOX.connect(box.sandbox_id))
    assert await do(again.files.read("kept")) == "before" and await do(box.is_running()) is True
    if KEEPS_PROCESSES:
        assert [each.pid for each in await do(again.commands.list())] == [running.pid]
        first = await counted(again)
        while await counted(again) <= first:
            await asyncio.sleep(0.05)
    await do(again.set_timeout(200))
    info = await do(again.get_info())
    assert info.metadata == {"run": RUN} and info.state == e2b.SandboxState.RUNNING
    assert abs((info.end_at - info.started_at).total_seconds() - 200) < 150
    assert (await do(again.get_metrics()))[0].mem_total > 0


async def counted(box: Any) -> int:
    """What the counter has written, once it has."""
    while True:
        try:
            if text := await do(box.files.read("count")):
                return int(text)
        except NotFoundException:
            await asyncio.sleep(0.05)


async def copies(box: Any) -> None:
    snapshot = await do(box.create_snapshot())
    made = await do(SANDBOX.create(snapshot.snapshot_id, timeout=100))
    children = [made]
    if hasattr(box, "fork"):
        forks = await do(box.fork(count=3))
        assert len(forks) == 3 and not [each for each in forks if isinstance(each, Exception)], forks
        children += forks
    assert len({child.sandbox_id for child in children} | {box.sandbox_id}) == len(children) + 1
    randoms = set()
    for index, child in enumerate(children):
        assert await do(child.files.read("kept")) == "before"
        await do(child.files.write("kept", str(index)))
        randoms.add((await do(child.commands.run("head -c 8 /dev/urandom | od -An -tx1"))).stdout)
    assert len(randoms) == len(children)
    assert await do(box.files.read("kept")) == "before"
    assert [await do(child.files.read("kept")) for child in children] == [str(each) for each in range(len(children))]
    listed = await do(box.list_snapshots().next_items())
    assert snapshot.snapshot_id in [each.snapshot_id for each in listed]
    assert await do(SANDBOX.delete_snapshot(snapshot.snapshot_id)) is True
    assert await do(SANDBOX.delete_snapshot(snapshot.snapshot_id)) is False
    for child in children:
        assert await do(child.kill()) is True


async def lists(box: Any) -> None:
    others = [await do(SANDBOX.create(timeout=60, metadata={"group": RUN})) for _ in range(3)]
    pages, paginator = [], SANDBOX.list(query=e2b.SandboxQuery(metadata={"group": RUN}), limit=2)
    while paginator.has_next:
        pages.append([each.sandbox_id for each in await do(paginator.next_items())])
    assert [len(page) for page in pages] == [2, 1] and {*pages[0], *pages[1]} == {each.sandbox_id for each in others}
    for other in others:
        await do(other.kill())


async def gone(box: Any) -> None:
    assert await do(box.kill()) is True
    assert await do(box.kill()) is False
    assert await do(box.is_running()) is False
    await raises(TimeoutException, lambda: box.commands.run("true"))
    await raises(NotFoundException, lambda: SANDBOX.connect(box.sandbox_id))
    await raises(e2b.AuthenticationException, lambda: SANDBOX.create(api_key="e2b_" + "0" * 40))


RUN = uuid.uuid4().hex


async def main() -> None:
    box = await do(SANDBOX.create(timeout=300, metadata={"run": RUN}, envs={"GIVEN": "1"}))
    try:
        for step in (commands, background, terminal, files, watch, lifecycle, copies, lists, gone):
            start = time.perf_counter()
            await step(box)
            print(f"{step.__name__} {time.perf_counter() - start:.2f} s", flush=True)
    finally:
        await do(box.kill())


asyncio.run(main())
