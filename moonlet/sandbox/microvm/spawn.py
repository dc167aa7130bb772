"""Starts QEMU in a machine's folder, with both of its sockets listening before it runs: nobody has to wait for them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

from moonlet.errors import SandboxDiedError
from moonlet.sandbox.microvm.qemu import Qemu, Start, command, readable_by_us

QMP_SOCKET, AGENT_SOCKET, LOG = "qmp.sock", "agent.sock", "qemu.log"
MAX_SOCKET_PATH = 107  # bytes, of sun_path without its end
LAST_WORDS_BYTES = 2000


def spawn(qemu: Qemu, start: Start, folder: Path) -> subprocess.Popen[bytes]:
    """The process outlives this one: it has a session, files and sockets of its own. Raises OSError."""
    with contextlib.ExitStack() as opened:
        at = SocketFolder(folder)
        opened.callback(at.close)
        qmp, agent = (opened.enter_context(_listening(at.path(name))) for name in (QMP_SOCKET, AGENT_SOCKET))
        log = opened.enter_context((folder / LOG).open("ab"))
        return subprocess.Popen(
            readable_by_us(command(qemu, start, qmp.fileno(), agent.fileno())),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(qmp.fileno(), agent.fileno()),
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


def last_words(folder: Path) -> str:
    """The end of what QEMU and the guest's kernel have printed."""
    parts = []
    for name in (LOG, "console.log"):
        with contextlib.suppress(OSError):
            text = (folder / name).read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
            parts += [f"{name}: {text}"] if text else []
    return "; ".join(parts) or "it has printed nothing"


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
