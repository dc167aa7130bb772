"""Files over the API: both kinds of upload, ranges, names of every kind, directories, watching, and sizes without end."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import os
import socket
import time
import urllib.parse
from pathlib import Path

import pytest
from sandbox.service_thread import SandboxClient, ServiceThread, output_of, wait_for

OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceThread(tmp_path_factory.mktemp("service"), keepalive_s=0.2) as running:
        yield running


@pytest.fixture
def box(service) -> SandboxClient:
    return service.create()


def put(box: SandboxClient, path: str, data, **headers: str):
    return box.http.post("/files", params={"path": path}, content=data, headers=OCTETS | headers)


def get(box: SandboxClient, path: str, **headers: str):
    return box.http.get("/files", params={"path": path}, headers=headers)


def entries(box: SandboxClient, path: str, depth: int = 1) -> list[dict]:
    return box.rpc("filesystem.Filesystem/ListDir", {"path": path, "depth": depth}).json()["entries"]


# -- up and down ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 262_143, 262_144, 262_145, 5 << 20])
def test_any_size_comes_back_as_it_went(box, size) -> None:
    data = os.urandom(size)
    answer = put(box, "dir/file.bin", data)
    assert answer.status_code == 200
    (entry,) = answer.json()
    assert entry["name"] == "file.bin" and entry["type"] == "file" and entry["path"].endswith("/dir/file.bin")
    back = get(box, "dir/file.bin")
    assert back.content == data and int(back.headers["content-length"]) == size
    assert get(box, entry["path"]).content == data


def test_forms_with_one_or_many_files(box) -> None:
    big = os.urandom(1 << 20)
    one = box.http.post("/files", params={"path": "a"}, files={"file": ("ignored", big)})
    assert one.status_code == 200 and get(box, "a").content == big
    many = [("file", (f"m/{index}", b"%d" % index * 1000)) for index in range(50)]
    assert len(box.http.post("/files", files=many).json()) == 50
    assert all(get(box, f"m/{index}").content == b"%d" % index * 1000 for index in (0, 49))
    other = [("note", (None, b"skipped")), ("file", ("last", b"x"))]
    assert len(box.http.post("/files", files=other).json()) == 1


def test_forms_that_are_wrong_are_refused(box) -> None:
    two = [("file", ("x", b"1")), ("file", ("y", b"2"))]
    assert box.http.post("/files", params={"path": "a"}, files=two).status_code == 400
    assert box.http.post("/files", files=[("other", ("x", b"1"))]).status_code == 400
    for content_type, body in (
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=", b"x"),
        ("multipart/form-data; boundary=b", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\n"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="cut"\r\n\r\nxx',
        ),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\nx\r\n--b--"),
        ("multipart/form-data; boundary=" + "b" * 1000, b"x"),
    ):
        answer = box.http.post("/files", content=body, headers={"Content-Type": content_type})
        assert answer.status_code == 400, (content_type, body[:50], answer.text)
    assert box.rpc("filesystem.Filesystem/Stat", {"path": "cut"}).status_code == 404


def test_gzip_is_unpacked_on_the_way(box) -> None:
    data = os.urandom(1 << 20) + b"\0" * (20 << 20)
    packed = gzip.compress(data[: 1 << 20]) + gzip.compress(data[1 << 20 :])
    assert put(box, "plain", packed, **{"Content-Encoding": "gzip"}).status_code == 200
    assert hashlib.sha256(get(box, "plain").content).digest() == hashlib.sha256(data).digest()
    for broken in (packed[:-4], b"no gzip", b""):
        assert put(box, "broken", broken, **{"Content-Encoding": "gzip"}).status_code == 400
    assert put(box, "broken", b"x", **{"Content-Encoding": "br"}).status_code == 501
    assert box.rpc("filesystem.Filesystem/Stat", {"path": "broken"}).status_code == 404


def test_ranges(box) -> None:
    data = os.urandom(600_000)
    put(box, "f", data)
    for text, (start, end) in {
        "bytes=0-0": (0, 1),
        "bytes=10-": (10, 600_000),
        "bytes=-7": (599_993, 600_000),
        "bytes=262000-263000": (262_000, 263_001),
        "bytes=5-99999999": (5, 600_000),
    }.items():
        answer = get(box, "f", Range=text)
        assert answer.status_code == 206 and answer.content == data[start:end]
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/600000"
    assert get(box, "f", Range="bytes=600000-").status_code == 416
    for text in ("bytes=a-b", "lines=1-2", "bytes=1-2,5-6", "bytes=-"):
        assert get(box, "f", Range=text).content == data


def test_files_without_a_size_are_read_to_their_end(box) -> None:
    assert b"Linux" in get(box, "/proc/version").content
    assert len(get(box, "/proc/kallsyms").content) >= 0


def test_an_existing_file_is_replaced_whole_and_keeps_its_mode(box) -> None:
    put(box, "script", b"old")
    box.run("chmod 755 script")
    put(box, "script", b"new")
    assert output_of(box.run("cat script; stat -c %a script")) == b"new755\n"
    put(box, "~/secret", b"x")
    answer = box.http.post("/files", params={"path": "secret", "mode": "600"}, content=b"y", headers=OCTETS)
    assert answer.status_code == 200 and output_of(box.run("stat -c %a secret")) == b"600\n"
    assert box.http.post("/files", params={"path": "x", "mode": "9"}, content=b"", headers=OCTETS).status_code == 400


@pytest.mark.parametrize(
    ("path", "status"),
    [("nothing", 404), (".", 400), ("f/x", 400), ("", 400), ("x" * 5000, 400), ("a\0b", 400), ("/proc/1/mem/x", 400)],
)
def test_what_cannot_be_read_says_so(box, path, status) -> None:
    put(box, "f", b"")
    answer = get(box, path)
    assert answer.status_code == status and answer.json()["code"] == status, answer.text


def test_a_full_disk_is_507(box) -> None:
    answer = put(box, "/dev/full/x", b"x")
    assert answer.status_code == 400
    box.run("mkdir -p d; chmod 555 d")
    assert put(box, "/proc/nothing/x", b"x").status_code in (400, 403, 404)


def test_a_file_that_shrinks_under_the_reader_breaks_the_connection(box) -> None:
    box.run("head -c 50000000 /dev/zero > f")
    with (
        pytest.raises(Exception, match=r"(?i)incomplete|closed|peer"),
        box.http.stream("GET", "/files", params={"path": "f"}) as answer,
    ):
        chunks = answer.iter_raw()
        next(chunks)
        box.run("truncate -s 1000 f")
        for _ in chunks:
            pass


# -- names ------------------------------------------------------------------------------------------------------------
NAMES = [
    "with space",
    "new\nline",
    'quote"and\\backslash',
    "ünï-日本-🙂",
    "-rf",
    "a" * 255,
    "percent%20&?#=+",
    "tab\there",
    "~",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_works_everywhere(box, name) -> None:
    path = f"d/{name}"
    assert put(box, path, name.encode()).status_code == 200
    assert get(box, path).content == name.encode()
    (entry,) = entries(box, "d")
    assert entry["name"] == name and "rawPath" not in entry
    assert box.rpc("filesystem.Filesystem/Stat", {"path": entry["path"]}).json()["entry"]["name"] == name
    moved = box.rpc("filesystem.Filesystem/Move", {"source": path, "destination": f"e/{name}"})
    assert moved.json()["entry"]["name"] == name
    assert box.rpc("filesystem.Filesystem/Remove", {"path": f"e/{name}"}).status_code == 200
    assert entries(box, "e") == []


def test_names_that_are_not_text(box) -> None:
    """Shown with U+FFFD to clients that want text, exact for those that ask."""
    box.run("printf data > \"$(printf 'x\\377y')\"")
    (entry,) = [each for each in entries(box, ".") if each["name"].startswith("x")]
    assert entry["name"] == "x\ufffdy"
    raw = base64.b64decode(entry["rawPath"])
    assert raw.endswith(b"/x\xffy")
    answer = box.http.get("/files?path=" + urllib.parse.quote(raw))
    assert answer.content == b"data"
    stat = box.http.post(
        "/filesystem.Filesystem/Stat", content=b'{"path": "x\\udcffy"}', headers={"Content-Type": "application/json"}
    )
    assert stat.json()["entry"]["rawPath"] == entry["rawPath"]


def test_paths_end_in_the_guest_and_nowhere_else(service, box) -> None:
    """What `..` and links lead to is the guest's affair; the service opens no file of its own for them."""
    canary = service.state_dir / "canary"
    canary.write_text("host")
    descriptors = len(os.listdir("/proc/self/fd"))
    for path in ("../../../../../../../../etc/hostname", "d/../../x", "/../../x"):
        box.http.get("/files", params={"path": path})
        put(box, "inner/../escape", b"x")
    box.run("ln -s /etc/passwd link")
    assert get(box, "link").content.startswith(b"root:")
    (link,) = [each for each in entries(box, ".") if each["name"] == "link"]
    assert link["type"] == "FILE_TYPE_SYMLINK" and link["symlinkTarget"] == "/etc/passwd" and link["isSymlink"]
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)


