"""Sandboxes without async: the same methods, each of which waits. They live in an event loop of a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from moonlet.sandbox.api import (
    ExecResult,
    FileEvent,
    FileInfo,
    Output,
    Process,
    ProcessInfo,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
)

_Result = TypeVar("_Result")
_CANCEL_S = 30.0  # an interrupted call may clean up for so long
_END: Any = object()


class _Loop:
    """An event loop in a daemon thread, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work`. An interrupt (Ctrl-C) cancels it and waits for the end of its cleaning up."""
        is_over = threading.Event()

        async def whole() -> _Result:
            try:
                return await work
            finally:
                is_over.set()

        future: Future[_Result] = asyncio.run_coroutine_threadsafe(whole(), self._running())
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                is_over.wait(_CANCEL_S)
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="moonlet-sandboxes", daemon=True).start()
                _before_exit(self._finish)
            return self._loop

    def _finish(self) -> None:
        """At the end of the process: destroy what still lives, as the end of `asyncio.run` does."""
        from moonlet.sandbox.opening import close_embedded

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(close_embedded(), self._running()).result(_CANCEL_S)


def _before_exit(call: Callable[[], None]) -> None:
    """Have `call` run when the main thread has ended. At `atexit` the loop could not use threads any more, so the hook of
    `concurrent.futures` is taken where there is one; otherwise the process that `opening` starts at exit does the work.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(call)


_loop = _Loop()


def _iterate(source: AsyncIterator[_Result]) -> Iterator[_Result]:
    async def step() -> _Result:
        return await anext(source, _END)

    async def close() -> None:
        finish = getattr(source, "aclose", None)
        if finish is not None:
            await finish()

    try:
        while (item := _loop.run(step())) is not _END:
            yield item
    finally:
        _loop.run(close())


class SyncProcess:
    """As `Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def command_id(self) -> str:
        return self._process.command_id

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> Iterator[Output]:
        return _iterate(self._process.output())

    def wait(self) -> ExecResult:
        return _loop.run(self._process.wait())

    def write_stdin(self, data: bytes, *, close: bool = False) -> None:
        _loop.run(self._process.write_stdin(data, close=close))

    def signal(self, number: int) -> None:
        _loop.run(self._process.signal(number))

    def resize(self, rows: int, columns: int) -> None:
        _loop.run(self._process.resize(rows, columns))

    def kill(self) -> None:
        _loop.run(self._process.kill())


class SyncSandbox:
    """As `Sandbox`. `with SyncSandbox.create(...) as sandbox:` destroys it at the end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @classmethod
    def create(cls, spec: SandboxSpec | None = None, **options: Any) -> SyncSandbox:
        async def make() -> Sandbox:
            return await Sandbox.create(spec, **options)

        return cls(_loop.run(make()))

    @classmethod
    def attach(cls, sandbox_id: str, **options: Any) -> SyncSandbox:
        async def make() -> Sandbox:
            return await Sandbox.attach(sandbox_id, **options)

        return cls(_loop.run(make()))

    @property
    def id(self) -> str:
        return self._sandbox.id

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    # -- commands -----------------------------------------------------------------------------------------------------
    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        return _loop.run(self._sandbox.exec(command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin))

    def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        tag: str = "",
        pty: tuple[int, int] | None = None,
    ) -> SyncProcess:
        started = self._sandbox.start(command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin, tag=tag, pty=pty)
        return SyncProcess(_loop.run(started))

    def processes(self) -> list[ProcessInfo]:
        return _loop.run(self._sandbox.processes())

    def process(self, name: str | int) -> SyncProcess:
        return SyncProcess(_loop.run(self._sandbox.process(name)))

    # -- files --------------------------------------------------------------------------------------------------------
    def read_file(self, path: str) -> bytes:
        return _loop.run(self._sandbox.read_file(path))

    def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        _loop.run(self._sandbox.write_file(path, data, mode=mode))

    def upload(self, source: Path, path: str) -> None:
        _loop.run(self._sandbox.upload(source, path))

    def download(self, path: str, target: Path) -> None:
        _loop.run(self._sandbox.download(path, target))

    def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        return _loop.run(self._sandbox.list_files(path, depth=depth))

    def stat(self, path: str) -> FileInfo:
        return _loop.run(self._sandbox.stat(path))

    def make_dir(self, path: str) -> None:
        _loop.run(self._sandbox.make_dir(path))

    def remove(self, path: str) -> None:
        _loop.run(self._sandbox.remove(path))

    def rename(self, path: str, to: str) -> None:
        _loop.run(self._sandbox.rename(path, to))

    def watch(self, path: str, *, recursive: bool = False) -> Iterator[FileEvent]:
        return _iterate(self._sandbox.watch(path, recursive=recursive))

    # -- the machine --------------------------------------------------------------------------------------------------
    def info(self) -> SandboxInfo:
        return _loop.run(self._sandbox.info())

    def set_timeout(self, ttl_s: float | None) -> None:
        _loop.run(self._sandbox.set_timeout(ttl_s))

    def pause(self) -> None:
        _loop.run(self._sandbox.pause())

    def resume(self) -> None:
        _loop.run(self._sandbox.resume())

    def snapshot(self, name: str | None = None) -> str:
        return _loop.run(self._sandbox.snapshot(name))

    def fork(self, count: int = 1) -> list[SyncSandbox | Exception]:
        children = _loop.run(self._sandbox.fork(count))
        return [child if isinstance(child, Exception) else SyncSandbox(child) for child in children]

    def destroy(self) -> None:
        _loop.run(self._sandbox.destroy())
