"""`moonlet sandbox`: the verbs over a state directory, over a service, in a terminal; on machines in namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from moonlet.cli import main as cli
from moonlet.cli.sandbox import tables
from moonlet.errors import ConfigError
from moonlet.sandbox.choose import make_backend

COMMAND = [sys.executable, "-m", "moonlet", "sandbox"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    probe = asyncio.run(make_backend("namespace").probe())
    if probe.caps is None:
        if "namespace" in os.environ.get("MOONLET_REQUIRE_BACKENDS", "").split(","):
            pytest.fail(probe.reason)
        pytest.skip(f"namespace: {probe.reason}")


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state") / "s"
    yield folder
    if folder.exists():
        subprocess.run([*COMMAND, "rm", "--all", "--state-dir", folder], check=True, capture_output=True)


@pytest.fixture(scope="module", params=["directory", "service"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory, alone or with a service that holds it."""
    folder = tmp_path_factory.mktemp("state") / "s"
    if request.param == "directory":
        yield folder
        subprocess.run([*COMMAND, "rm", "--all", "--state-dir", folder], check=True, capture_output=True)
        return
    command = [*COMMAND, "serve", "--port", "0", "--state-dir", folder, "--backend", "namespace"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None and service.stdout.readline().startswith("sandboxes at http://127.0.0.1:")
        yield folder
        subprocess.run([*COMMAND, "rm", "--all", "--state-dir", folder], check=True, capture_output=True)
    finally:
        service.send_signal(signal.SIGINT)
        _, err = service.communicate(timeout=60)
        assert service.returncode == 0, err


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as end:
            cli.app(["sandbox", *map(str, arguments)])
        out, err = capfd.readouterr()
        return Done(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def box(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MOONLET_STATE_DIR", str(place))
    done = run("start", "--backend", "namespace", "--memory", "128M", "-m", "task=7", "-e", "GREETING=hello")
    assert done.code == 0, done.err
    yield done.out.strip()
    run("rm", done.out.strip())


def test_output_and_exit_code_of_a_command_are_ours(run: Run, box: str) -> None:
    assert run("exec", box, "echo $GREETING; echo bad >&2; exit 7") == Done(7, "hello\n", "bad\n")
    assert run("exec", "-w", "/tmp", "-e", "A=b c", box, "sh", "-c", 'pwd; echo "$A"').out == "/tmp\nb c\n"
    assert run("exec", box, "echo", "--help", "-x", "a b").out == "--help -x a b\n"
    done = run("exec", "--timeout", "0.3", box, "echo kept; sleep 60")
    assert (done.code, done.out) == (124, "kept\n") and "out of time" in done.err


def test_standard_input_and_bytes_go_through(box: str) -> None:
    data = bytes(range(256)) * 4000
    done = subprocess.run([*COMMAND, "exec", "-i", box, "cat"], input=data, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout == data
    done = subprocess.run([*COMMAND, "exec", box, "cat"], input=data, capture_output=True, timeout=60)
    assert done.stdout == b"", "not asked for, not passed on"


def test_output_comes_as_it_is_written(box: str) -> None:
    command = [*COMMAND, "exec", "-i", box, "while read x; do echo got $x; done"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin and process.stdout
        for word in ("one", "two"):
            process.stdin.write(f"{word}\n")
            assert process.stdout.readline() == f"got {word}\n"


def test_a_reader_that_leaves_ends_the_command(box: str, run: Run) -> None:
    line = f"{' '.join(COMMAND)} exec {box} 'yes' | head -c 3"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout == "y\ny" and "Traceback" not in done.stderr
    assert run("exec", box, "pgrep -x yes; true").out == ""


def test_ctrl_c_ends_the_command_and_130(box: str, run: Run) -> None:
    command = [*COMMAND, "exec", box, "echo ready; sleep 1234"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert run("exec", box, "pgrep -f 'sleep 123[4]'; true").out == ""


def test_a_command_in_the_background_goes_on(run: Run, box: str) -> None:
    done = run("exec", "-d", box, "sleep 0.2; echo late > note")
    assert done.code == 0 and done.out.strip()
    assert run("exec", box, "until [ -s note ]; do sleep 0.05; done; cat note").out == "late\n"


def test_files_and_folders_go_both_ways(run: Run, box: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "data").write_bytes(os.urandom(300_000))
    (source / "tool").write_text("#!/bin/sh\necho works\n")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    done = run("cp", source, f"{box}:copy")
    assert done.code == 0 and done.err.startswith("2 files") and "1 links" in done.err
    assert run("exec", box, "copy/tool; ls copy/deep; test ! -e copy/link").out == "works\ndata\nempty\n"
    done = run("cp", f"{box}:copy", tmp_path / "back")
    assert done.code == 0, done.err
    assert (tmp_path / "back" / "deep" / "data").read_bytes() == (source / "deep" / "data").read_bytes()
    assert (tmp_path / "back" / "deep" / "empty").is_dir() and os.access(tmp_path / "back" / "tool", os.X_OK)
    assert run("cp", source / "tool", f"{box}:copy/deep/").code == 0
    assert run("cp", f"{box}:copy/deep/tool", tmp_path).code == 0
    assert (tmp_path / "tool").read_bytes() == (source / "tool").read_bytes()


def test_what_comes_out_cannot_leave_its_place(run: Run, box: str, tmp_path: Path) -> None:
    """Links in the sandbox that lead to places of ours, and a folder that is there already."""
    outside = tmp_path / "outside"
    outside.mkdir()
    run("exec", box, f"mkdir -p t/sub; ln -s {outside} t/way; ln -s /etc/shadow t/secret; echo x > t/sub/f; mkfifo t/p")
    done = run("cp", "-v", f"{box}:t", tmp_path / "copy")
    assert done.code == 0 and "3 links and special files left out" in done.err
    assert sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")) == [
        "sub",
        "sub/f",
    ]
    done = run("cp", f"{box}:t/sub", tmp_path / "copy")
    assert done.code == 1 and "there already" in done.err
    assert list(outside.iterdir()) == []


def test_pause_resume_fork_and_snapshot(run: Run, box: str) -> None:
    run("exec", box, "echo kept > note")
    assert run("pause", box) == Done(0, f"{box}\n", "")
    assert re.search(rf"^{box} +paused +namespace", run("ls").out, re.M)
    assert run("exec", box, "cat note").out == "kept\n", "exec resumes"
    assert run("pause", box).code == 0 and run("resume", box, "nobody").code == 1
    children = run("fork", "-n", "2", box).out.split()
    assert len(children) == 2
    run("exec", children[0], "echo other > note")
    assert [run("exec", each, "cat note").out for each in (box, *children)] == ["kept\n", "other\n", "kept\n"]
    snapshot = run("snapshot", box, "--name", "first").out.strip()
    assert re.search(rf"^{snapshot} +first", run("snapshot", "--list").out, re.M)
    third = run("start", snapshot).out.strip()
    assert run("exec", third, "cat note").out == "kept\n"
    assert run("snapshot", "--delete", snapshot).code == 0
    assert run("snapshot", "--list") == Done(0, "", "no snapshots\n")
    assert run("rm", *children, third).out.split() == [*children, third]


def test_lists(run: Run, box: str) -> None:
    other = run("start", "--backend", "namespace", "--ttl", "0").out.strip()
    infos = [json.loads(line) for line in run("ls", "--json").out.splitlines()]
    assert {info["id"] for info in infos} >= {box, other}
    mine = next(info for info in infos if info["id"] == box)
    assert mine["metadata"] == {"task": "7"} and mine["limits"]["memory_bytes"] == 128 << 20
    assert run("ls", "-q", "-m", "task=7").out.split() == [box]
    assert "no limit" in run("ls").out
    assert run("rm", "-m", "task=7").out.split() == [box]
    assert run("ls", "-q").out.split() == [other]
    assert run("rm", "--all").out.split() == [other]
    assert "start" in run("ls").err


def test_errors_are_one_line(run: Run, box: str) -> None:
    for arguments in (
        ("exec", "sbnothing", "true"),
        ("exec", "../../etc", "true"),
        ("start", "no-such-template"),
        ("start", "--memory", "much"),
        ("cp", "a", "b"),
        ("cp", f"{box}:nothing", "here"),
        ("attach", box),
        ("rm",),
        ("rm", "sbnothing"),
        ("snapshot",),
        ("logs", "sbnothing"),
        ("serve", "--set", "max_runing=3"),
    ):
        done = run(*arguments)
        assert done.code == 1 and done.err.startswith("error: ") and done.err.count("\n") == 1, (arguments, done)


def test_a_terminal(box: str) -> None:
    """A shell with its own terminal: keys go in, size goes along, the exit code comes back."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "attach", box], {**os.environ, "PS1": "$ "})
    try:
        seen = b""

        def wait_for(text: bytes) -> None:
            nonlocal seen
            deadline = time.monotonic() + 60
            while text not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([descriptor], [], [], 1)[0]:
                    seen += os.read(descriptor, 4096)
            seen = seen.partition(text)[2]

        os.write(descriptor, b"tty; echo $((6*7))\n")
        wait_for(b"/dev/pts/")
        wait_for(b"42")
        os.write(descriptor, b"echo be''gun; sleep 100\n")  # what is typed is echoed, but not in one piece
        wait_for(b"begun")
        time.sleep(0.5)  # the shell makes `sleep` the one that Ctrl-C goes to; nothing says when
        os.write(descriptor, b"\x03")
        os.write(descriptor, b"stty size; exit 5\n")
        wait_for(b"24 80")
        while True:
            try:
                if not os.read(descriptor, 4096):
                    break
            except OSError:
                break
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    finally:
        os.close(descriptor)


def test_no_torch_is_needed(box: str) -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not installed here")
sys.meta_path.insert(0, Refuse())
import moonlet.cli.main as cli
sys.argv = ["moonlet", "sandbox", "exec", "{box}", "echo works"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")


def test_two_commands_at_once_without_a_service(state_dir: Path) -> None:
    """They take turns."""
    environment = {**os.environ, "MOONLET_STATE_DIR": str(state_dir)}
    command = [*COMMAND, "start", "--backend", "namespace"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ids = [process.communicate(timeout=60)[0].strip() for process in both]
    listed = subprocess.run([*COMMAND, "ls", "-q"], env=environment, capture_output=True, text=True).stdout.split()
    assert sorted(listed) == sorted(ids) and len(set(ids)) == 2


def test_a_service_elsewhere_wants_a_key(run: Run, place: Path, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONLET_SANDBOX_API_KEY", raising=False)
    done = run("ls", "--url", "http://127.0.0.1:1")
    assert done.code == 1 and "MOONLET_SANDBOX_API_KEY" in done.err
    note = place / "service.json"
    if not note.exists():
        return
    url = json.loads(note.read_text())["url"]
    monkeypatch.setenv("MOONLET_STATE_DIR", "/nowhere")
    monkeypatch.setenv("MOONLET_SANDBOX_URL", url)
    monkeypatch.setenv("MOONLET_SANDBOX_API_KEY", "wrong-key-of-nobody")
    assert run("ls").code == 1
    monkeypatch.setenv("MOONLET_SANDBOX_API_KEY", (place / "api_key").read_text().strip())
    assert run("exec", box, "echo far").out == "far\n"


def test_probe_says_what_works(run: Run) -> None:
    done = run("probe")
    assert done.code == 0 and re.search(r"^namespace +yes +namespaces", done.out, re.M)


@pytest.mark.parametrize(
    "text, value", [("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("100", 100), ("4kb", 4096)]
)
def test_sizes(text: str, value: int) -> None:
    assert tables.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "-1M", "much", "1X", "1 2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="512M"):
        tables.parse_size(text)


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0s"), (59.9, "59s"), (200, "3m20s"), (7200, "2h"), (15000, "4h10m"), (190000, "2d4h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_templates(run: Run, box: str, tmp_path: Path) -> None:
    """A folder becomes a template, a sandbox starts from it, and it stays while a snapshot needs it."""
    root = tmp_path / "root"
    for program in ("/bin/sh", "/bin/cat"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(0x", listed)]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    (root / "motd").write_text("small\n")
    done = run("template", "build", "small", f"dir:{root}")
    assert done.code == 0, done.err
    template_id = done.out.strip()
    assert re.search(rf"^small +{template_id[:12]} ", run("template", "ls").out, re.M)
    started = run("start", "small", "--backend", "namespace")
    assert started.code == 0, started.err
    mine = started.out.strip()
    assert run("exec", mine, "cat /motd").out == "small\n"
    snapshot = run("snapshot", mine).out.strip()
    run("rm", mine)
    assert run("template", "rm", "small").code == 0
    again = run("start", snapshot).out.strip()
    assert run("exec", again, "cat /motd").out == "small\n"
    run("rm", again)
    run("snapshot", "--delete", snapshot)
    assert run("template", "rm", template_id).code == 0
    assert "no templates" in run("template", "ls").err
    assert run("template", "build", "x", "nonsense:x").code == 1