# -- directories ------------------------------------------------------------------------------------------------------
def test_directories(box) -> None:
    made = box.rpc("filesystem.Filesystem/MakeDir", {"path": "a/b/c"})
    assert made.json()["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    again = box.rpc("filesystem.Filesystem/MakeDir", {"path": "a/b/c"})
    assert again.status_code == 409 and again.json()["code"] == "already_exists"
    put(box, "a/f", b"12345")
    assert [each["name"] for each in entries(box, "a")] == ["b", "f"]
    assert [each["name"] for each in entries(box, "a", 9)] == ["b", "c", "f"]
    (file,) = [each for each in entries(box, "a") if each["name"] == "f"]
    assert (file["size"], file["type"], file["permissions"], file["owner"]) == (
        "5",
        "FILE_TYPE_FILE",
        "rw-r--r--",
        "root",
    )
    assert file["modifiedTime"].endswith("Z")
    assert box.rpc("filesystem.Filesystem/ListDir", {"path": "a/f"}).status_code == 400
    assert box.rpc("filesystem.Filesystem/MakeDir", {"path": "a/f"}).status_code in (400, 409)
    assert box.rpc("filesystem.Filesystem/Remove", {"path": "a"}).status_code == 200
    assert box.rpc("filesystem.Filesystem/Remove", {"path": "a"}).status_code == 200
    assert box.rpc("filesystem.Filesystem/ListDir", {"path": "a"}).status_code == 404


def test_a_directory_with_many_entries(box) -> None:
    box.run("mkdir many; cd many; seq 1 20000 | xargs touch")
    assert len(entries(box, "many")) == 20_000


# -- watching ---------------------------------------------------------------------------------------------------------
def test_a_watcher_collects_what_happens(box) -> None:
    box.run("mkdir w")
    watcher = box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "w"}).json()
    put(box, "w/new", b"x")
    seen: list[tuple[str, str]] = []

    def look() -> bool:
        events = box.rpc("filesystem.Filesystem/GetWatcherEvents", watcher).json()["events"]
        seen.extend((event["name"], event["type"]) for event in events)
        return any(name == "new" for name, _ in seen)

    wait_for(look)
    assert {kind for _, kind in seen} <= {
        f"EVENT_TYPE_{kind}" for kind in ("CREATE", "WRITE", "RENAME", "CHMOD", "REMOVE")
    }
    assert box.rpc("filesystem.Filesystem/RemoveWatcher", watcher).status_code == 200
    assert box.rpc("filesystem.Filesystem/GetWatcherEvents", watcher).status_code == 404


