"""Input that no friendly client sends: broken frames, wrong types, floods. The service answers, and goes on."""

from __future__ import annotations

import base64
import json
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox.service_thread import SandboxClient, ServiceThread, output_of, wait_for

from moonlet.sandbox.envelope import envelope

STREAM = {"Content-Type": "application/connect+json"}
RPCS = [
    *(f"process.Process/{name}" for name in ("List", "SendInput", "CloseStdin", "SendSignal", "Update")),
    *(
        f"filesystem.Filesystem/{name}"
        for name in (
            "Stat",
            "MakeDir",
            "ListDir",
            "Move",
            "Remove",
            "CreateWatcher",
            "GetWatcherEvents",
            "RemoveWatcher",
        )
    ),
]
# The backend of these tests isolates nothing: no text may name anything outside the home of the sandbox, nor the home itself.
HARMLESS = st.text(st.characters(exclude_characters="/.~"), max_size=20)
STREAMS = [
    "process.Process/Start",
    "process.Process/Connect",
    "process.Process/StreamInput",
    "filesystem.Filesystem/WatchDir",
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def box(service) -> SandboxClient:
    return service.create()


@pytest.fixture(autouse=True)
def still_works(service, box):
    yield
    assert output_of(box.run("echo fine")) == b"fine\n"
    wait_for(lambda: not service.open_streams())


def code_of(content: bytes) -> str:
    """The error in the last envelope of a stream."""
    last: dict = {}
    while content:
        _, length = struct.unpack_from(">BI", content)
        last, content = json.loads(content[5 : 5 + length]), content[5 + length :]
    return last.get("error", {}).get("code", "")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0\0\0\0",
        b"\0\0\0\0\x05{}",
        b"\0\xff\xff\xff\xff",
        b"\x01" + envelope({})[1:],
        b"\x80" + envelope({})[1:],
        b"\0\0\0\0\x02[]",
        b"\0\0\0\0\x04null",
        b"\0\0\0\0\x03\xff\xfe\xfd",
        envelope({}) + envelope({}),
        envelope({}, 2),
        b"\0\0\0\x20\x00" + b"[" * 0x2000,
    ],
)
@pytest.mark.parametrize("name", STREAMS)
def test_a_broken_stream_is_refused(box, name, body) -> None:
    answer = box.http.post(f"/{name}", content=body, headers=STREAM)
    code = answer.json()["code"] if answer.status_code != 200 else code_of(answer.content)
    assert code in ("invalid_argument", "unimplemented", "resource_exhausted"), answer.content


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "application/connect+proto", "application/grpc", "text/html"]
)
def test_another_codec_is_refused(box, content_type) -> None:
    for name in STREAMS:
        answer = box.http.post(f"/{name}", content=envelope({}), headers={"Content-Type": content_type})
        assert answer.status_code == 501 and answer.json()["code"] == "unimplemented"
    answer = box.http.post("/process.Process/List", content=b"", headers={"Content-Type": "application/proto"})
    assert answer.status_code == 501
    gzipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert box.http.post("/process.Process/List", content=b"{}", headers=gzipped).status_code == 501


