"""Commands of a sandbox at this terminal: output as it comes, standard input, and a shell in a terminal of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from moonlet.errors import GuestFileError, SandboxError

if TYPE_CHECKING:
    from moonlet.sandbox.api import Process, Sandbox

_PIECE_BYTES = 64 << 10
_BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE


async def run_streaming(
    sandbox: Sandbox,
    command: str | Sequence[str],
    *,
    timeout_s: float | None,
    env: dict[str, str],
    cwd: str | None,
    takes_input: bool,
) -> int:
    """Run a command, its output as it comes, and return its exit code. Whoever interrupts it ends the command too."""
    process = await sandbox.start(command, timeout_s=timeout_s, env=env, cwd=cwd, stdin=takes_input)
    feeder = asyncio.create_task(_feed(process)) if takes_input else None
    is_over = False
    try:
        async for piece in process.output():
            write_all(1 if piece.stream == "stdout" else 2, piece.data)
        is_over = True
    except BrokenPipeError:
        # Whoever read our output has left, as in `| head`. Python would complain again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE_EXIT_CODE
    finally:
        if feeder:
            feeder.cancel()
        if not is_over:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(process.kill())
    result = await process.wait()
    if result.is_truncated:
        print("(the output was longer than this sandbox keeps of a command; the rest is lost)", file=sys.stderr)
    if result.timed_out:
        print("(out of time: the command and all that it started were killed)", file=sys.stderr)
    return result.exit_code


async def interact(sandbox: Sandbox, command: str | Sequence[str]) -> int:
    """A command in a terminal of the sandbox, which this one shows: keys, size and colours go through."""
    columns, rows = _terminal_size()
    term = os.environ.get("TERM", "xterm-256color")
    process = await sandbox.start(command, env={"TERM": term}, stdin=True, pty=(rows, columns))
    resizes: set[asyncio.Task[None]] = set()

    def resize() -> None:
        columns, rows = _terminal_size()
        task = asyncio.ensure_future(process.resize(rows, columns))
        resizes.add(task)
        task.add_done_callback(resizes.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, resize)
    feeder = asyncio.create_task(_feed(process))
    is_over = False
    try:
        with _raw_terminal():
            async for piece in process.output():
                write_all(1, piece.data)
        is_over = True
    finally:
        feeder.cancel()
        loop.remove_signal_handler(signal.SIGWINCH)
        if not is_over:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(process.kill())
    return (await process.wait()).exit_code


def write_all(descriptor: int, data: bytes) -> None:
    """All bytes as they are, whatever encoding the terminal has."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            with contextlib.suppress(InterruptedError):
                select_writable(descriptor)


def select_writable(descriptor: int) -> None:
    import select

    select.select([], [descriptor], [])


async def _feed(process: Process) -> None:
    """Standard input to the command until either ends."""
    with contextlib.suppress(GuestFileError):  # the command reads no more, as in a pipeline
        async for data in _standard_input():
            await process.write_stdin(data)
        await process.write_stdin(b"", close=True)


async def _standard_input() -> AsyncIterator[bytes]:
    """Pieces of standard input. They are read by a daemon thread, since a read of a terminal cannot be cancelled."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the loop has ended, or there is no standard input
            while True:
                data = os.read(0, _PIECE_BYTES)
                asyncio.run_coroutine_threadsafe(pieces.put(data), loop).result()
                if not data:
                    return

    threading.Thread(target=read, daemon=True).start()
    while data := await pieces.get():
        yield data


def _terminal_size() -> tuple[int, int]:
    """Of the terminal itself: $COLUMNS may be of another one."""
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(1)
        if columns and rows:
            return columns, rows
    return 80, 24


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too; the terminal is as before afterwards."""
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
