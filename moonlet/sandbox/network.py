"""The allow-list: a sandbox has no network; programs in it reach listed hosts through an HTTP proxy that lives on the host.

The proxy listens on a port of the guest's own loopback, and connections to it travel through the agent's stream. It speaks
CONNECT (for TLS and anything else) and plain HTTP. A host that is not listed gets 403. A listed name is resolved here, and
an address that is not public is refused, so that no name can lead into the host's own network. What a tunnel carries is
not looked into: a listed host that serves other names (a large CDN) serves them to the sandbox too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from moonlet.errors import ConfigError
from moonlet.sandbox.guest.relay import Channel, Relay
from moonlet.sandbox.guest.stream import GuestStream

PROXY_PORT = 3128  # on the guest's loopback; taken before any command of the sandbox runs
DEFAULT_PORTS = frozenset({80, 443})
MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 15.0
_PIECE_BYTES = 64 << 10
_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_HOP_HEADERS = {b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"host", b"te", b"upgrade"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_log = logging.getLogger("moonlet")


@dataclass(frozen=True)
class Denied:
    """A connection that was refused, for the log."""

    host: str
    port: int
    reason: str


OnDenied = Callable[[Denied], None]


@dataclass(frozen=True)
class _Rule:
    name: str  # without `*.`; or a canonical address
    is_wildcard: bool
    ports: frozenset[int]

    def matches(self, host: str, port: int) -> bool:
        return port in self.ports and (host.endswith("." + self.name) if self.is_wildcard else host == self.name)


class AllowList:
    """Hosts that may be reached: `name`, `*.name` (its subdomains, not itself) or an address, each optionally with `:port`.

    Without a port 80 and 443 are meant. An IPv6 address with a port is written `[address]:port`. Raises ConfigError.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._rules = tuple(_parse_rule(host) for host in hosts)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def allows(self, host: str, port: int) -> bool:
        """Whether this very name or address is listed."""
        host = canonical_host(host)
        return any(rule.matches(host, port) for rule in self._rules)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether a listed name may resolve to this address: any public one, others only if they are listed themselves."""
        return is_public(address) or any(rule.matches(str(address), port) for rule in self._rules)


def canonical_host(host: str) -> str:
    """Lower case, without a final dot; an address in its usual spelling."""
    host = host.lower().rstrip(".").removeprefix("[").removesuffix("]")
    address = _address(host)
    return host if address is None else str(address)


def is_public(address: Address) -> bool:
    """Whether it lies in the public internet, also as what an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or _nat64(address)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    prefix = ipaddress.IPv6Network("64:ff9b::/96")
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in prefix else None


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _split_port(text: str) -> tuple[str, int | None]:
    """Raises ValueError for a port that is none."""
    if _address(text.removeprefix("[").removesuffix("]")) is not None:
        return text, None
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, None
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not 0 < number < 65536:
        raise ValueError(f"{port!r} is not a port")
    return host, number


def _parse_rule(text: str) -> _Rule:
    try:
        host, port = _split_port(text.strip())
    except ValueError as error:
        raise ConfigError(f"allowed host {text!r}: {error}") from None
    is_wildcard = host.startswith("*.")
    name = canonical_host(host.removeprefix("*."))
    if (_address(name) is None and not _NAME.fullmatch(name)) or (is_wildcard and _address(name) is not None):
        raise ConfigError(f"allowed host {text!r} is neither a name, '*.name' nor an address, with or without ':port'")
    return _Rule(name, is_wildcard, DEFAULT_PORTS if port is None else frozenset({port}))


def log_denied(denied: Denied) -> None:
    _log.info("sandbox network: refused %s:%d: %s", denied.host, denied.port, denied.reason)


