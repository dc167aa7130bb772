"""The program `runsc`: which one, what it can do, and how it is called.

`runsc exec` is never used: a process that it started makes every later checkpoint one that cannot be restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import BackendUnavailableError, SandboxTimeoutError

INSTALL_HINT = (
    "install gVisor: apt-get install runsc; for use without root one of 2024 or newer (-t bookworm-backports)"
)


@dataclass(frozen=True)
class Runsc:
    """A found program. `is_user` runs it in a user namespace of its own, without control groups."""

    program: str
    version: str
    platform: str
    is_user: bool = False
    has_cgroups: bool = True
    can_skip_compression: bool = False

    def command(self, state: Path, *args: str, log: Path | None = None) -> list[str]:
        """The whole command line; `state` is the folder where runsc keeps what it knows of its containers."""
        prefix = ["unshare", "--user", "--mount", "--map-root-user"] if self.is_user else []
        flags = [
            f"--root={state}",
            f"--platform={self.platform}",
            "--network=none",
            "--overlay2=root:memory",
            "--file-access-mounts=exclusive",
        ]
        if not self.has_cgroups:
            flags.append("--ignore-cgroups")
        if log is not None:
            flags.append(f"--log={log}")
        return [*prefix, self.program, *flags, *args]


def find_runsc(program: str = "runsc") -> Runsc:
    """Look the program up and read its flags (blocking, some 50 ms). Raises BackendUnavailableError."""
    path = shutil.which(program)
    if path is None:
        raise BackendUnavailableError(f"there is no program '{program}'; {INSTALL_HINT}")
    is_user = os.geteuid() != 0
    if is_user and shutil.which("unshare") is None:
        raise BackendUnavailableError("gVisor without root needs the program unshare: apt-get install util-linux")
    version = _output(path, "--version")
    flags = _output(path, "flags")
    if "-overlay2" not in flags:
        raise BackendUnavailableError(f"runsc {version} is too old (it has no --overlay2); {INSTALL_HINT}")
    return Runsc(
        program=path,
        version=_parse_version(version),
        platform="systrap" if "systrap" in flags else "ptrace",
        is_user=is_user,
        has_cgroups=not is_user,
        can_skip_compression="-compression" in _output(path, "checkpoint", "-h"),
    )


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"{argv[0]} does not answer ({error}); {INSTALL_HINT}") from error
    return done.stdout + done.stderr


def _parse_version(text: str) -> str:
    match = re.search(r"version (\S+)", text)
    return match[1] if match else text.strip()[:80] or "unknown"


@dataclass(frozen=True)
class Done:
    """What a call of runsc left: `message` is its last complaint."""

    code: int
    message: str


async def call(argv: list[str], *, timeout_s: float, stdin: int | None = None, stdout: int | None = None) -> Done:
    """Run to the end; what it starts detached lives on. Raises SandboxTimeoutError after killing it.

    With `stdin` and `stdout` (given to the guest) what it says is in its log, since the guest inherits its descriptors.
    """
    quiet = asyncio.subprocess.DEVNULL
    is_guest = stdin is not None
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=stdin if is_guest else quiet,
        stdout=stdout if is_guest else quiet,
        stderr=quiet if is_guest else asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal of the service is not for the machines
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, errors = await process.communicate()
    except TimeoutError as error:
        raise SandboxTimeoutError(f"runsc {_verb(argv)} did not end within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Done(process.returncode or 0, _last_words(errors or b""))


def _verb(argv: list[str]) -> str:
    program = next((at for at, word in enumerate(argv) if Path(word).name.startswith("runsc")), -1)
    return next((word for word in argv[program + 1 :] if not word.startswith("-")), "?")


def _last_words(data: bytes) -> str:
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-500:] if lines else ""


def read_log(log: Path) -> str:
    """The last complaints in the log of a call."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    told = []
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["level"] in ("error", "fatal"):
                told.append(str(entry["msg"]))
        except (ValueError, KeyError, TypeError):
            if re.match(r"[EF]\d{4} ", line) or "FATAL" in line:
                told.append(line.split("] ", 1)[-1])
    return "; ".join(told[-2:])[-600:]
