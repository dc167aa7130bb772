"""Starts QEMU in a machine's folder, with its sockets listening before it runs: nobody has to wait for them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from dataclasses import astuple
from pathlib import Path

from moonlet.errors import SandboxDiedError
from moonlet.sandbox.microvm.qemu import Listeners, Qemu, Start, command, readable_by_us

QMP_SOCKET, AGENT_SOCKET, CONSOLE_SOCKET = "qmp.sock", "agent.sock", "console.sock"
LOG = "qemu.log"
MAX_SOCKET_PATH = 107  # bytes, of sun_path without its end
LAST_WORDS_BYTES = 2000


def spawn(qemu: Qemu, start: Start, folder: Path) -> subprocess.Popen[bytes]:
    """The process outlives this one: it has a session, files and sockets of its own. Raises OSError."""
    with contextlib.ExitStack() as opened:
        at = SocketFolder(folder)
        opened.callback(at.close)
        names = (QMP_SOCKET, AGENT_SOCKET, CONSOLE_SOCKET)
        listeners = Listeners(*(opened.enter_context(_listening(at.path(name))).fileno() for name in names))
        log = opened.enter_context((folder / LOG).open("ab"))
        return subprocess.Popen(
            readable_by_us(command(qemu, start, listeners)),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=astuple(listeners),
            start_new_session=True,
        )


class SocketFolder:
    """Paths of sockets in a folder that fit into a socket address, however deep the folder lies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None

    def path(self, name: str) -> Path:
        path = self._folder / name
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        if self._fd is None:
            self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return Path(f"/proc/self/fd/{self._fd}/{name}")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def log_end(folder: Path) -> str:
    """The end of what QEMU has printed."""
    with contextlib.suppress(OSError):
        return (folder / LOG).read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
    return ""


def _listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise SandboxDiedError(f"the socket {path} cannot be made: {error.strerror}") from error
    return listener
