"""Real servers for the tests of the state store, on free ports of the loopback; each ends with its context."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], Any], timeout_s: float = START_S) -> None:
    """Look until `condition` holds; fail after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def need(found: object, variable: str, reason: str) -> None:
    """Skip with `reason` where `found` is nothing; fail where the environment says that it must be there."""
    if not found:
        (pytest.fail if os.environ.get(variable) == "1" else pytest.skip)(reason)


class Server:
    """A process that listens on a port and can be killed, stopped, and started again."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.port = port
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: answers(self.port))

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def redis_server(folder: Path, *options: str) -> Server:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    need(binary, "MOONLET_REQUIRE_REDIS", "redis-server is not installed: apt-get install redis-server")
    port = free_port()
    quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Server([str(binary), "--port", str(port), *quiet, *options], port, folder)


def mooncake_master(folder: Path) -> Server:
    try:
        import mooncake.store  # type: ignore[import-not-found]
    except ImportError as error:
        need(None, "MOONLET_REQUIRE_MOONCAKE", f"no client of Mooncake runs here: {error}")
        raise
    port = free_port()
    binary = Path(mooncake.store.__file__).with_name("mooncake_master")
    local = ["-rpc_address=127.0.0.1", f"-rpc_port={port}", f"-metrics_port={free_port()}"]
    return Server([str(binary), *local, "-default_kv_lease_ttl=100"], port, folder)


@contextlib.contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server of moto in this process, and the environment that leads there; gives the URL of an empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        server.stop()
