"""The allow-list: what is listed can be reached through the agent's stream, nothing else can, and refusals are told."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox.guest_process import AgentProcess, running_guest, wait_until

from moonlet.errors import ConfigError
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.relay import WINDOW_BYTES, Channel, Relay
from moonlet.sandbox.network import AllowList, Denied, NetworkProxy, canonical_host, is_public, proxy_env


class _Pages(BaseHTTPRequestHandler):
    """Says what it was asked; a POST gets its body back."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(
            f"{self.path} {self.headers['Host']} {self.headers['X-Mine']} {self.headers['Connection']}".encode()
        )

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


class Reached:
    """A guest with a proxy, and what that refused."""

    def __init__(self, guest: Guest, allow: list[str]) -> None:
        self.guest = guest
        self.denied: list[Denied] = []
        self.proxy = NetworkProxy(guest.stream, AllowList(allow), on_denied=self.denied.append)

    async def python(self, code: str, **env: str) -> str:
        prelude = "import http.client, os, socket, urllib.request, urllib.error\n"
        env = {**{name: url for name, url in self.proxy.env.items() if name.lower() != "no_proxy"}, **env}
        result = await self.guest.exec([sys.executable, "-c", prelude + code], env=env)
        assert result.exit_code == 0, result.error_text
        return result.text

    async def say(self, data: bytes) -> bytes:
        """What the proxy answers to these bytes."""
        code = f"s = socket.create_connection(('127.0.0.1', {self.proxy.port}))\ns.sendall({data!r})\n"
        text = await self.python(code + "print(b''.join(iter(lambda: s.recv(65536), b'')).decode('latin1'), end='')")
        return text.encode("latin1")


@asynccontextmanager
async def reached(folder: Path, *allow: str) -> AsyncIterator[Reached]:
    async with running_guest(folder) as guest:
        found = Reached(guest, list(allow))
        await found.proxy.start(0)
        try:
            yield found
        finally:
            await found.proxy.close()


def test_listed_pages(tmp_path: Path, port: int) -> None:
    async def run() -> None:
        async with reached(tmp_path, f"localhost:{port}", f"127.0.0.1:{port}") as there:
            code = f"r = urllib.request.Request('http://LocalHost.:{port}/a?b=%20c', headers={{'X-Mine': 'kept'}})\n"
            text = await there.python(code + "print(urllib.request.urlopen(r).read().decode())")
            assert text == f"/a?b=%20c localhost:{port} kept close\n"
            assert f"/ 127.0.0.1:{port}" in await there.python(
                f"print(urllib.request.urlopen('http://127.0.0.1:{port}').read().decode())"
            )
            assert there.denied == []

    asyncio.run(run())


def test_a_tunnel_carries_any_bytes_both_ways(tmp_path: Path, port: int) -> None:
    data = os.urandom(3 << 20)

    async def run() -> None:
        async with reached(tmp_path, f"localhost:{port}", f"127.0.0.1:{port}") as there:
            await there.guest.write_file("data", data)
            code = f"""
c = http.client.HTTPConnection('127.0.0.1', {there.proxy.port})
c.set_tunnel('localhost', {port})
for _ in range(2):
    c.request('POST', '/', open('data', 'rb').read())
    print(c.getresponse().read() == open('data', 'rb').read())
"""
            assert await there.python(code) == "True\nTrue\n"

    asyncio.run(run())


def test_many_connections_at_once(tmp_path: Path, port: int) -> None:
    async def run() -> None:
        async with reached(tmp_path, f"127.0.0.1:{port}") as there:
            code = f"""
from concurrent.futures import ThreadPoolExecutor
def ask(i):
    return urllib.request.urlopen('http://127.0.0.1:{port}/' + str(i), bytes([i]) * 300000).read() == bytes([i]) * 300000
with ThreadPoolExecutor(30) as pool:
    print(sum(pool.map(ask, range(60))))
"""
            assert await there.python(code) == "60\n"

    asyncio.run(run())