def test_a_stream_of_changes(box) -> None:
    box.run("mkdir -p w/deep")
    with box.stream("filesystem.Filesystem/WatchDir", {"path": "w", "recursive": True}) as messages:
        assert next(messages) == {"start": {}}
        assert next(messages) == {"keepalive": {}}
        put(box, "w/deep/new", b"x")
        names = set()
        while "deep/new" not in names:
            names.add(next(messages).get("filesystem", {}).get("name"))


def test_watchers_have_limits_and_ends(service, box) -> None:
    put(box, "f", b"")
    assert box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "f"}).status_code == 400
    assert box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "none"}).status_code == 404
    answers = [box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "."}) for _ in range(70)]
    assert [answer.status_code for answer in answers].count(200) == 64
    assert answers[-1].json()["code"] == "resource_exhausted"
    other = service.create()
    assert other.rpc("filesystem.Filesystem/GetWatcherEvents", answers[0].json()).status_code == 404
    service.client.delete(box.path)
    wait_for(lambda: service.app.state.service.watchers.num_open == 0)


def test_a_watcher_outlives_a_pause(tmp_path) -> None:
    from sandbox.scripted_backend import ScriptedBackend

    with ServiceThread(tmp_path / "state", ScriptedBackend(frees_memory=False)) as service:
        box = service.create()
        watcher = box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "."}).json()
        service.client.post(f"{box.path}/pause")
        service.client.post(f"{box.path}/connect", json={})
        put(box, "later", b"x")
        wait_for(
            lambda: any(
                event["name"] == "later"
                for event in box.rpc("filesystem.Filesystem/GetWatcherEvents", watcher).json()["events"]
            )
        )


