"""A template from Debian packages, put together by mmdebstrap from the archives that this host itself uses."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonlet.errors import StorageError, TemplateError
from moonlet.sandbox.template.layers import Layer, apply_layer, unpack_layer
from moonlet.sandbox.template.source import Made, Source, Workshop

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?")
_APT_FOLDER = Path("/etc/apt")
_OS_RELEASE = Path("/etc/os-release")
# What mmdebstrap says when it comes to a part of its work, and the share of it that is done then.
_STAGES = (
    ("running apt-get update", 0.05),
    ("downloading packages", 0.1),
    ("extracting archives", 0.3),
    ("installing essential", 0.45),
    ("installing remaining", 0.6),
    ("cleaning package lists", 0.85),
    ("creating tarball", 0.88),
)


@dataclass(frozen=True)
class DebianSource(Source):
    """`packages` beside the essential ones and apt; of the release that this host runs."""

    packages: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.packages:
            if not _PACKAGE.fullmatch(name):
                raise TemplateError(f"{name!r} cannot be the name of a Debian package")

    def __str__(self) -> str:
        return f"debian:{','.join(self.packages)}"

    def fill(self, workshop: Workshop) -> Made:
        release = read_release()
        mirrors = workshop.scratch / "mirrors.list"
        mirrors.write_text(read_mirrors(release))
        tar = workshop.scratch / "rootfs.tar"
        _run(_command(self.packages, release, mirrors, tar), workshop)
        workshop.tell("unpacking", 0.9)
        folder = workshop.scratch / "unpacked"
        folder.mkdir()
        with tar.open("rb") as stream:
            unpack_layer(stream, folder, workshop.tick)
        tar.unlink()
        apply_layer(Layer(folder), workshop.rootfs, workshop.tick)
        shutil.rmtree(folder)
        return Made()


def read_release() -> str:
    """The code name of the host's release. Raises TemplateError on a host that is not Debian's kind."""
    with contextlib.suppress(OSError):
        match = re.search(r"^VERSION_CODENAME=\"?([a-z]+)\"?$", _OS_RELEASE.read_text(), re.MULTILINE)
        if match and _APT_FOLDER.is_dir():
            return match[1]
    raise TemplateError(
        "this host is no Debian or Ubuntu: build the template from a directory (dir:) or an image (oci:)"
    )


def read_mirrors(release: str) -> str:
    """The lines of the host's own apt sources that belong to its release; archives of other vendors stay out."""
    lines = []
    for path in [_APT_FOLDER / "sources.list", *sorted((_APT_FOLDER / "sources.list.d").glob("*.list"))]:
        with contextlib.suppress(OSError):
            lines += [line for line in path.read_text().splitlines() if _is_own(line, release)]
    for path in sorted((_APT_FOLDER / "sources.list.d").glob("*.sources")):
        with contextlib.suppress(OSError):
            lines += _one_line_each(path.read_text(), release)
    if not lines:
        raise TemplateError(f"{_APT_FOLDER} has no source for {release}/main: apt-get must work on this host")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _is_own(line: str, release: str) -> bool:
    match = re.fullmatch(r"deb\s+(\[[^]]*\]\s+)?\S+\s+(\S+)\s+(.*)", line.strip())
    return bool(match and _is_suite(match[2], release) and "main" in match[3].split())


def _is_suite(suite: str, release: str) -> bool:
    return suite == release or suite.startswith((f"{release}-", f"{release}/"))


def _one_line_each(text: str, release: str) -> list[str]:
    """Paragraphs of a `.sources` file in the one-line form."""
    lines = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = _fields(paragraph)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        key = fields.get("signed-by", "")
        options = f"[signed-by={key}] " if key.startswith("/") and "\n" not in key else ""
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                line = f"deb {options}{uri} {suite} {fields.get('components', '')}"
                lines += [line] if _is_own(line, release) else []
    return lines


def _fields(paragraph: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1].isspace() and name:
            fields[name] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