def test_what_is_not_listed_is_refused_and_told(tmp_path: Path, port: int) -> None:
    async def run() -> None:
        async with reached(tmp_path, "example.org", f"127.0.0.1:{port + 1}") as there:
            code = f"""
for url in ('http://elsewhere.example/', 'http://127.0.0.1:{port}/', 'http://example.org:8080/'):
    try:
        urllib.request.urlopen(url)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
"""
            lines = (await there.python(code)).splitlines()
            assert len(lines) == 3 and all(line.startswith("403 ") and "allowed hosts" in line for line in lines)
            assert (await there.say(b"CONNECT elsewhere.example:443 HTTP/1.1\r\n\r\n")).startswith(
                b"HTTP/1.1 403 Forbidden\r\n"
            )
            assert [(denied.host, denied.port) for denied in there.denied] == [
                ("elsewhere.example", 80),
                ("127.0.0.1", port),
                ("example.org", 8080),
                ("elsewhere.example", 443),
            ]

    asyncio.run(run())


def test_a_listed_name_cannot_lead_into_the_hosts_network(tmp_path: Path, port: int) -> None:
    async def run() -> None:
        async with reached(tmp_path, f"localhost:{port}") as there:
            answer = await there.say(f"GET http://localhost:{port}/ HTTP/1.1\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 403") and b"not a public address" in answer
            assert [denied.host for denied in there.denied] == ["localhost"]
            for odd in ("2130706433", "127.1", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0"):
                answer = await there.say(f"CONNECT {odd}:{port} HTTP/1.1\r\n\r\n".encode())
                assert answer.startswith(b"HTTP/1.1 403"), (odd, answer)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET ftp://localhost/ HTTP/1.1\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\n\r\n",
        b"GET http://localhost:99999/ HTTP/1.1\r\n\r\n",
        b"GET http://a\xff.org/ HTTP/1.1\r\n\r\n",
        b"CONNECT localhost:x HTTP/1.1\r\n\r\n",
        b"CONNECT a_b/..:443 HTTP/1.1\r\n\r\n",
        b"CONNECT :443 HTTP/1.1\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, data: bytes) -> None:
    async def run() -> None:
        async with reached(tmp_path, "localhost") as there:
            assert (await there.say(data)).startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert there.denied == []

    asyncio.run(run())


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def run() -> None:
        async with reached(tmp_path, f"127.0.0.1:{port}", "no-such-name.invalid") as there:
            assert (await there.say(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 502")
            assert (await there.say(b"CONNECT no-such-name.invalid:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502")

    asyncio.run(run())


def test_the_way_out_is_there_again_after_a_new_host(tmp_path: Path, port: int) -> None:
    """The old host's connections are closed, the port stays, running commands need not know."""

    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            first = Reached(await agent.open(), [f"127.0.0.1:{port}"])
            await first.proxy.start(0)
            code = f"""
s = socket.create_connection(('127.0.0.1', {first.proxy.port}))
s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n')
print(s.recv(100).split()[1].decode(), flush=True)
print(s.recv(100), flush=True)
while not os.path.exists('go'): pass
os.environ['http_proxy'] = 'http://127.0.0.1:{first.proxy.port}'
print(urllib.request.urlopen('http://127.0.0.1:{port}/after').read().split()[0].decode())
"""
            prelude = "import os, socket, urllib.request\n"
            process = await first.guest.start([sys.executable, "-c", prelude + code])
            async for piece in process.output():
                assert piece.data.startswith(b"200"), piece
                break
            first.guest.stream.close()
            await first.proxy.close()
            second = Reached(await agent.open(), [f"127.0.0.1:{port}"])
            await second.proxy.start(first.proxy.port)
            assert second.proxy.port == first.proxy.port
            (tmp_path / "home" / "go").touch()
            result = await (await second.guest.process(process.command_id)).wait()
            assert result.stdout == b"200\nb''\n/after\n", result
            await second.proxy.close()
            second.guest.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())


def test_a_slow_reader_holds_the_sender_back(tmp_path: Path) -> None:
    """Neither side keeps more than its window: what the program does not take stays with the host, and the other way round."""

    async def run() -> None:
        sent = 0
        done = asyncio.Event()

        async def pour(channel: Channel) -> None:
            nonlocal sent
            with contextlib.suppress(ConnectionResetError):
                while sent < 64 << 20:
                    await channel.write(b"x" * 65536)
                    sent += 65536
            done.set()

        async with running_guest(tmp_path) as guest:
            relay = Relay(guest.stream, pour)
            port = await relay.listen(0)
            code = f"import socket, sys; s = socket.create_connection(('127.0.0.1', {port})); print('on', flush=True); sys.stdin.read()"
            process = await guest.start([sys.executable, "-c", code], stdin=True)
            await wait_until(lambda: sent > 0)
            while (before := sent) != (await asyncio.sleep(0.2), sent)[1]:
                pass  # until the socket buffers of the guest's kernel are full
            assert before < 48 << 20
            assert (await guest.exec("echo alive")).stdout == b"alive\n"
            await process.kill()
            async with asyncio.timeout(20):
                await done.wait()
            await relay.close()

    asyncio.run(run())


def test_a_guest_that_overruns_its_window_loses_the_channel(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_guest(tmp_path) as guest:
            ended = asyncio.Event()

            async def serve(channel: Channel) -> None:
                await wait_until(lambda: channel.is_closed)
                assert await channel.read() == b""
                ended.set()

            relay = Relay(guest.stream, serve)
            relay._take({"event": "net.open", "channel": 7}, b"")
            await asyncio.sleep(0)
            for odd in (
                {},
                {"channel": "7"},
                {"channel": True},
                {"channel": 8},
                {"channel": 7, "event": "net.strange"},
            ):
                relay._take({"event": "net.data", **odd}, b"x")
            for _ in range(3):
                relay._take({"event": "net.data", "channel": 7}, b"x" * (WINDOW_BYTES // 2))
            relay._take({"event": "net.ack", "channel": 7, "count": 1 << 70}, b"")
            async with asyncio.timeout(20):
                await ended.wait()
            await relay.close()

    asyncio.run(run())


def test_a_port_that_a_program_has_is_an_error(tmp_path: Path) -> None:
    from moonlet.errors import GuestFileError

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            async with running_guest(tmp_path) as guest:
                proxy = NetworkProxy(guest.stream, AllowList(["example.org"]))
                with pytest.raises(GuestFileError) as caught:
                    await proxy.start(taken.getsockname()[1])
                assert caught.value.code == "EADDRINUSE"

    asyncio.run(run())


# -- the list itself ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("listed", "host", "port", "expected"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "EXAMPLE.org.", 80, True),
        ("example.org", "example.org", 22, False),
        ("example.org:22", "example.org", 22, True),
        ("example.org:22", "example.org", 443, False),
        ("example.org", "www.example.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("*.example.org:8443", "x.example.org", 8443, True),
        ("example.org", "example.org.evil.com", 443, False),
        ("10.0.0.1", "10.0.0.1", 80, True),
        ("10.0.0.1", "10.0.0.2", 80, False),
        ("::1", "[0:0::1]", 80, True),
        ("[::1]:8080", "::1", 8080, True),
        ("[::1]:8080", "::1", 80, False),
    ],
)
def test_the_list(listed: str, host: str, port: int, expected: bool) -> None:
    assert AllowList([listed]).allows(host, port) is expected


@pytest.mark.parametrize(
    "wrong",
    ["", "*", "*.", "a b", "http://example.org", "example.org/x", "example.org:0", "example.org:65536", "example.org:x", "*.1.2.3.4", "a..b", "-", "x.*.org", "10.0.0.0/8"],
)  # fmt: skip
def test_wrong_entries(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allowed host"):
        AllowList([wrong])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.20.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::808:808", True),
        ("fec0::1", False),
        ("240.0.0.1", False),
        ("2001:0:5ef5:79fb::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


def test_a_private_address_must_be_listed_itself() -> None:
    allow = AllowList(["name.example", "10.0.0.1:80"])
    assert allow.allows_address(ipaddress.ip_address("10.0.0.1"), 80)
    assert not allow.allows_address(ipaddress.ip_address("10.0.0.1"), 443)
    assert not allow.allows_address(ipaddress.ip_address("10.0.0.2"), 80)
    assert not AllowList([]) and allow


@given(st.text(max_size=40), st.integers(1, 65535))
def test_no_text_passes_that_is_not_listed(host: str, port: int) -> None:
    allow = AllowList(["example.org", "*.example.net"])
    if allow.allows(host, port):
        assert port in (80, 443) and (
            canonical_host(host) == "example.org" or canonical_host(host).endswith(".example.net")
        )


def test_the_environment() -> None:
    env = proxy_env(3128)
    assert {env[name] for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")} == {
        "http://127.0.0.1:3128"
    }
    assert "127.0.0.1" in env["no_proxy"]
