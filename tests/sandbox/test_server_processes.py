"""Commands over the API: output, ends, input, signals, reconnecting, and what happens to them when a client goes away."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path

import pytest
from sandbox.service_thread import SandboxClient, ServiceThread, output_of, wait_for

from moonlet.sandbox.envelope import envelope


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service"), keepalive_s=0.2) as running:
        yield running


@pytest.fixture
def box(service) -> SandboxClient:
    return service.create()


def processes(box: SandboxClient) -> list[dict]:
    return box.rpc("process.Process/List", {}).json()["processes"]


def start(command: str, **options) -> dict:
    return {"process": {"cmd": "/bin/sh", "args": ["-c", command]}, **options}


def end_of(events: list[dict]) -> dict:
    return events[-1]["end"]


def test_a_command_starts_writes_and_ends(box) -> None:
    events = box.run("echo out; echo err >&2; exit 3")
    assert events[0]["start"]["pid"] > 0
    assert (output_of(events), output_of(events, "stderr")) == (b"out\n", b"err\n")
    assert end_of(events)["exitCode"] == 3 and end_of(events)["exited"] and end_of(events)["status"] == "exit status 3"
    assert end_of(box.run("true")) | {"moonlet": {}} == {
        "exitCode": 0,
        "exited": True,
        "status": "exit status 0",
        "moonlet": {},
    }


def test_a_signal_is_told_as_such(box) -> None:
    end = end_of(box.run("kill -9 $$"))
    assert (end["exitCode"], end["exited"], end["status"]) == (137, False, "signal: killed")


def test_output_is_bytes_and_more_than_a_message_holds(box) -> None:
    size = 5 << 20
    events = box.run(f"head -c {size} /dev/zero | tr '\\0' '\\377'; printf '\\377' >&2")
    assert output_of(events) == b"\xff" * size and output_of(events, "stderr") == b"\xff"


def test_output_beyond_the_limit_is_counted(service) -> None:
    box = service.create(metadata={"moonlet.output_bytes": "1000"})
    events = box.run("head -c 5000 /dev/zero")
    assert len(output_of(events)) == 1000 and end_of(events)["moonlet"]["stdout_total"] == 5000


def test_what_cannot_be_started_is_an_error_of_the_stream(box) -> None:
    for config, code in (({"cmd": "/no/such"}, "not_found"), ({"cmd": "/bin/sh", "cwd": "/no/such"}, "not_found")):
        events = box.run("true", process={"args": []} | config)
        assert events[-1]["error"]["code"] == code, events


def test_an_image_without_bash_gets_its_plain_shell(box) -> None:
    path = box.run("echo $0", process={"cmd": "/bin/bash", "args": ["-l", "-c", "echo it is $0"]})
    assert b"it is" in output_of(path)


def test_environment_directory_and_home(service) -> None:
    box = service.create(envVars={"A": "1", "B": "1"})
    box.rpc("filesystem.Filesystem/MakeDir", {"path": "work"})
    events = box.run("echo $A $B; pwd", process={"envs": {"B": "2"}, "cwd": "~/work"})
    lines = output_of(events).decode().splitlines()
    assert lines[0] == "1 2" and lines[1].endswith("/work")


def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(box) -> None:
    events = box.run("echo kept; setsid sleep 4242 & sleep 4242", headers={"Connect_Timeout_Ms": "500"})
    assert output_of(events) == b"kept\n"
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert output_of(box.run("pgrep -f '^sleep 424[2]' || echo none")) == b"none\n"


def test_a_background_child_does_not_delay_the_end(box) -> None:
    assert output_of(box.run("sleep 60 & echo hi")) == b"hi\n"


def test_a_quiet_stream_says_that_it_lives(box) -> None:
    with box.stream("process.Process/Start", start("read line; echo $line", stdin=True)) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        assert next(messages) == {"event": {"keepalive": {}}}
        data = base64.b64encode(b"hello\n").decode()
        box.rpc("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": data}})
        events = [message["event"] for message in messages]
    assert output_of(events) == b"hello\n"


def test_input_ends_when_it_is_closed_and_at_once_without_any(box) -> None:
    assert end_of(box.run("cat")) | {"moonlet": 0} == {
        "exitCode": 0,
        "exited": True,
        "status": "exit status 0",
        "moonlet": 0,
    }
    with box.stream("process.Process/Start", start("wc -c", stdin=True)) as messages:
        selector = {"process": {"pid": next(messages)["event"]["start"]["pid"]}}
        for _ in range(3):
            data = base64.b64encode(b"x" * 700_000).decode()
            assert box.rpc("process.Process/SendInput", selector | {"input": {"stdin": data}}).status_code == 200
        assert box.rpc("process.Process/CloseStdin", selector).status_code == 200
        assert output_of([message["event"] for message in messages]) == b"2100000\n"


def test_a_stream_of_input(box) -> None:
    with box.stream("process.Process/Start", start("cat", stdin=True)) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        parts = [{"start": {"process": {"pid": pid}}}]
        parts += [{"data": {"input": {"stdin": base64.b64encode(b"%d" % index).decode()}}} for index in range(50)]
        body = b"".join(map(envelope, parts))
        headers = {"Content-Type": "application/connect+json"}
        answer = box.http.post("/process.Process/StreamInput", content=body, headers=headers)
        assert answer.status_code == 200 and answer.content == envelope({}) + b"\x02\x00\x00\x00\x02{}"
        box.rpc("process.Process/CloseStdin", {"process": {"pid": pid}})
        assert output_of([message["event"] for message in messages]) == b"".join(b"%d" % index for index in range(50))


def test_a_command_that_reads_no_input_does_not_hold_a_request_for_ever(box) -> None:
    with box.stream("process.Process/Start", start("sleep 100", stdin=True)) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        data = base64.b64encode(b"x" * (3 << 20)).decode()
        answer = box.http.post(
            "/process.Process/SendInput",
            json={"process": {"pid": pid}, "input": {"stdin": data}},
            headers={"Connect-Timeout-Ms": "300"},
        )
        assert answer.status_code == 504
        assert box.http.get("/health").status_code == 204


def test_signals_and_kill(box) -> None:
    for name, code in (("SIGNAL_SIGTERM", 143), ("SIGNAL_SIGKILL", 137), (9, 137)):
        with box.stream("process.Process/Start", start("exec sleep 100")) as messages:
            pid = next(messages)["event"]["start"]["pid"]
            selector = {"process": {"pid": pid}}
            assert box.rpc("process.Process/SendSignal", selector | {"signal": name}).status_code == 200
            assert end_of([message["event"] for message in messages])["exitCode"] == code
    wait_for(lambda: not processes(box))
    gone = box.rpc("process.Process/SendSignal", selector | {"signal": "SIGNAL_SIGKILL"})
    assert gone.status_code == 404 and gone.json()["code"] == "not_found"


def test_a_terminal_has_a_size_and_echoes(box) -> None:
    body = {"process": {"cmd": "/bin/sh", "args": []}, "pty": {"size": {"rows": 12, "cols": 34}}}
    with box.stream("process.Process/Start", body) as messages:
        selector = {"process": {"pid": next(messages)["event"]["start"]["pid"]}}

        def type_in(text: bytes) -> None:
            data = base64.b64encode(text).decode()
            assert box.rpc("process.Process/SendInput", selector | {"input": {"pty": data}}).status_code == 200

        type_in(b"stty size\n")
        seen = b""
        while b"12 34" not in seen:
            seen += output_of([next(messages)["event"]], "pty")
        size = {"pty": {"size": {"rows": 50, "cols": 60}}}
        assert box.rpc("process.Process/Update", selector | size).status_code == 200
        type_in(b"stty size; exit 5\n")
        events = [message["event"] for message in messages]
    assert b"50 60" in output_of(events, "pty") and end_of(events)["exitCode"] == 5


def test_a_client_that_disconnects_leaves_the_command_running_and_nothing_else(service, box) -> None:
    gate = box.run("pwd")
    flag = Path(output_of(gate).decode().strip()) / "go"
    with box.stream(
        "process.Process/Start", start(f"echo one; while [ ! -e {flag} ]; do sleep 0.02; done; echo two")
    ) as m:
        pid = next(m)["event"]["start"]["pid"]
        while b"one" not in output_of([next(m)["event"]]):
            pass
    wait_for(lambda: not service.open_streams())
    assert [each["pid"] for each in processes(box)] == [pid]
    with box.stream("process.Process/Connect", {"process": {"pid": pid}}) as again:
        assert next(again)["event"]["start"]["pid"] == pid
        flag.touch()
        events = [message["event"] for message in again]
    assert output_of(events) == b"one\ntwo\n" and end_of(events)["exitCode"] == 0
    wait_for(lambda: not service.open_streams())


def test_a_command_that_ended_unseen_can_still_be_asked_for_once(box) -> None:
    with box.stream("process.Process/Start", start("read x; echo unseen", stdin=True)) as messages:
        pid = next(messages)["event"]["start"]["pid"]
    selector = {"process": {"pid": pid}}
    box.rpc("process.Process/CloseStdin", selector)
    wait_for(lambda: not processes(box))
    with box.stream("process.Process/Connect", selector) as again:
        assert output_of([message["event"] for message in again]) == b"unseen\n"
    with box.stream("process.Process/Connect", selector) as again:
        assert [message["error"]["code"] for message in again] == ["not_found"]


def test_two_readers_of_one_command_both_see_its_end(box) -> None:
    with box.stream("process.Process/Start", start("read x; seq 2000", stdin=True, tag="count")) as first:
        pid = next(first)["event"]["start"]["pid"]
        with box.stream("process.Process/Connect", {"process": {"tag": "count"}}) as second:
            assert next(second)["event"]["start"]["pid"] == pid
            box.rpc("process.Process/CloseStdin", {"process": {"pid": pid}})
            outputs = [output_of([message["event"] for message in each]) for each in (second, first)]
    assert outputs[0] == outputs[1] == b"".join(b"%d\n" % number for number in range(1, 2001))


def test_a_stream_goes_on_after_a_pause(tmp_path) -> None:
    from sandbox.scripted_backend import ScriptedBackend

    with ServiceThread(tmp_path / "state", ScriptedBackend(frees_memory=False), keepalive_s=0.2) as service:
        box = service.create()
        with box.stream("process.Process/Start", start("echo one; read x; echo two", stdin=True)) as messages:
            pid = next(messages)["event"]["start"]["pid"]
            while b"one" not in output_of([next(messages)["event"]]):
                pass
            assert service.client.post(f"{box.path}/pause").status_code == 204
            assert next(messages) == {"event": {"keepalive": {}}}
            assert service.client.post(f"{box.path}/connect", json={}).status_code == 201
            box.rpc("process.Process/CloseStdin", {"process": {"pid": pid}})
            events = [message["event"] for message in messages]
        assert output_of(events) == b"two\n" and end_of(events)["exitCode"] == 0


def test_a_stream_of_a_destroyed_sandbox_ends_with_the_words_that_clients_know(service, box) -> None:
    with box.stream("process.Process/Start", start("sleep 100")) as messages:
        next(messages)
        assert service.client.delete(box.path).status_code == 204
        last = [message for message in messages if "error" in message]
    assert last[0]["error"]["code"] == "unavailable" and "was not found" in last[0]["error"]["message"]


def test_a_reader_that_does_not_read_fills_no_memory(service) -> None:
    """The command writes far more than the service may hold; only what the agent keeps exists, and the socket's buffers."""
    box = service.create(metadata={"moonlet.output_bytes": str(200 << 20)})
    box.run("true")
    before = memory_bytes()
    with box.stream("process.Process/Start", start("head -c 190000000 /dev/zero; echo done >&2")) as messages:
        next(messages)
        wait_for(lambda: not processes(box), 60)
        assert memory_bytes() - before < 40 << 20
        events = [message["event"] for message in messages]
    assert (
        sum(len(base64.b64decode(event["data"].get("stdout", ""))) for event in events if "data" in event)
        == 190_000_000
    )


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_there_is_a_limit_on_streams(tmp_path) -> None:
    from moonlet.sandbox.server.config import Bounds

    with ServiceThread(tmp_path / "state", bounds=Bounds(streams=2)) as service:
        box = service.create()
        with (
            box.stream("process.Process/Start", start("sleep 100")) as one,
            box.stream("process.Process/Start", start("sleep 100")) as two,
        ):
            next(one), next(two)
            events = box.run("sleep 100")
            assert events[-1]["error"]["code"] == "resource_exhausted"


def test_many_at_once(service, box) -> None:
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda index=index: results.append(output_of(box.run(f"echo {index}"))))
        for index in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=int) == [b"%d\n" % index for index in range(30)]
    wait_for(lambda: not service.open_streams())
