"""Sandboxes that a program just asks for: whatever ends the program, nothing of them is left (B77)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from moonlet.errors import ConfigError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import Caps, Sandbox
from moonlet.sandbox.choose import make_backend
from moonlet.sandbox.state_dir import label_of
from moonlet.sandbox.sync import SyncSandbox

_PRELUDE = """
import asyncio, sys, time
from moonlet.sandbox import opening
from moonlet.sandbox.api import Sandbox
from moonlet.sandbox.sync import SyncSandbox

def say(text):
    print(text, flush=True)

def create(**options):
    return Sandbox.create(backend="namespace", **options)
"""


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_backend: Callable[[str], Caps]) -> Path:
    require_backend("namespace")
    monkeypatch.setenv("MOONLET_STATE_DIR", str(tmp_path))
    return tmp_path


def start(program: str) -> subprocess.Popen[str]:
    code = _PRELUDE + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(program: str) -> tuple[int, str, str]:
    process = start(program)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def leftovers(state_dir: Path, private: Path | None = None) -> list[str]:
    """Folders of programs, and machines of `private`, which are ended by being looked for."""
    found = sorted(path.name for path in (state_dir / "run").iterdir())
    if private is not None:
        found += asyncio.run(make_backend("namespace").sweep(label_of(private), set()))
    return found


ENDINGS = {
    "left open": ("", 0),
    "an error": ("raise ValueError('mine')", 1),
    "exit": ("sys.exit(3)", 3),
    "cancelled": ("asyncio.current_task().cancel(); await asyncio.sleep(0)", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_the_loop_ends_the_sandboxes(state_dir: Path, ending: str) -> None:
    line, code = ENDINGS[ending]
    status, out, err = run(f"""
        async def main():
            async with create() as sandbox:
                say((await sandbox.exec("echo hello")).text.strip())
            kept = [await create() for _ in range(2)]
            await kept[0].pause()
            say(opening._embedded[asyncio.get_running_loop()].folder)
            {line}

        asyncio.run(main())
        """)
    assert (status, out.split()[0]) == (code, "hello"), err
    assert "never awaited" not in err and "pending" not in err
    assert leftovers(state_dir, Path(out.split()[1])) == []


def test_ctrl_c_at_any_moment(state_dir: Path) -> None:
    program = """
        async def work(number):
            while True:
                async with create() as sandbox:
                    await sandbox.exec("sleep 0.01")
                    await sandbox.fork(1) if number else await sandbox.pause()

        async def main():
            async with create():
                say(opening._embedded[asyncio.get_running_loop()].folder)
                await asyncio.gather(*(work(number) for number in range(2)))

        asyncio.run(main())
        """
    for seed in range(10):
        process = start(program)
        assert process.stdout is not None
        private = Path(process.stdout.readline().strip())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random.Random(seed).uniform(0, 0.6))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
        assert leftovers(state_dir, private) == [], f"seed {seed}: {err}"


def test_what_a_killed_program_left_is_ended_by_the_next(state_dir: Path) -> None:
    victim = start("""
        async def main():
            sandbox = await create()
            say(opening._embedded[asyncio.get_running_loop()].folder)
            await sandbox.exec("sleep 1000", timeout_s=None)

        asyncio.run(main())
        """)
    assert victim.stdout is not None
    private = Path(victim.stdout.readline().strip())
    living = start("""
        async def main():
            async with create() as sandbox:
                say(opening._embedded[asyncio.get_running_loop()].folder)
                sys.stdin.readline()
                say((await sandbox.exec("echo alive")).text.strip())

        asyncio.run(main())
        """)
    assert living.stdout is not None
    other = Path(living.stdout.readline().strip())
    victim.kill()
    victim.communicate()
    assert sorted(path.name for path in (state_dir / "run").iterdir()) == sorted([private.name, other.name])
    status, _, err = run("""
        async def main():
            async with create():
                pass

        asyncio.run(main())
        """)
    assert status == 0, err
    assert living.communicate(timeout=60)[0].strip() == "alive"
    assert living.returncode == 0
    assert leftovers(state_dir, private) == []


def test_without_async(state_dir: Path) -> None:
    status, out, err = run("""
        with SyncSandbox.create(backend="namespace") as sandbox:
            sandbox.write_file("a/b", b"data")
            say(sandbox.exec("cat a/b; cat", stdin=b" and input").text)
            process = sandbox.start("echo one; sleep 0.1; echo two")
            say(b"".join(piece.data for piece in process.output()).decode().split())
            say([file.name for file in sandbox.list_files()])
            sandbox.pause()
            sandbox.resume()
            child, = sandbox.fork()
            say(child.read_file("a/b").decode())
            again = SyncSandbox.attach(sandbox.id)
            say(again.info().state)
        kept = SyncSandbox.create(backend="namespace")
        say(next(iter(opening._embedded.values())).folder)
        """)
    lines = out.splitlines()
    assert status == 0, err
    assert err == ""
    assert lines[:-1] == ["data and input", "['one', 'two']", "['a']", "data", "running"]
    assert leftovers(state_dir, Path(lines[-1])) == []


def test_ctrl_c_without_async(state_dir: Path) -> None:
    for seed in range(4):
        process = start("""
            sandbox = SyncSandbox.create(backend="namespace")
            say(next(iter(opening._embedded.values())).folder)
            while True:
                with SyncSandbox.create(backend="namespace") as other:
                    other.exec("sleep 0.05")
            """)
        assert process.stdout is not None
        private = Path(process.stdout.readline().strip())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random.Random(seed).uniform(0, 0.5))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        assert leftovers(state_dir, private) == [], f"seed {seed}: {err}"


def test_a_loop_that_is_only_dropped(state_dir: Path) -> None:
    status, out, err = run("""
        loop = asyncio.new_event_loop()
        async def main():
            await create()
            say(opening._embedded[asyncio.get_running_loop()].folder)
        loop.run_until_complete(main())
        """)
    assert status == 0, err
    assert leftovers(state_dir, Path(out.strip())) == []


def test_each_loop_has_its_own(state_dir: Path) -> None:
    async def one() -> str:
        async with Sandbox.create(backend="namespace") as sandbox:
            with pytest.raises(SandboxNotFoundError, match="moonlet sandbox serve"):
                await Sandbox.attach("sbnothing")
            await sandbox.pause()
            again = await Sandbox.attach(sandbox.id)
            assert (await again.exec("echo on")).text == "on\n"
            return sandbox.id

    first, second = asyncio.run(one()), asyncio.run(one())
    assert first != second
    assert leftovers(state_dir) == []


def test_a_service_that_runs_is_used(state_dir: Path) -> None:
    service = start("""
        from moonlet.sandbox.manager import ServiceConfig
        from moonlet.sandbox.server.app import serve
        from moonlet.sandbox.server.config import ServerConfig
        from moonlet.sandbox.settings import default_state_dir
        config = ServerConfig(port=0, service=ServiceConfig(default_state_dir(), backend="namespace"))
        asyncio.run(serve(config, lambda url, *_: say(url)))
        """)
    assert service.stdout is not None
    try:
        assert service.stdout.readline().startswith("http://")
        with SyncSandbox.create() as sandbox:
            assert type(sandbox._sandbox).__name__ == "RemoteSandbox"
            assert sandbox.exec("echo there").text == "there\n"
            with SyncSandbox.attach(sandbox.id, state_dir=state_dir) as again:
                assert again.id == sandbox.id
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0, service.communicate()[1]
    with pytest.raises(SandboxStateError, match="no service runs"):
        SyncSandbox.create(state_dir=state_dir)
    assert not (state_dir / "run").exists()


def test_wrong_options_are_named(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'template'"):
        Sandbox.create(templat="host")
    with pytest.raises(ConfigError, match="state_dir"):
        Sandbox.attach("sb", statedir="x")
    assert os.listdir(state_dir) == []
