"""The service as a process: how it starts, stops, dies and comes back; and what it writes about itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sandbox.service_thread import SandboxClient, ServiceThread, output_of, wait_for

from moonlet.errors import SandboxStateError, StorageError
from moonlet.sandbox.server.app import _listen, serve
from moonlet.sandbox.server.audit import AuditLog
from moonlet.sandbox.server.auth import load_api_key
from moonlet.sandbox.server.config import ServerConfig
from moonlet.sandbox.settings import ServiceConfig
from moonlet.sandbox.state_dir import find_service

SERVE = """
import asyncio, sys
from moonlet.sandbox.server.app import _listen, serve
from moonlet.sandbox.server.config import ServerConfig
from moonlet.sandbox.settings import ServiceConfig
from pathlib import Path
config = ServerConfig(port=int(sys.argv[2]), grace_s=5, service=ServiceConfig(Path(sys.argv[1]), backend="namespace"))
asyncio.run(serve(config, lambda url, app: print(url, flush=True)))
"""


class ServiceProcess:
    """The service in a process of its own, on the backend `namespace`."""

    def __init__(self, state_dir: Path, port: int = 0) -> None:
        self.state_dir = state_dir
        command = [sys.executable, "-c", SERVE, str(state_dir), str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.communicate()[1]
        self.api_key = load_api_key(state_dir)
        self.client = httpx.Client(base_url=self.url, headers={"X-API-Key": self.api_key}, timeout=60)

    def create(self) -> SandboxClient:
        answer = self.client.post("/sandboxes", json={"templateID": "base", "autoPause": True})
        assert answer.status_code == 201, answer.text
        return SandboxClient(self, answer.json())  # type: ignore[arg-type]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.client.close()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code


@pytest.fixture
def namespace(require_backend) -> None:
    require_backend("namespace")


def test_a_service_that_is_asked_to_stop_pauses_what_runs(namespace, tmp_path) -> None:
    first = ServiceProcess(tmp_path / "state")
    note = tmp_path / "state" / "service.json"
    assert json.loads(note.read_text())["url"] == first.url == find_service(tmp_path / "state")
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    box = first.create()
    box.http.post(
        "/files", params={"path": "kept"}, content=b"data", headers={"Content-Type": "application/octet-stream"}
    )
    with box.stream("process.Process/Start", {"process": {"cmd": "/bin/sleep", "args": ["1000"]}}) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        first.process.send_signal(signal.SIGTERM)
        (last,) = list(messages)
    assert last["error"]["code"] == "unavailable" and "connect to it again" in last["error"]["message"]
    assert first.end(signal.SIGTERM) == 0
    assert not note.exists() and find_service(tmp_path / "state") is None

    second = ServiceProcess(tmp_path / "state")
    assert second.api_key == first.api_key
    assert second.client.get(box.path).json()["state"] == "paused"
    assert second.client.post(f"{box.path}/connect", json={}).json()["envdAccessToken"] == box.token
    again = SandboxClient(second, box.body)  # type: ignore[arg-type]
    assert again.http.get("/files", params={"path": "kept"}).content == b"data"
    listed = again.rpc("process.Process/List", {}).json()["processes"]
    assert [each["pid"] for each in listed] == [pid]
    assert second.client.delete(box.path).status_code == 204
    assert second.end(signal.SIGINT) == 0


def test_a_service_that_is_killed_comes_back_with_what_runs(namespace, tmp_path) -> None:
    first = ServiceProcess(tmp_path / "state")
    box = first.create()
    with box.stream(
        "process.Process/Start", {"process": {"cmd": "/bin/sh", "args": ["-c", "read x; echo $x"]}, "stdin": True}
    ) as m:
        pid = next(m)["event"]["start"]["pid"]
        first.end(signal.SIGKILL)
    assert (tmp_path / "state" / "service.json").exists() and find_service(tmp_path / "state") is None
    second = ServiceProcess(tmp_path / "state")
    again = SandboxClient(second, box.body)  # type: ignore[arg-type]
    with again.stream("process.Process/Connect", {"process": {"pid": pid}}) as messages:
        next(messages)
        again.rpc("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": "aGkK"}})
        assert output_of([message["event"] for message in messages]) == b"hi\n"
    assert second.client.delete(box.path).status_code == 204
    assert second.end(signal.SIGTERM) == 0


def test_an_address_or_a_state_directory_that_is_taken_is_told(tmp_path) -> None:
    with ServiceThread(tmp_path / "state") as service:
        port = int(service.url.rsplit(":", 1)[1])
        with pytest.raises(StorageError, match="--port"):
            asyncio.run(serve(ServerConfig(port=port, service=ServiceConfig(tmp_path / "other"))))
        with pytest.raises(SandboxStateError):
            asyncio.run(serve(ServerConfig(port=0, service=ServiceConfig(tmp_path / "state"))))
        assert service.client.get("/sandboxes").status_code == 200
        assert find_service(tmp_path / "state") == service.url  # the note is the first one's still


def test_the_end_does_not_wait_for_clients_that_stay(tmp_path) -> None:
    service = ServiceThread(tmp_path / "state", grace_s=1)
    with service:
        box = service.create()
        box.run("truncate -s 200M big")
        stuck = box.http.stream("GET", "/files", params={"path": "big"})
        next(stuck.__enter__().iter_raw())
        start = time.monotonic()
    assert time.monotonic() - start < 20
    with pytest.raises(httpx.HTTPError):
        stuck.__exit__(None, None, None)
        httpx.get(f"{service.url}/health")


# -- what it writes ---------------------------------------------------------------------------------------------------
def test_prometheus_sees_operations_failures_and_sandboxes(tmp_path) -> None:
    with ServiceThread(tmp_path / "state") as service:
        box = service.create()
        box.run("true")
        service.client.post(f"{box.path}/pause")
        service.client.post(f"{box.path}/connect", json={})
        service.client.post(f"{box.path}/fork", json={"count": 2})
        service.client.post("/sandboxes", json={"templateID": "none"})
        answer = service.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert 'moonlet_sandboxes{backend="scripted",state="running"} 3.0' in lines
        assert 'moonlet_sandbox_failures_total{operation="create",reason="template"} 1.0' in lines
        for operation, count in (("create", 2), ("pause", 1), ("resume", 1), ("fork", 1), ("exec_start", 1)):
            assert f'moonlet_sandbox_operation_seconds_count{{operation="{operation}"}} {count}.0' in lines
        assert "moonlet_sandbox_reaped 0.0" in lines and "moonlet_sandbox_streams 0.0" in lines
        bearer = {"Authorization": f"Bearer {service.api_key}"}
        assert httpx.get(f"{service.url}/metrics", headers=bearer).status_code == 200


def test_the_audit_log_tells_who_did_what(tmp_path) -> None:
    with ServiceThread(tmp_path / "state") as service:
        box = service.create()
        box.run("echo audited")
        box.http.post(
            "/files", params={"path": "f"}, content=b"x", headers={"Content-Type": "application/octet-stream"}
        )
        service.client.delete(box.path)
    entries = [json.loads(line) for line in (tmp_path / "state" / "audit.jsonl").read_text().splitlines()]
    assert [entry["action"] for entry in entries] == ["create", "exec", "upload", "kill"]
    assert all(entry["sandbox"] == box.id and entry["peer"] == "127.0.0.1" for entry in entries)
    assert "echo audited" in entries[1]["command"] and abs(entries[0]["time"] - time.time()) < 600


def test_the_audit_log_is_rotated_and_appended_to(tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    for round_number in range(3):
        log = AuditLog(path, 1000, 2)
        for index in range(20):
            log.write("act", number=round_number * 20 + index, text="x\n" * 5)
        log.close()
    kept = sorted(tmp_path.iterdir())
    assert [each.name for each in kept] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(each.stat().st_size <= 1000 and stat.S_IMODE(each.stat().st_mode) == 0o600 for each in kept)
    numbers = [json.loads(line)["number"] for each in reversed(kept) for line in each.read_text().splitlines()]
    assert numbers == list(range(60 - len(numbers), 60))
    long = AuditLog(tmp_path / "long", 1000, 2)
    long.write("act", text="y" * 10_000)
    assert len(json.loads((tmp_path / "long").read_text())["text"]) < 300
    long.close()


def test_a_full_disk_stops_the_log_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    log = AuditLog(path, 1 << 20, 1)
    log.write("act")
    log.write("act")
    assert log.num_lost == 2
    log.close()


def test_nothing_is_left_open_by_a_thousand_requests(tmp_path) -> None:
    with ServiceThread(tmp_path / "state") as service:
        box = service.create()
        box.run("true")
        descriptors = len(os.listdir("/proc/self/fd"))
        for index in range(100):
            box.run(f"echo {index}")
            box.http.post(
                "/files",
                params={"path": "f"},
                content=b"x" * index,
                headers={"Content-Type": "application/octet-stream"},
            )
            box.http.get("/files", params={"path": "f"})
            service.client.get("/sandboxes")
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 3)
        assert len(box.rpc("process.Process/List", {}).json()["processes"]) == 0
        tasks = service.call(_count_tasks())
        assert tasks < 40, tasks


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


def test_answers_are_sent_at_once() -> None:
    """A listener made without its protocol gets connections with Nagle's algorithm, and every answer takes 40 ms more."""
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
