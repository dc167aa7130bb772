"""What a kind of machine must do for the manager. A backend makes machines; a machine is one that lives now.

Folders: `folder` is where the live machine keeps what `attach` needs after a restart of the service (fifos, sockets, pid
files, disks); it is empty at `launch` and `restore`, and the manager removes it after `destroy`. `image` is a folder that
holds a saved machine; once written it is read-only and may be restored many times, also at once. It depends on
nothing but the template: it is renamed after it was written, and the image that its machine came from may be gone.

Identity: every process that a backend starts can be recognised after a crash by (pid, start time) from a file in `folder`,
and by `spec.label` and `spec.id` in its command line or cgroup path; never by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from moonlet.sandbox.api import Caps, FailReason, Limits
from moonlet.sandbox.guest.stream import Endpoint

Progress = Callable[[str, float | None], None]  # what is being done, and the share of it that is done if known


@dataclass(frozen=True)
class Template:
    """The files that a machine starts from. `rootfs` None means the host's own system, read-only."""

    id: str  # content hash; "host" for the host's system
    rootfs: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MachineSpec:
    """One machine. `label` marks all that belongs to one state directory."""

    id: str
    label: str
    template: Template
    limits: Limits
    hostname: str


@dataclass(frozen=True)
class Probe:
    """The answer of a real try: `caps` if it works here, else why not and what would help."""

    backend: str
    caps: Caps | None
    reason: str
    version: str = ""  # of the program that runs the machine: a saved image is restored by the same one only


@dataclass(frozen=True)
class Usage:
    """What a machine uses now. `memory_bytes` is proportional set size on the host, 0 for a machine that is not there."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    processes: int = 0


class Machine(ABC):
    """A live machine."""

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """Where the guest agent's byte stream is."""

    @abstractmethod
    async def freeze(self) -> None:
        """Stop all of it in RAM; idempotent."""

    @abstractmethod
    async def thaw(self) -> None:
        """Go on after `freeze`; idempotent."""

    @abstractmethod
    async def save(self, image: Path, *, is_final: bool) -> None:
        """Write a consistent image into the empty folder `image`.

        With `is_final` the machine is about to be destroyed: it may stay frozen, and files may be hard links of live ones.
        Otherwise it is as before afterwards. On an error (StorageError for a full disk) the machine goes on as before and
        what is in `image` means nothing.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Kill it and release all that it holds outside its folder (processes, mounts, cgroups); idempotent."""

    @abstractmethod
    async def wait_dead(self) -> FailReason:
        """Return when the machine has died on its own (within 1 s of it), with the reason."""

    @abstractmethod
    def usage(self) -> Usage: ...


class Backend(ABC):
    """Makes machines of one kind."""

    name: ClassVar[str]
    strength: ClassVar[int]  # `auto` takes the strongest whose probe passes

    @abstractmethod
    async def probe(self) -> Probe:
        """Really start something; never judge by a file that exists. The answer may be remembered for this process."""

    @abstractmethod
    async def prepare(self, template: Template, limits: Limits, progress: Progress) -> None:
        """Make what `launch` needs of a template (images, a booted snapshot); quick if it is there, safe if two do it."""

    @abstractmethod
    async def launch(self, spec: MachineSpec, folder: Path) -> Machine:
        """Start from the template. On an error nothing is left. Raises SandboxTimeoutError, BackendUnavailableError."""

    @abstractmethod
    async def restore(self, spec: MachineSpec, folder: Path, image: Path) -> Machine:
        """Start from a saved image, which stays as it is. Raises SandboxStateError if another version wrote it."""

    @abstractmethod
    async def attach(self, spec: MachineSpec, folder: Path) -> Machine:
        """Find the machine that lives in `folder` after a restart of the service. Raises SandboxDiedError if it is gone."""

    @abstractmethod
    async def sweep(self, label: str, keep: set[str]) -> list[str]:
        """Kill and release all that bears `label` and is not of a sandbox in `keep`; returns what was found, in words."""