@pytest.mark.parametrize("name", RPCS)
@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b'"x"', b"\xff", b"[" * 100_000, b'{"a":' * 5000])
def test_broken_json_is_refused(box, name, body) -> None:
    answer = box.http.post(f"/{name}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["code"] == "invalid_argument"


WRONG = [
    {"process": {"cmd": 5}},
    {"process": {"cmd": ""}},
    {"process": {"cmd": "/bin/sh\0"}},
    {"process": {"cmd": "/bin/sh", "args": "x"}},
    {"process": {"cmd": "/bin/sh", "args": [1]}},
    {"process": {"cmd": "/bin/sh", "args": ["\0"]}},
    {"process": {"cmd": "/bin/sh", "envs": {"A": 1}}},
    {"process": {"cmd": "/bin/sh", "envs": {"A=": "1"}}},
    {"process": {"cmd": "/bin/sh", "envs": ["A"]}},
    {"process": {"cmd": "/bin/sh", "cwd": 5}},
    {"process": {"cmd": "/bin/sh", "cwd": "\0"}},
    {"process": {"cmd": "/bin/sh"}, "pty": {"size": {"rows": -1}}},
    {"process": {"cmd": "/bin/sh"}, "pty": {"size": {"rows": 10**9, "cols": True}}},
    {"process": {"cmd": "/bin/sh"}, "pty": "big"},
    {"process": {"cmd": "/bin/sh", "args": ["x" * (3 << 20)]}},
    {"process": None},
    {},
]


@pytest.mark.parametrize("body", WRONG)
def test_wrong_types_in_a_start_are_refused(box, body) -> None:
    events = box.http.post("/process.Process/Start", content=envelope(body), headers=STREAM)
    assert code_of(events.content) in ("invalid_argument", "resource_exhausted"), events.content[:500]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGHUP"}),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": 99}),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": True}),
        ("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "***"}}),
        ("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": 5}}),
        ("process.Process/Update", {"process": {"pid": 1}, "pty": {"size": {"rows": "x"}}}),
        ("process.Process/CloseStdin", {"process": {"pid": True}}),
        ("process.Process/CloseStdin", {"process": {"pid": "1"}}),
        ("process.Process/CloseStdin", {"process": {"tag": ""}}),
        ("filesystem.Filesystem/Stat", {}),
        ("filesystem.Filesystem/Stat", {"path": ""}),
        ("filesystem.Filesystem/Stat", {"path": ["x"]}),
        ("filesystem.Filesystem/Stat", {"path": "a\0b"}),
        ("filesystem.Filesystem/ListDir", {"path": ".", "depth": "1"}),
        ("filesystem.Filesystem/ListDir", {"path": ".", "depth": -1}),
        ("filesystem.Filesystem/ListDir", {"path": ".", "depth": 10**9}),
        ("filesystem.Filesystem/ListDir", {"path": "x" * 100_000}),
        ("filesystem.Filesystem/Move", {"source": "a"}),
        ("filesystem.Filesystem/CreateWatcher", {"path": 5}),
    ],
)
def test_wrong_fields_are_refused(box, name, body) -> None:
    answer = box.rpc(name, body)
    assert answer.status_code == 400 and answer.json()["code"] == "invalid_argument", answer.text


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("process.Process/SendSignal", {"process": {"pid": 2**31}, "signal": 9}),
        ("process.Process/SendSignal", {"process": {"pid": -1}, "signal": 9}),
        ("process.Process/SendSignal", {"process": {"pid": 10**30}, "signal": 9}),
        ("process.Process/CloseStdin", {"process": {"tag": "none"}}),
        ("filesystem.Filesystem/Stat", {"path": "/no/such/thing"}),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "none"}),
        ("filesystem.Filesystem/RemoveWatcher", {"watcherId": ["x"]}),
        ("filesystem.Filesystem/Move", {"source": "/no/such", "destination": "x"}),
    ],
)
def test_what_is_not_there_is_not_found(box, name, body) -> None:
    answer = box.rpc(name, body)
    assert answer.status_code == 404 and answer.json()["code"] == "not_found", answer.text


