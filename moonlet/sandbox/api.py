"""The seam: what a sandbox is to whoever uses it. `LocalSandbox` and `RemoteSandbox` are its two implementations.

    creating -> running -> pausing -> paused -> resuming -> running
                running -> snapshotting | forking -> running
                any -> killing -> (gone)          any -> failed(reason), still readable and always deletable

Paths are the guest's own: absolute, or relative to the working directory of the sandbox. Times are in seconds, sizes in
bytes. Every method raises `SandboxNotFoundError` once the sandbox is gone and `SandboxDiedError` if its machine died.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

GUEST_HOME = "/workspace"  # home and working directory of every sandbox, writable, private to it
TIMEOUT_EXIT_CODE = 124  # as coreutils' timeout
DEFAULT_OUTPUT_BYTES = 8 << 20


class State(StrEnum):
    """Where a sandbox stands; the arrows are drawn at the head of this file."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    FAILED = "failed"


class FailReason(StrEnum):
    """Why a machine is gone."""

    OOM = "oom"
    CRASH = "crash"
    BOOT_TIMEOUT = "boot_timeout"
    DISK_FULL = "disk_full"
    LOST = "lost"  # nothing of it was there after a restart


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. A backend enforces each one or says in its `Caps.notes` which it cannot."""

    memory_bytes: int = 512 << 20
    disk_bytes: int = 2 << 30
    processes: int = 256
    open_files: int = 4096
    cpus: float = 1.0
    output_bytes: int = DEFAULT_OUTPUT_BYTES  # kept per stream of one command; the rest is counted and dropped


@dataclass(frozen=True)
class SandboxSpec:
    """What to create. `allow_hosts` are names (`example.org`, `*.example.net`), each optionally with `:port`."""

    template: str = "host"
    backend: str = "auto"
    limits: Limits = Limits()
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    allow_hosts: tuple[str, ...] = ()
    ttl_s: float | None = 300.0  # None: lives until it is destroyed
    on_timeout: Literal["pause", "kill"] = "pause"
    idle_pause_s: float | None = None  # pause after so long without a call and without a running command


@dataclass(frozen=True)
class Caps:
    """What a backend really does on this machine, as a probe found it."""

    processes_survive_pause: bool  # also through a restart of the host
    frees_memory: bool  # a paused sandbox holds no RAM
    fork_processes: bool  # forks and snapshots carry running processes, else files only
    isolation: Literal["weak", "namespaces", "user-kernel", "vm", "remote"]
    network: bool  # the allow-list proxy works
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as lists show it. Times are Unix seconds."""

    id: str
    state: State
    backend: str
    template: str
    created_at: float
    expires_at: float | None
    limits: Limits
    caps: Caps
    metadata: Mapping[str, str]
    reason: FailReason | None = None
    allow_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExecResult:
    """What a command left. `exit_code` is 128 + signal if it was killed by one, 124 if it ran out of time.

    `num_stdout_bytes` counts what the command wrote; `stdout` holds the first `Limits.output_bytes` of it.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    num_stdout_bytes: int = 0
    num_stderr_bytes: int = 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode(errors="replace")

    @property
    def is_truncated(self) -> bool:
        return self.num_stdout_bytes > len(self.stdout) or self.num_stderr_bytes > len(self.stderr)


@dataclass(frozen=True)
class ProcessInfo:
    """A command that was started in the sandbox and not yet forgotten. `pid` is the guest's."""

    command_id: str
    pid: int
    argv: tuple[str, ...]
    is_running: bool
    exit_code: int | None
    tag: str = ""


@dataclass(frozen=True)
class FileInfo:
    """One directory entry. `path` is absolute; `mode` is the whole st_mode; symbolic links are not followed."""

    path: str
    kind: Literal["file", "dir", "symlink", "other"]
    size: int
    mode: int
    mtime: float
    owner: int = 0
    group: int = 0
    link_target: str = ""

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class FileEvent:
    """A change below a watched directory; `path` is relative to it."""

    path: str
    kind: Literal["create", "write", "remove", "rename", "chmod"]


