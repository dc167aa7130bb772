"""The client of QEMU's control socket, against a scripted peer and a real QEMU that boots nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from moonlet.errors import SandboxDiedError, SandboxTimeoutError
from moonlet.sandbox.microvm.qemu import PROGRAM, Hardware, Qemu, Start
from moonlet.sandbox.microvm.qmp import Qmp, QmpError
from moonlet.sandbox.microvm.spawn import QMP_SOCKET, SocketFolder, spawn

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
PCI_NETWORK = 2
Answer = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]


async def with_peer(
    path: Path, answer: Answer, work: Callable[[Path], Awaitable[None]], greeting: bytes = GREETING
) -> None:
    """Serve one client: greet, agree, then `answer` each command."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while line := await reader.readline():
            request = json.loads(line)
            if request["execute"] == "qmp_capabilities":
                reply(writer, request)
            else:
                await answer(request, writer)
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        await work(path)


def reply(writer: asyncio.StreamWriter, request: dict, **fields: object) -> None:
    writer.write(json.dumps({"return": {}, **fields, "id": request["id"]}).encode() + b"\r\n")


def test_replies_find_their_commands_between_events_and_junk(tmp_path: Path) -> None:
    held: list[dict] = []

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        held.append(request)
        writer.write(b'{"event": "STOP", "timestamp": {}}\r\nno json\r\n[1]\r\n')
        if len(held) == 2:
            for one in reversed(held):
                reply(writer, one, **{"return": one["execute"]})

    async def work(path: Path) -> None:
        qmp = await Qmp.open(path)
        assert await asyncio.gather(qmp.command("first"), qmp.command("second", x=1)) == ["first", "second"]
        assert held[1]["arguments"] == {"x": 1}
        await qmp.close()

    asyncio.run(with_peer(tmp_path / "q", answer, work))


def test_a_refusal_is_an_error_with_its_reason(tmp_path: Path) -> None:
    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(
            json.dumps({"error": {"class": "X", "desc": "no such thing"}, "id": request["id"]}).encode() + b"\n"
        )

    async def work(path: Path) -> None:
        qmp = await Qmp.open(path)
        with pytest.raises(QmpError, match="refused 'cont': no such thing"):
            await qmp.command("cont")
        await qmp.close()

    asyncio.run(with_peer(tmp_path / "q", answer, work))


def test_an_answer_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    late: list[dict] = []

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        if not late:
            late.append(request)
            return
        reply(writer, late[0], **{"return": "late"})
        reply(writer, request, **{"return": "mine"})

    async def work(path: Path) -> None:
        qmp = await Qmp.open(path)
        with pytest.raises(SandboxTimeoutError, match="'slow' within"):
            await qmp.command("slow", timeout_s=0.05)
        assert await qmp.command("next") == "mine"
        await qmp.close()

    asyncio.run(with_peer(tmp_path / "q", answer, work))


def test_the_end_of_qemu_ends_what_waits(tmp_path: Path) -> None:
    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def work(path: Path) -> None:
        qmp = await Qmp.open(path)
        with pytest.raises(SandboxDiedError):
            await qmp.command("quit")
        with pytest.raises(SandboxDiedError):
            await qmp.command("again")
        await qmp.close()

    asyncio.run(with_peer(tmp_path / "q", answer, work))


@pytest.mark.parametrize("greeting", [b"", b"junk\n", b'{"x": 1}\n'])
def test_a_peer_that_is_no_qemu(tmp_path: Path, greeting: bytes) -> None:
    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(request)

    async def work(path: Path) -> None:
        with pytest.raises((SandboxDiedError, SandboxTimeoutError)):
            await Qmp.open(path, timeout_s=0.2)

    asyncio.run(with_peer(tmp_path / "q", answer, work, greeting))
    with pytest.raises(SandboxDiedError, match="does not listen"):
        asyncio.run(Qmp.open(tmp_path / "nobody"))


def test_a_descriptor_travels_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("the state")

    async def work() -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(GREETING)
            server = asyncio.get_running_loop().run_in_executor(None, take_descriptor, theirs)
            qmp = Qmp(*await asyncio.open_unix_connection(sock=ours))
            await qmp.greet()
            with (tmp_path / "state").open() as file:
                await qmp.command("getfd", descriptor=file.fileno(), fdname="state")
            await qmp.close()
            return await server

    assert asyncio.run(work()) == "the state"


def take_descriptor(peer: socket.socket) -> str:
    taken = ""
    for _ in range(2):
        data, descriptors, _, _ = socket.recv_fds(peer, 4096, 1)
        for number in descriptors:
            with os.fdopen(number) as file:
                taken = file.read()
        peer.sendall(json.dumps({"return": {}, "id": json.loads(data)["id"]}).encode() + b"\n")
    return taken


@pytest.mark.skipif(not shutil.which(PROGRAM), reason="qemu-system-x86 is not installed")
def test_a_real_qemu_takes_our_command_line_however_deep_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 25) / ("er" * 40)
    folder.mkdir(parents=True)
    with (folder / "guest.ram").open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "disk-0", "64M"], cwd=folder, check=True)

    async def work() -> None:
        qemu = Qemu(shutil.which(PROGRAM) or PROGRAM, "", "tcg")
        child = spawn(qemu, Start("label", "id", Hardware(128, 2), "disk-0"), folder)
        at = SocketFolder(folder)
        try:
            qmp = await Qmp.open(at.path(QMP_SOCKET))
            assert (await qmp.command("query-status"))["status"] == "inmigrate"
            assert (await qmp.command("query-name"))["name"] == "moonlet/label/id"
            kinds = [one["class_info"]["class"] for bus in await qmp.command("query-pci") for one in bus["devices"]]
            assert kinds and not [kind for kind in kinds if kind >> 8 == PCI_NETWORK]
            assert len(await qmp.command("query-cpus-fast")) == 2
            assert (await qmp.command("query-kvm"))["enabled"] is False
            await qmp.close()
        finally:
            at.close()
            child.kill()
            child.wait()

    asyncio.run(work())
