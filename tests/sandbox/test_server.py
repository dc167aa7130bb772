"""The control API over a real manager: lifecycle, lists, errors and what clients rely on in them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import socket
import urllib.parse

import pytest
from sandbox.scripted_backend import ScriptedBackend, scripted_caps
from sandbox.service_thread import SandboxClient, ServiceThread, output_of, wait_for

from moonlet.errors import StorageError
from moonlet.sandbox.api import State
from moonlet.sandbox.template.directory import DirectorySource


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def box(service) -> SandboxClient:
    return service.create()


def test_create_answers_what_a_client_needs(service) -> None:
    body = service.create(metadata={"run": "7"}, envVars={"A": "1"}).body
    assert {"sandboxID", "templateID", "clientID", "envdVersion", "envdAccessToken", "domain"} <= body.keys()
    assert body["templateID"] == "host"  # "base" stands for it
    detail = service.client.get(f"/v2/sandboxes/{body['sandboxID']}").json()
    assert (detail["state"], detail["metadata"], detail["memoryMB"]) == ("running", {"run": "7"}, 512)
    assert detail["moonlet"]["backend"] == "scripted"
    box = SandboxClient(service, body)
    assert output_of(box.run("echo $A $B", process={"envs": {"B": "2"}})) == b"1 2\n"
    assert box.http.get("/envs").json()["A"] == "1"


def test_both_path_styles_answer(service, box) -> None:
    for prefix in ("", "/v2"):
        assert service.client.get(f"{prefix}{box.path}").status_code == 200
        assert service.client.post(f"{prefix}{box.path}/connect", json={}).status_code == 200
    assert service.client.post("/v2/sandboxes", json={"templateID": "base"}).status_code == 201


def test_pause_connect_and_kill_keep_to_the_statuses_of_the_api(service, box) -> None:
    client = service.client
    assert box.http.post("/files", params={"path": "kept"}, content=b"data").status_code == 200
    assert client.post(f"{box.path}/pause").status_code == 204
    assert client.post(f"{box.path}/pause").status_code == 409
    answer = box.http.get("/health")
    assert answer.status_code == 502
    assert answer.json()["sandboxId"] == box.id and "was not found" in answer.json()["message"]
    assert box.rpc("process.Process/List", {}).json()["code"] == 502
    connected = client.post(f"{box.path}/connect", json={"timeout": 60})
    assert connected.status_code == 201 and connected.json()["envdAccessToken"] == box.token
    assert client.post(f"{box.path}/connect", json={}).status_code == 200
    assert box.http.get("/files", params={"path": "kept"}).content == b"data"
    assert client.delete(box.path).status_code == 204
    assert client.delete(box.path).status_code == 404
    assert client.get(box.path).status_code == 404
    assert box.http.get("/health").status_code == 502


def test_resume_answers_201_and_forgets_nothing(service, box) -> None:
    service.client.post(f"{box.path}/pause")
    assert service.client.post(f"{box.path}/resume", json={"timeout": 60}).status_code == 201
    assert box.http.get("/health").status_code == 204


def test_the_time_to_live_of_a_running_sandbox_only_grows_by_connecting(service, box) -> None:
    def remaining() -> float:
        info = service.client.get(box.path).json()["moonlet"]
        return info["expires_at"] - info["created_at"]

    service.client.post(f"{box.path}/connect", json={"timeout": 10})
    assert remaining() > 200
    service.client.post(f"{box.path}/connect", json={"timeout": 900})
    assert remaining() > 800
    assert service.client.post(f"{box.path}/timeout", json={"timeout": 20}).status_code == 204
    assert remaining() < 200
    assert service.client.post(f"{box.path}/refreshes", json={"duration": 500}).status_code == 204
    assert remaining() > 400


def test_the_list_is_filtered_sorted_and_paged(service) -> None:
    ids = [service.create(metadata={"group": "l i/s&t=", "n": str(index)}).id for index in range(5)]
    service.client.post(f"/sandboxes/{ids[0]}/pause")
    # as the SDK does it: quoted twice
    wanted = urllib.parse.urlencode({urllib.parse.quote("group"): urllib.parse.quote("l i/s&t=")})

    def pages(**query: object) -> list[list[str]]:
        found, token = [], None
        while True:
            params = {"metadata": wanted, "limit": 2, **query} | ({"nextToken": token} if token else {})
            answer = service.client.get("/v2/sandboxes", params=params)
            found.append([each["sandboxID"] for each in answer.json()])
            token = answer.headers.get("x-next-token")
            if token is None:
                return found

    assert pages(order="asc") == [ids[:2], ids[2:4], ids[4:]]
    assert [each for page in pages() for each in page] == ids[::-1]
    assert pages(state="paused") == [[ids[0]]]
    assert [each for page in pages(state="running,paused", order="asc") for each in page] == ids
    assert pages(template="other") == [[]]
    assert service.client.get("/v2/sandboxes", params={"nextToken": "§"}).status_code == 400
    assert service.client.get("/v2/sandboxes", params={"limit": "-1"}).status_code == 400


def test_fork_and_snapshot_carry_files_and_have_tokens_of_their_own(service, box) -> None:
    box.http.post("/files", params={"path": "kept"}, content=b"data")
    children = service.client.post(f"{box.path}/fork", json={"count": 3, "timeout": 60}).json()
    forks = [SandboxClient(service, child["sandbox"]) for child in children]
    snapshot = service.client.post(f"{box.path}/snapshots", json={"name": "mine"})
    assert snapshot.status_code == 201 and snapshot.json()["names"] == ["mine"]
    again = service.create(templateID=snapshot.json()["snapshotID"])
    for each in (*forks, again):
        assert each.http.get("/files", params={"path": "kept"}).content == b"data"
    assert len({each.token for each in (*forks, again, box)}) == 5
    assert forks[0].http.get("/health", headers={"X-Access-Token": box.token}).status_code == 401
    listed = service.client.get("/snapshots", params={"sandboxID": box.id}).json()
    assert listed == [{"snapshotID": snapshot.json()["snapshotID"], "names": ["mine"]}]
    assert service.client.get("/snapshots", params={"sandboxID": "other"}).json() == []
    path = f"/templates/{snapshot.json()['snapshotID']}"
    assert [service.client.delete(path).status_code for _ in range(2)] == [204, 404]
    assert service.client.get("/snapshots", params={"sandboxID": box.id}).json() == []


def test_a_fork_that_fails_is_told_per_child(service, box) -> None:
    service.backend.faults["restore"] = StorageError("no room for this child")
    children = service.client.post(f"{box.path}/fork", json={"count": 2}).json()
    errors = [child["error"] for child in children if "error" in child]
    assert len(errors) == 1 and errors[0]["code"] == 507 and "no room" in errors[0]["message"]
    assert sum("sandbox" in child for child in children) == 1


def test_no_room_for_a_pause_is_507_and_the_sandbox_goes_on(service, box) -> None:
    service.backend.faults["save"] = StorageError("the disk is full")
    answer = service.client.post(f"{box.path}/pause")
    assert answer.status_code == 507 and answer.json()["code"] == 507
    assert box.http.get("/health").status_code == 204


def test_too_many_are_429_with_the_time_to_wait(tmp_path) -> None:
    with ServiceThread(tmp_path / "state", max_running=1) as service:
        box = service.create()
        answer = service.client.post("/sandboxes", json={"templateID": "base"})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        service.client.delete(box.path)
        assert service.client.post("/sandboxes", json={"templateID": "base"}).status_code == 201


def test_the_same_idempotency_key_makes_one_sandbox(service) -> None:
    def create(_: int):
        return service.client.post(
            "/v2/sandboxes", json={"templateID": "base", "metadata": {"key": "k"}}, headers={"Idempotency-Key": "abc-1"}
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(create, range(4)))
    assert [answer.status_code for answer in answers] == [201] * 4
    assert len({answer.json()["sandboxID"] for answer in answers}) == 1
    other = service.client.post(
        "/v2/sandboxes", json={"templateID": "base", "timeout": 5}, headers={"Idempotency-Key": "abc-1"}
    )
    assert other.status_code == 409
    assert service.client.post("/sandboxes", json={}, headers={"Idempotency-Key": ""}).status_code == 400


def test_a_client_that_leaves_during_create_leaves_no_sandbox(tmp_path) -> None:
    backend = ScriptedBackend()
    with ServiceThread(tmp_path / "state", backend) as service:
        import asyncio

        reached = asyncio.Event()

        async def hold() -> None:
            reached.set()
            await asyncio.Event().wait()

        backend.faults["launch"] = hold
        body = json.dumps({"templateID": "base"}).encode()
        port = urllib.parse.urlsplit(service.url).port or 0
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(
                b"POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nContent-Length: %d\r\n\r\n%s"
                % (service.api_key.encode(), len(body), body)
            )
            wait_for(reached.is_set)
            assert len(service.call(service.manager.list(states=set(State)))) == 1
        wait_for(lambda: not service.call(service.manager.list(states=set(State))))


def test_traffic_wakes_a_sandbox_that_was_made_so(service) -> None:
    box = service.create(autoPause=True, autoResume={"enabled": True})
    service.client.post(f"{box.path}/pause")
    assert output_of(box.run("echo awake")) == b"awake\n"


def test_a_sandbox_whose_machine_died_says_why_and_can_be_deleted(service, box) -> None:
    box.run("kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)")  # the agent: the parent of the shell's parent
    wait_for(lambda: service.client.get(box.path).status_code == 410)
    answer = service.client.get(box.path).json()
    assert answer["reason"] == "crash" and answer["moonlet"]["state"] == "failed"
    assert box.http.get("/health").status_code == 502
    assert box.id not in [each["sandboxID"] for each in service.client.get("/sandboxes").json()]
    failed = service.client.get("/sandboxes", params={"state": "failed"}).json()
    assert box.id in [each["sandboxID"] for each in failed]
    assert service.client.get(f"/v2{box.path}/logs").status_code == 200
    assert service.client.delete(box.path).status_code == 204


def test_logs_and_metrics_of_a_sandbox(service, box) -> None:
    assert service.client.get(f"{box.path}/logs").json().keys() == {"logs", "logEntries"}
    sample = service.client.get(f"{box.path}/metrics").json()[0]
    assert sample["memUsed"] == 1 << 20 and sample["diskTotal"] == 2 << 30
    many = service.client.get("/sandboxes/metrics", params={"sandbox_ids": f"{box.id},sbnone"}).json()
    assert list(many["sandboxes"]) == [box.id]
    assert box.http.get("/metrics").json()["mem_total"] == 512 << 20


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "templateID"),
        ({"templateID": "base", "timeout": -1}, "timeout"),
        ({"templateID": "base", "timeout": 1e300}, "timeout"),
        ({"templateID": "nothere"}, "nothere"),
        ({"templateID": "base", "metadata": {"a": 1}}, "metadata.a"),
        ({"templateID": "base", "metadata": {"moonlet.bakend": "x"}}, "did you mean 'backend'"),
        ({"templateID": "base", "metadata": {"moonlet.memory_bytes": "much"}}, "not a number"),
        ({"templateID": "base", "metadata": {"moonlet.backend": "gvisor"}}, "gvisor"),
        ({"templateID": "base", "envVars": {"A=B": "1"}}, "A=B"),
        ({"templateID": "base", "envVars": {"A": "\0"}}, "A"),
        ({"templateID": "base", "envVars": {str(index): "" for index in range(2000)}}, "1024"),
        ({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"templateID": "base", "network": {"allowOut": ["10.0.0.0/8"]}}, "by name"),
        ({"templateID": "x" * 300}, "templateID"),
        ({"templateID": "base", "metadata": {"a": "x" * 200_000}}, "characters"),
    ],
)
def test_wrong_requests_say_what_is_wrong(service, body, words) -> None:
    answer = service.client.post("/sandboxes", json=body)
    assert answer.status_code == 400 and words in answer.json()["message"], answer.text


def test_options_in_metadata_reach_the_spec(service) -> None:
    box = service.create(metadata={"moonlet.memory_bytes": str(64 << 20), "moonlet.cpus": "0.5", "moonlet.ttl": "none"})
    info = service.client.get(box.path).json()
    assert info["moonlet"]["limits"]["memory_bytes"] == 64 << 20 and info["memoryMB"] == 64
    assert info["moonlet"]["expires_at"] is None and info["endAt"].startswith("9999")


def test_hosts_that_may_be_reached_are_shown_and_refusals_are_audited(tmp_path) -> None:
    backend = ScriptedBackend()
    backend.caps = dataclasses.replace(scripted_caps(), network=True)
    with ServiceThread(tmp_path / "state", backend) as service:
        box = service.create(
            network={"allowOut": ["packages.example.org", "*.example.org:443"]}, allow_internet_access=True
        )
        network = service.client.get(box.path).json()["network"]
        assert network["allowOut"] == ["packages.example.org", "*.example.org:443"]
        assert service.client.put(f"{box.path}/network", json=network).status_code == 204
        assert service.client.put(f"{box.path}/network", json={"allowOut": ["other.org"]}).status_code == 501
        proxy = output_of(box.run("echo $https_proxy")).decode().strip()
        port = proxy.rstrip("/").rsplit(":", 1)[1]
        ask = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); "
        ask += "s.sendall(b'CONNECT evil.test:443 HTTP/1.1\\r\\n\\r\\n'); print(s.recv(99))"
        assert b"403" in output_of(box.run(f'python3 -c "{ask}"'))
        lines = [json.loads(line) for line in (service.state_dir / "audit.jsonl").read_text().splitlines()]
        denied = [line for line in lines if line["action"] == "denied"]
        assert [(line["sandbox"], line["host"], line["port"]) for line in denied] == [(box.id, "evil.test", 443)]


def test_what_the_service_does_not_do_it_says(service, box) -> None:
    assert service.client.post(f"{box.path}/connect", json={"memory": False}).status_code == 400
    for name in ("", "../x", "a/../b", "a b", "\n", "x" * 200):
        assert service.client.post(f"{box.path}/snapshots", json={"name": name}).status_code == 400, name
    assert service.client.post("/v3/templates", json={}).status_code == 501
    assert service.client.get("/volumes").status_code == 404
    assert service.client.post(f"{box.path}/fork", json={"count": 1000}).status_code == 400
    assert service.client.post("/health").status_code == 405


def test_templates_are_listed_used_and_deleted(service, tmp_path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "hello").write_text("world")
    built = service.call(service.manager.templates.build("mine", DirectorySource(tmp_path / "files")))
    (listed,) = service.client.get("/templates").json()
    assert (listed["templateID"], listed["names"], listed["buildStatus"]) == (built.id, ["mine"], "ready")
    box = service.create(templateID="mine")
    assert box.body["templateID"] == "mine"
    service.client.delete(box.path)
    assert [service.client.delete("/templates/mine").status_code for _ in range(2)] == [204, 404]
    assert service.client.get("/templates").json() == []


def test_a_snapshot_without_memory_is_only_made_where_there_is_none(tmp_path) -> None:
    backend = ScriptedBackend()
    backend.caps = scripted_caps(fork_processes=True)
    with ServiceThread(tmp_path / "state", backend) as service:
        box = service.create()
        assert service.client.post(f"{box.path}/snapshots", json={"memory": False}).status_code == 400