def test_signals_reach_only_commands_of_the_sandbox(box) -> None:
    """Process 1 and the agent are no commands, so no selector names them."""
    agent = int(output_of(box.run("echo $PPID")))
    for pid in (1, agent):
        assert box.rpc("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9}).status_code == 404


def test_bodies_have_limits(service, box) -> None:
    big = b'{"a":"' + b"x" * (9 << 20) + b'"}'
    json_type = {"Content-Type": "application/json"}
    assert box.http.post("/process.Process/List", content=big, headers=json_type).status_code == 429
    assert service.client.post("/sandboxes", content=big[: 2 << 20], headers=json_type).status_code == 413

    def endless():
        yield b'{"a":"'
        for _ in range(4000):
            yield b"x" * (1 << 16)

    answer = service.client.post("/sandboxes", content=endless(), headers=json_type)
    assert answer.status_code == 413


def test_huge_or_broken_heads_are_refused(service) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: h\r\n"
    assert service.raw(line + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n")[0] in (0, 400, 431)
    assert service.raw(line + b"".join(b"X%d: a\r\n" % index for index in range(20_000)) + b"\r\n")[0] in (0, 400, 431)
    assert service.raw(b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n")[0] in (0, 400, 414)
    assert service.raw(b"\0\1\2\3\r\n\r\n")[0] in (0, 400)
    assert service.raw(b"GET /health HTTP/1.1\r\n\r\n")[0] in (0, 400)  # no host
    both = line + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\nGET /sandboxes"
    assert service.raw(both)[0] in (200, 400)
    assert service.raw(line.replace(b"GET", b"POST") + b"Content-Length: -5\r\n\r\n")[0] in (0, 400)
    assert service.raw(line + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n")[0] in (0, 400)


def test_requests_that_stop_in_the_middle_leave_nothing(service, box) -> None:
    head = "\r\n".join(
        [
            "POST /files?path=half HTTP/1.1",
            "Host: h",
            f"E2b-Sandbox-Id: {box.id}",
            f"X-Access-Token: {box.token}",
            "Content-Type: application/octet-stream",
            "Content-Length: 1000000",
        ]
    ).encode()
    service.raw(head + b"\r\n\r\n" + b"x" * 300_000)
    service.raw(
        head.replace(b"/files?path=half", b"/process.Process/Start").replace(b"octet-stream", b"connect+json")
        + b"\r\n\r\n\0"
    )
    service.raw(head)
    assert box.rpc("filesystem.Filesystem/Stat", {"path": "half"}).status_code == 404
    wait_for(lambda: output_of(box.run("find . -name '*half*' | wc -l")) == b"0\n")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(RPCS),
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | HARMLESS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["path", "process", "pid", "tag", "signal", "input", "stdin", "pty", "size", "depth", "source"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ),
)
def test_no_json_makes_the_service_fail(box, name, body) -> None:
    answer = box.http.post(f"/{name}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code < 500 or answer.json()["code"] == "unimplemented", answer.text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_no_bytes_make_a_stream_fail(box, seed) -> None:
    """Valid requests with a few bytes changed."""
    source = random.Random(seed)
    body = bytearray(envelope({"process": {"cmd": "/bin/true", "args": ["x"], "envs": {"A": "b"}}, "stdin": False}))
    for _ in range(source.randrange(1, 5)):
        body[source.randrange(len(body))] = source.randrange(256)
    answer = box.http.post(
        "/process.Process/Start", content=bytes(body[: source.randrange(len(body) + 1)]), headers=STREAM
    )
    assert answer.status_code != 500
    if answer.status_code == 200:
        assert code_of(answer.content) != "internal", answer.content


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(
        st.sampled_from(
            ["templateID", "timeout", "metadata", "envVars", "autoPause", "network", "count", "name", "memory"]
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.dictionaries(st.text(max_size=3), st.integers()),
        max_size=4,
    ),
    path=st.sampled_from(["", "/x", "/x/pause", "/x/connect", "/x/timeout", "/x/fork", "/x/snapshots", "/x/refreshes"]),
)
def test_no_json_makes_the_control_api_fail(service, box, body, path) -> None:
    if path == "" and body.get("templateID") in ("base", "host"):
        return
    answer = service.client.post(f"/sandboxes{path}", json=body)
    assert answer.status_code < 500, answer.text


def test_base64_that_is_none_is_refused(box) -> None:
    with box.stream("process.Process/Start", {"process": {"cmd": "/bin/cat"}, "stdin": True}) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        for text in ("a", "a===", "\u00e4", "Zm9v\n"):
            body = {"process": {"pid": pid}, "input": {"stdin": text}}
            assert box.rpc("process.Process/SendInput", body).json()["code"] == "invalid_argument"
        good = base64.b64encode(b"fine").decode()
        assert (
            box.rpc("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": good}}).status_code == 200
        )
        box.rpc("process.Process/CloseStdin", {"process": {"pid": pid}})
        assert output_of([message["event"] for message in messages]) == b"fine"