@dataclass(frozen=True)
class Output:
    """A piece of what a running command wrote."""

    stream: Literal["stdout", "stderr"]
    data: bytes


class Process(ABC):
    """A command that runs in the sandbox. It goes on when this object, the client or the service is gone."""

    command_id: str
    pid: int

    @abstractmethod
    def output(self) -> AsyncIterator[Output]:
        """All output from the first byte on, ending when the command has ended."""

    @abstractmethod
    async def wait(self) -> ExecResult:
        """Wait for the end of the command and return all that it left."""

    @abstractmethod
    async def write_stdin(self, data: bytes, *, close: bool = False) -> None: ...

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Tell a command that has a terminal its new size."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the command and every descendant, those in other sessions too."""


class Sandbox(ABC):
    """A machine to work in. `async with Sandbox.create(...) as sandbox:` destroys it at the end."""

    id: str

    @staticmethod
    def create(spec: SandboxSpec | None = None, **options: Any) -> Any:
        """A new sandbox, as an awaitable and an async context manager.

        `options` are fields of `SandboxSpec`, or `url` and `api_key` of a service; without a url the sandbox lives in this
        process, or in the local service if one runs. Raises BackendUnavailableError, TemplateError, SandboxLimitError.
        """
        from moonlet.sandbox.opening import open_sandbox

        return open_sandbox(spec, **options)

    @staticmethod
    def attach(sandbox_id: str, **options: Any) -> Any:
        """An existing sandbox, resumed if it is paused; awaitable. `options` are `url`, `api_key` or `state_dir`."""
        from moonlet.sandbox.opening import attach_sandbox

        return attach_sandbox(sandbox_id, **options)

    # -- commands -----------------------------------------------------------------------------------------------------
    @abstractmethod
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run to the end; a str goes to `/bin/sh -c`. At the timeout the whole process tree is killed, output is kept."""

    @abstractmethod
    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        tag: str = "",
        pty: tuple[int, int] | None = None,
    ) -> Process:
        """Start in the background. Without `stdin` the command reads end-of-file at once; `pty` is (rows, columns)."""

    @abstractmethod
    async def processes(self) -> list[ProcessInfo]: ...

    @abstractmethod
    async def process(self, name: str | int) -> Process:
        """The process with this command id, guest pid or tag, after a reconnect."""

    # -- files --------------------------------------------------------------------------------------------------------
    @abstractmethod
    async def read_file(self, path: str) -> bytes: ...

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write all or nothing (temporary name, then rename); missing parent directories are made."""

    @abstractmethod
    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file of any size into the sandbox, streamed, all or nothing."""

    @abstractmethod
    async def download(self, path: str, target: Path) -> None:
        """Copy a file of any size out of the sandbox, streamed, all or nothing."""

    @abstractmethod
    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]: ...

    @abstractmethod
    async def stat(self, path: str) -> FileInfo:
        """Raises GuestFileError if there is no such path."""

    @abstractmethod
    async def make_dir(self, path: str) -> None: ...

    @abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory."""

    @abstractmethod
    async def rename(self, path: str, to: str) -> None: ...

    @abstractmethod
    def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]: ...

    # -- the machine --------------------------------------------------------------------------------------------------
    @abstractmethod
    async def info(self) -> SandboxInfo: ...

    @abstractmethod
    async def set_timeout(self, ttl_s: float | None) -> None: ...

    @abstractmethod
    async def pause(self) -> None:
        """Stop the machine; idempotent. Its memory is on disk afterwards if the backend's caps say so."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on where `pause` stopped; idempotent."""

    @abstractmethod
    async def snapshot(self, name: str | None = None) -> str:
        """Keep a copy of the machine as it is now; returns an id that `SandboxSpec.template` accepts."""

    @abstractmethod
    async def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        """Copies that go on from here, each on its own; an entry is the error of the child that failed."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove it; idempotent, in any state."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.destroy()