# -- size and speed ---------------------------------------------------------------------------------------------------
def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_slow_download_fills_no_memory(service, box) -> None:
    box.run("truncate -s 300M big")
    before = memory_bytes()
    with box.http.stream("GET", "/files", params={"path": "big"}) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        time.sleep(0)  # the client does nothing; the service may read ahead only so far as the socket takes
        assert service.client.get("/health").status_code == 200
        assert memory_bytes() - before < 20 << 20
        assert sum(map(len, chunks)) > 290 << 20
    assert memory_bytes() - before < 40 << 20


def test_a_download_that_is_given_up_leaves_nothing(service, box) -> None:
    box.run("truncate -s 300M big")
    for _ in range(5):
        with box.http.stream("GET", "/files", params={"path": "big"}) as answer:
            next(answer.iter_raw())
    assert service.client.post(f"{box.path}/pause").status_code == 204


def test_an_upload_that_breaks_off_leaves_the_old_file(service, box) -> None:
    put(box, "f", b"old")
    port = urllib.parse.urlsplit(service.url).port
    head = (
        f"POST /files?path=f HTTP/1.1\r\nHost: h\r\nE2b-Sandbox-Id: {box.id}\r\nX-Access-Token: {box.token}\r\n"
        "Content-Type: application/octet-stream\r\nContent-Length: 100000000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + b"x" * 3_000_000)
    wait_for(lambda: output_of(box.run("ls -A")) == b"f\n")
    assert get(box, "f").content == b"old"
    assert service.client.post(f"{box.path}/pause").status_code == 204


@pytest.mark.slow
def test_two_gibibytes_go_up_and_come_down_with_little_memory(service, box) -> None:
    piece, count = bytes(range(256)) * (4 << 10), 2 << 10
    sent = hashlib.sha256()

    def pieces():
        for index in range(count):
            data = index.to_bytes(8, "big") + piece[8:]
            sent.update(data)
            yield data

    before = peak = memory_bytes()
    answer = put(box, "huge", pieces())
    assert answer.status_code == 200
    received, size = hashlib.sha256(), 0
    with box.http.stream("GET", "/files", params={"path": "huge"}) as down:
        assert int(down.headers["content-length"]) == 2 << 30
        for chunk in down.iter_raw():
            received.update(chunk)
            size += len(chunk)
            peak = max(peak, memory_bytes())
    assert size == 2 << 30 and received.digest() == sent.digest()
    assert peak - before < 100 << 20
    with contextlib.suppress(OSError):
        box.rpc("filesystem.Filesystem/Remove", {"path": "huge"})
