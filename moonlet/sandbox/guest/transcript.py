"""What a command has written and how it ended, put together from polls; it survives a cut stream, a pause and a restart."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonlet.errors import SandboxError
from moonlet.sandbox.api import DEFAULT_OUTPUT_BYTES, TIMEOUT_EXIT_CODE, ExecResult, Output
from moonlet.sandbox.guest.stream import Reply

MAX_OUTPUT_BYTES = 256 << 20  # what an agent keeps at most per stream; more of it is a lie


def new_command_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Launch:
    """A command to start. Without `stdin` it reads end-of-file at once; `pty` is (rows, columns)."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    stdin: bool = False
    timeout_s: float | None = None
    output_bytes: int = DEFAULT_OUTPUT_BYTES
    tag: str = ""
    pty: tuple[int, int] | None = None
    command_id: str = field(default_factory=new_command_id)

    @classmethod
    def of(cls, command: str | Sequence[str], **options: Any) -> Launch:
        """A str goes to `/bin/sh -c`; options that are None keep their defaults."""
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        return cls(argv, **{name: value for name, value in options.items() if value is not None})

    def request(self) -> dict[str, Any]:
        """The fields of the agent's `start`."""
        fields: dict[str, Any] = {
            "command": self.command_id,
            "argv": list(self.argv),
            "stdin": self.stdin,
            "output_bytes": self.output_bytes,
        }
        if self.env:
            fields["env"] = dict(self.env)
        if self.cwd is not None:
            fields["cwd"] = self.cwd
        if self.timeout_s is not None:
            fields["timeout_s"] = max(self.timeout_s, 0.001)
        if self.tag:
            fields["tag"] = self.tag
        if self.pty is not None:
            fields["pty"] = {"rows": self.pty[0], "columns": self.pty[1]}
        return fields


@dataclass(frozen=True)
class Poll:
    """One look at a command. `kept` and `total` are bytes of (stdout, stderr) that can be read and that were written."""

    is_running: bool
    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    kept: tuple[int, int]
    total: tuple[int, int]

    @classmethod
    def of(cls, reply: Reply) -> Poll:
        """Raises SandboxError for an answer that cannot be one."""
        split = reply.number("stdout_bytes")
        if split < 0 or split + reply.number("stderr_bytes") != len(reply.body):
            raise SandboxError("the guest agent's answer contradicts itself: it is broken")
        return cls(
            is_running=reply.flag("running"),
            exit_code=exit_code(reply.fields),
            timed_out=reply.flag("timed_out"),
            stdout=reply.body[:split],
            stderr=reply.body[split:],
            kept=(reply.number("stdout_kept"), reply.number("stderr_kept")),
            total=(reply.number("stdout_total"), reply.number("stderr_total")),
        )


def exit_code(fields: Mapping[str, Any]) -> int | None:
    """None while it runs, 128 + signal if one killed it, 124 if it ran out of time."""
    code, signal = fields.get("exit_code"), fields.get("signal")
    if fields.get("running") is True:
        return None
    if fields.get("timed_out") is True:
        return TIMEOUT_EXIT_CODE
    if isinstance(code, int):
        return code
    return 128 + signal if isinstance(signal, int) else 255


class Transcript:
    """All output so far, and where to go on reading. More than `max_bytes` of a stream is not believed."""

    def __init__(self, max_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: tuple[list[bytes], list[bytes]] = ([], [])
        self._last: Poll | None = None
        self.offsets = (0, 0)

    def add(self, poll: Poll) -> list[Output]:
        """Takes the answer to a poll from `offsets`; returns what is new."""
        new = (poll.stdout, poll.stderr)
        for parts, data in zip(self._parts, new, strict=True):
            if data:
                parts.append(data)
        self.offsets = (self.offsets[0] + len(new[0]), self.offsets[1] + len(new[1]))
        if max(self.offsets) > self._max_bytes:
            raise SandboxError(f"the guest agent sends more output than it can have kept ({self._max_bytes} bytes)")
        self._last = poll
        outputs = (Output("stdout", new[0]), Output("stderr", new[1]))
        return [output for output in outputs if output.data]

    @property
    def is_complete(self) -> bool:
        """The command has ended and all that was kept of its output is here."""
        last = self._last
        return (
            last is not None
            and not last.is_running
            and all(at >= kept for at, kept in zip(self.offsets, last.kept, strict=True))
        )

    def result(self) -> ExecResult:
        """What the command left; only once it is complete."""
        assert self._last is not None and self._last.exit_code is not None
        return ExecResult(
            exit_code=self._last.exit_code,
            stdout=b"".join(self._parts[0]),
            stderr=b"".join(self._parts[1]),
            timed_out=self._last.timed_out,
            num_stdout_bytes=self._last.total[0],
            num_stderr_bytes=self._last.total[1],
        )