class NetworkProxy:
    """The way out of one sandbox. Start it again on the new stream after a reconnect: the guest keeps the port."""

    def __init__(self, stream: GuestStream, allow: AllowList, *, on_denied: OnDenied = log_denied) -> None:
        self._allow = allow
        self._on_denied = on_denied
        self._relay = Relay(stream, self._serve)
        self.port = 0

    async def start(self, port: int = PROXY_PORT) -> None:
        """Raises GuestFileError if the port is taken in the guest."""
        self.port = await self._relay.listen(port)

    async def close(self) -> None:
        await self._relay.close()

    @property
    def env(self) -> dict[str, str]:
        """What commands need in their environment to use it."""
        return proxy_env(self.port)

    async def _serve(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head, rest = await _read_head(channel)
            request = _parse_request(head)
            reader, writer = await self._dial(request.host, request.port)
        except _Refusal as refusal:
            await channel.write(refusal.response())
            await _drain(channel)
            return
        except TimeoutError:
            return
        try:
            if request.is_tunnel:
                await channel.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            writer.write(request.forward + rest)
            async with asyncio.TaskGroup() as both:
                both.create_task(_upload(channel, writer))
                both.create_task(_download(reader, channel))
        except* OSError:
            pass  # one side is gone; closing tells the other
        finally:
            writer.close()

    async def _dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allow.allows(host, port):
            raise self._deny(host, port, "it is not on the sandbox's list of allowed hosts")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = await _resolve(host, port)
                good = [address for address in addresses if self._allow.allows_address(address, port)]
                if not good:
                    raise self._deny(host, port, f"it leads to {addresses[0]}, which is not a public address")
                return await _connect(good, port)
        except (OSError, TimeoutError) as error:
            raise _Refusal(502, f"cannot reach {host}:{port}: {error or 'no answer'}") from None

    def _deny(self, host: str, port: int, reason: str) -> _Refusal:
        self._on_denied(Denied(host, port, reason))
        return _Refusal(403, f"{host}:{port} is refused: {reason}")


def proxy_env(port: int = PROXY_PORT) -> dict[str, str]:
    """Environment variables that send programs to the proxy; their own loopback is reached directly."""
    url, local = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, url), "NO_PROXY": local, "no_proxy": local}


class _Refusal(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self._status = status

    def response(self) -> bytes:
        reasons = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}
        body = f"moonlet: {self}\n".encode()
        head = (
            f"HTTP/1.1 {self._status} {reasons[self._status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True)
class _Request:
    host: str
    port: int
    is_tunnel: bool
    forward: bytes = b""  # the head as the server gets it


async def _read_head(channel: Channel) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await channel.read()
        data += piece
        if not piece or len(data) > MAX_HEAD_BYTES:
            raise _Refusal(400, "that was not an HTTP request")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _parse_request(head: bytes) -> _Request:
    first, *lines = head.split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1.") or not parts[0].isalpha():
        raise _Refusal(400, "that was not an HTTP/1 request")
    target = parts[1].decode("ascii", "replace")
    try:
        if parts[0] == b"CONNECT":
            host, port = _split_port(target)
            return _Request(_checked_host(host), port or 443, is_tunnel=True)
        return _plain_request(parts[0], target, lines)
    except ValueError as error:
        raise _Refusal(400, f"{target!r} is no address of a web page: {error}") from None


def _plain_request(method: bytes, target: str, lines: list[bytes]) -> _Request:
    url = urlsplit(target)
    if url.scheme != "http" or not url.hostname:
        raise ValueError("this is a proxy; it wants http://host/path, or CONNECT for anything else")
    host, port = _checked_host(url.hostname), url.port or 80
    shown = f"[{host}]" if ":" in host else host
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in _HOP_HEADERS]
    start = b"%s %s HTTP/1.1" % (method, path.encode("ascii"))
    host_line = f"Host: {shown}{'' if port == 80 else f':{port}'}".encode()
    # One request a connection: the next may be for another host.
    forward = b"\r\n".join((start, host_line, *kept, b"Connection: close", b"", b""))
    return _Request(host, port, is_tunnel=False, forward=forward)


def _checked_host(text: str) -> str:
    host = canonical_host(text)
    if _address(host) is None and not _NAME.fullmatch(host):
        raise ValueError("the host is neither a name nor an address")
    return host


async def _resolve(host: str, port: int) -> list[Address]:
    given = _address(host)
    if given is not None:
        return [given]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return [address for address in dict.fromkeys(addresses) if address is not None]


async def _connect(addresses: list[Address], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the addresses that were judged, never by name again: it might resolve to others by now."""
    for address in addresses[:-1]:
        try:
            return await asyncio.open_connection(str(address), port)
        except OSError:
            continue
    return await asyncio.open_connection(str(addresses[-1]), port)


async def _upload(channel: Channel, writer: asyncio.StreamWriter) -> None:
    while data := await channel.read():
        writer.write(data)
        await writer.drain()
    if channel.is_closed:
        writer.close()  # the program is gone: so the server's answer has no reader
    elif writer.can_write_eof():
        writer.write_eof()


async def _download(reader: asyncio.StreamReader, channel: Channel) -> None:
    while data := await reader.read(_PIECE_BYTES):
        await channel.write(data)
    channel.end()


async def _drain(channel: Channel) -> None:
    """Let the program read the refusal before the connection goes: a close with unread data would destroy it."""
    channel.end()
    try:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            while await channel.read():
                pass
    except TimeoutError:
        return