def _command(packages: Iterable[str], release: str, mirrors: Path, tar: Path) -> list[str]:
    program = shutil.which("mmdebstrap")
    if program is None:
        raise TemplateError("templates of Debian packages need mmdebstrap: apt-get install mmdebstrap")
    mode = choose_mode()
    include = [f"--include={','.join(packages)}"] if packages else []
    return [
        *_fenced(mode),
        program,
        f"--mode={mode}",
        "--variant=apt",
        "--format=tar",
        *include,
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        '--aptopt=Acquire::Retries "3"',
        *_proxies(),
        release,
        str(tar),
        str(mirrors),
    ]


def _fenced(mode: str) -> list[str]:
    """Programs around mmdebstrap with which it ends when this process is killed, and takes all that it started along.

    As root it mounts into the tree: in namespaces of its own no kill can leave a mount of the host's /dev there.
    """
    fence = ["setpriv", "--pdeathsig", "KILL" if mode == "root" else "TERM"] if shutil.which("setpriv") else []
    if mode == "root":
        fence += ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return fence


def choose_mode() -> str:
    """How mmdebstrap can work with the privileges of this process. Raises TemplateError with what to install."""
    if os.geteuid() == 0:
        return "root"
    if shutil.which("newuidmap") and _has_subordinates(Path("/etc/subuid")) and _has_subordinates(Path("/etc/subgid")):
        return "unshare"
    if shutil.which("fakechroot") and shutil.which("fakeroot"):
        return "fakechroot"
    raise TemplateError(
        "building from Debian packages without root needs either newuidmap with entries in /etc/subuid and /etc/subgid "
        "(apt-get install uidmap), or fakechroot and fakeroot (apt-get install fakechroot fakeroot)"
    )


def _has_subordinates(path: Path) -> bool:
    with contextlib.suppress(OSError, KeyError):
        owners = {line.split(":")[0] for line in path.read_text().splitlines() if line.count(":") == 2}
        return bool(owners & {getpass.getuser(), str(os.getuid())})
    return False


def _proxies() -> list[str]:
    """The host's own proxy settings for apt."""
    dump = shutil.which("apt-config")
    if dump is None:
        return []
    told = subprocess.run([dump, "dump", "Acquire"], capture_output=True, text=True).stdout
    lines = [line.rstrip(";") for line in told.splitlines() if re.match(r'Acquire::https?::Proxy\S* ".+"', line)]
    return [f"--aptopt={line}" for line in lines]


def _run(command: list[str], workshop: Workshop) -> None:
    """mmdebstrap to its end, told line by line. Raises TemplateError with what it complained of."""
    environment = {**os.environ, "TMPDIR": str(workshop.scratch), "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    last: deque[str] = deque(maxlen=12)
    with _started(command, environment, workshop) as (process, lines):
        for line in lines:
            last.append(line)
            _tell(line, workshop)
        code = process.wait()
    workshop.tick()
    if code != 0:
        told = "\n".join(last)
        if "No space left on device" in told:
            raise StorageError(
                f"the disk is full: a template of Debian packages needs some hundred MiB below {workshop.scratch}"
            )
        raise TemplateError(f"mmdebstrap failed ({code}):\n{told}")


def _tell(line: str, workshop: Workshop) -> None:
    text = line.removeprefix("I: ").strip()
    if line.startswith("I: "):
        share = next((share for start, share in _STAGES if text.startswith(start)), None)
        workshop.tell(text.rstrip("."), share)


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str], workshop: Workshop
) -> Iterator[tuple[subprocess.Popen[str], Iterable[str]]]:
    """A process group that ends with the block, and also when the build is stopped while it says nothing."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    is_over = threading.Event()
    watcher = threading.Thread(target=_end_when_stopped, args=(process, workshop.stop, is_over.is_set), daemon=True)
    watcher.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            yield process, process.stdout
    finally:
        is_over.set()
        watcher.join()
        _end(process)


def _end_when_stopped(process: subprocess.Popen[str], stop: threading.Event, is_over: Callable[[], bool]) -> None:
    while not is_over() and process.poll() is None:
        if stop.wait(0.2):
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask first, so that it can take its mounts away."""
    for number, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience_s)
