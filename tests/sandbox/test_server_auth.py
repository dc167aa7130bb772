"""Who gets in: the API key, tokens per sandbox, signed URLs, and every way around them that we could think of."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import threading
import time
import urllib.parse

import httpx
import pytest
from sandbox.service_thread import SandboxClient, ServiceThread

from moonlet.errors import ConfigError
from moonlet.sandbox.server.auth import Keys, find_target, is_sandbox_id, load_api_key


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def box(service) -> SandboxClient:
    return service.create()


@pytest.fixture
def stranger(service):
    with httpx.Client(base_url=service.url, timeout=30) as client:
        yield client


def signed(token: str, path: str, operation: str, user: str = "", expires: int | None = None) -> dict[str, str]:
    """As E2B's SDK signs a URL."""
    raw = f"{path}:{operation}:{user}:{token}" + (f":{expires}" if expires is not None else "")
    digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")
    query = {"path": path, "signature": f"v1_{digest}"}
    return query | ({"username": user} if user else {}) | ({"signature_expiration": str(expires)} if expires else {})


# -- secrets on the disk ----------------------------------------------------------------------------------------------
def test_keys_are_made_once_and_readable_by_the_owner_only(tmp_path) -> None:
    folder = tmp_path / "state"
    first, again = Keys(folder), Keys(folder)
    assert first.api_key == again.api_key == load_api_key(folder)
    assert first.token("sb1") == again.token("sb1") != first.token("sb2")
    assert len(first.api_key) == 44 and first.api_key.startswith("e2b_")  # the form that older clients insist on
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_processes_that_start_at_once_agree_on_the_key(tmp_path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(load_api_key(tmp_path / "s"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["api_key"]


def test_a_key_that_others_can_read_is_closed_and_an_empty_one_refused(tmp_path) -> None:
    key = load_api_key(tmp_path)
    (tmp_path / "api_key").chmod(0o644)
    assert load_api_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600
    (tmp_path / "api_key").write_text("\n")
    with pytest.raises(ConfigError, match="delete it"):
        load_api_key(tmp_path)


# -- the API key ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": ""},
        {"X-API-Key": "e2b_" + "0" * 40},
        {"Authorization": "Bearer x"},
        {"Authorization": "Basic e2b"},
        {"X-API-Key": "\u00e9"},
    ],
)
def test_without_the_key_nothing_is_answered(stranger, box, headers) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in (
        ("GET", "/sandboxes"),
        ("POST", "/sandboxes"),
        ("GET", "/metrics"),
        ("GET", "/templates"),
        ("DELETE", box.path),
        ("GET", "/nothing"),
        ("GET", "/files?path=/etc/passwd"),
        ("POST", "/process.Process/List"),
        ("OPTIONS", "/sandboxes"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/health/../sandboxes"),
        ("GET", "//sandboxes"),
        ("GET", "/health/"),
    ):
        answer = stranger.request(method, path, headers=encoded)
        assert answer.status_code == 401, (method, path, answer.status_code)
        assert answer.json()["code"] == 401


def test_the_key_is_taken_from_either_header(stranger, service) -> None:
    for headers in ({"x-api-key": service.api_key}, {"Authorization": f"Bearer {service.api_key}"}):
        assert stranger.get("/sandboxes", headers=headers).status_code == 200
    assert stranger.get("/health").status_code == 200


def test_a_prefix_or_two_keys_do_not_help(stranger, service) -> None:
    assert stranger.get("/sandboxes", headers={"X-API-Key": service.api_key[:-1]}).status_code == 401
    assert stranger.get("/sandboxes", headers={"X-API-Key": service.api_key + "x"}).status_code == 401
    two = [("X-API-Key", "wrong"), ("X-API-Key", service.api_key)]
    assert stranger.get("/sandboxes", headers=two).status_code == 401


# -- tokens of sandboxes ----------------------------------------------------------------------------------------------
def test_only_the_sandboxes_own_token_opens_it(service, stranger, box) -> None:
    other = service.create()
    for token in ("", "x", other.token, service.api_key, box.token[:-1], box.token.upper()):
        headers = {"E2b-Sandbox-Id": box.id, "X-Access-Token": token, "X-API-Key": service.api_key}
        assert stranger.get("/files", params={"path": "x"}, headers=headers).status_code == 401
    assert stranger.get("/health", headers={"E2b-Sandbox-Id": box.id, "X-Access-Token": box.token}).status_code == 204


def test_a_token_opens_nothing_of_the_control_api(stranger, box) -> None:
    for headers in ({"X-Access-Token": box.token}, {"X-API-Key": box.token}):
        assert stranger.delete(box.path, headers=headers).status_code == 401
    inside = {"X-Access-Token": box.token, "E2b-Sandbox-Id": box.id}
    assert stranger.delete(box.path, headers=inside).status_code == 404  # no such path in a sandbox
    assert stranger.get("/sandboxes", headers=inside).status_code == 404


def test_who_has_no_token_does_not_learn_which_sandboxes_exist(stranger, box) -> None:
    answers = [
        stranger.get("/health", headers={"E2b-Sandbox-Id": sandbox_id, "X-Access-Token": "guess"})
        for sandbox_id in (box.id, "sbnotthere")
    ]
    assert answers[0].status_code == answers[1].status_code == 401 and answers[0].content == answers[1].content


@pytest.mark.parametrize(
    "sandbox_id",
    [".", "..", "../x", "a/b", "a%2fb", "a b", "-a", "x" * 65, "ä", "a;b", "$(x)", "..%00", "a\\b", "*"],
)
def test_what_is_no_sandbox_id_never_gets_anywhere(service, box, sandbox_id) -> None:
    """In the path both as it is and escaped, past the client's own tidying of paths."""
    assert not is_sandbox_id(sandbox_id)
    escaped = urllib.parse.quote(sandbox_id, safe="")
    for name in {escaped, sandbox_id if sandbox_id.isprintable() and " " not in sandbox_id else escaped}:
        for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/fork"), ("GET", "/logs")):
            head = f"{method} /sandboxes/{name}{suffix} HTTP/1.1\r\nHost: h\r\nX-API-Key: {service.api_key}\r\n"
            status, _ = service.raw(head.encode() + b"Connection: close\r\n\r\n")
            assert status in (400, 404, 405), (method, name, suffix)
    headers = [("E2b-Sandbox-Id", sandbox_id.encode()), ("X-Access-Token", box.token)]
    with httpx.Client(base_url=service.url) as client:
        assert client.get("/health", headers=headers).status_code in (400, 401)


@pytest.mark.parametrize("port", ["", "x", "-1", "99999999", "4998 3", "0x1", "²"])
def test_a_port_that_is_none_is_refused(box, port) -> None:
    assert box.http.get("/health", headers=[("E2b-Sandbox-Port", port.encode())]).status_code in (400, 502)


def test_other_ports_are_not_open(box) -> None:
    answer = box.http.get("/", headers={"E2b-Sandbox-Port": "8080"})
    assert answer.status_code == 502 and "port is not open" in answer.json()["message"]


# -- names of sandboxes as hosts --------------------------------------------------------------------------------------
def test_a_sandbox_can_be_named_by_the_host(stranger, box) -> None:
    headers = {"Host": f"49983-{box.id}.sandboxes.test:1234", "X-Access-Token": box.token}
    assert stranger.get("/health", headers=headers).status_code == 204
    assert stranger.get("/health", headers={"Host": headers["Host"]}).status_code == 401
    assert stranger.get("/", headers=headers | {"Host": f"80-{box.id}.sandboxes.test"}).status_code == 502


def test_headers_win_over_the_host_and_the_token_must_fit_what_wins(service, stranger, box) -> None:
    other = service.create()
    headers = {"Host": f"49983-{box.id}.test", "E2b-Sandbox-Id": other.id}
    assert stranger.get("/health", headers=headers | {"X-Access-Token": box.token}).status_code == 401
    assert stranger.get("/health", headers=headers | {"X-Access-Token": other.token}).status_code == 204


def test_targets_of_requests() -> None:
    assert find_target({"host": "localhost:8490"}) is None
    assert find_target({"host": "127.0.0.1:8490"}) is None
    assert find_target({"host": "49983-sb1.a.b"}) == ("sb1", 49983)
    assert find_target({"host": "49983-sb1.a.b:80"}, "a.b") == ("sb1", 49983)
    assert find_target({"host": "49983-sb1.c.d"}, "a.b") is None
    assert find_target({"host": "49983-..a.b"}) is None
    assert find_target({"e2b-sandbox-id": "sb1"}) == ("sb1", 49983)
    assert find_target({"e2b-sandbox-id": "sb1", "e2b-sandbox-port": "1"}) == ("sb1", 1)
    assert find_target({"e2b-sandbox-id": "../x"}) == ("", 0)


# -- signed URLs ------------------------------------------------------------------------------------------------------
def test_a_signed_url_reads_and_writes_one_path(stranger, box) -> None:
    headers = {"E2b-Sandbox-Id": box.id}
    soon = int(time.time()) + 60
    write = signed(box.token, "signed.txt", "write", expires=soon)
    assert stranger.post("/files", params=write, headers=headers, content=b"data").status_code == 200
    for query in (signed(box.token, "signed.txt", "read"), signed(box.token, "signed.txt", "read", "user", soon)):
        assert stranger.get("/files", params=query, headers=headers).content == b"data"
        assert stranger.get("/files", params=query).content == b"data"  # which sandbox is found by the signature


def test_a_signature_fits_nothing_else(service, stranger, box) -> None:
    other, now = service.create(), int(time.time())
    good = signed(box.token, "signed.txt", "read", expires=now + 60)
    wrong = [
        good | {"path": "other.txt"},
        good | {"username": "root"},
        good | {"signature_expiration": str(now + 6000)},
        {key: value for key, value in good.items() if key != "signature_expiration"},
        signed(box.token, "signed.txt", "read", expires=now - 1),
        signed(box.token, "signed.txt", "write", expires=now + 60),
        good | {"signature_expiration": "9" * 30},
        good | {"signature_expiration": "-5"},
        good | {"signature_expiration": "²"},
        good | {"signature": ""},
        good | {"signature": good["signature"] + "="},
    ]
    for query in wrong:
        for headers in ({"E2b-Sandbox-Id": box.id}, {}):
            assert stranger.get("/files", params=query, headers=headers).status_code == 401, query
    assert stranger.get("/files", params=good, headers={"E2b-Sandbox-Id": other.id}).status_code == 401
    assert stranger.post("/files", params=good, headers={"E2b-Sandbox-Id": box.id}, content=b"x").status_code == 401
    for path in ("/process.Process/List", "/filesystem.Filesystem/Remove", "/envs"):
        assert stranger.post(path, params=good, headers={"E2b-Sandbox-Id": box.id}, json={}).status_code == 401
    assert stranger.put("/files", params=good, headers={"E2b-Sandbox-Id": box.id}).status_code == 401


def test_the_last_of_two_paths_is_both_checked_and_used(stranger, box) -> None:
    """A query may name the path twice; the one that is signed must be the one that is read."""
    box.http.post("/files", params={"path": "secret"}, content=b"secret")
    box.http.post("/files", params={"path": "open"}, content=b"open")
    query = signed(box.token, "open", "read")
    for pairs in ([("path", "secret"), *query.items()], [*query.items(), ("path", "secret")]):
        answer = stranger.get("/files", params=pairs, headers={"E2b-Sandbox-Id": box.id})
        assert b"secret" not in answer.content and answer.status_code in (200, 401)


def test_nothing_secret_is_logged_or_listed(service, stranger, box) -> None:
    stranger.get("/files", params=signed(box.token, "x", "read"), headers={"E2b-Sandbox-Id": box.id})
    box.run("true", process={"envs": {"PASSWORD": "hunter2hunter2"}})
    audit = (service.state_dir / "audit.jsonl").read_text()
    listed = service.client.get("/sandboxes").text + service.client.get("/metrics").text
    for secret in (service.api_key, box.token, "hunter2hunter2", "v1_"):
        assert secret not in audit and secret not in listed
    assert stat.S_IMODE(os.stat(service.state_dir / "audit.jsonl").st_mode) == 0o600
