"""The OCI bundle of a machine: `config.json`, two named pipes, and the files that only the agent needs.

The guest's root is a read-only lower layer under an upper one in memory, which a checkpoint carries. `/workspace` and
`/tmp` are file systems in memory with a size, so that a guest which fills its disk gets an error and not the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.sandbox.api import GUEST_HOME
from moonlet.sandbox.backend import MachineSpec
from moonlet.sandbox.gvisor.cgroup import cgroups_path
from moonlet.sandbox.gvisor.host_root import GUEST_FOLDER, find_host_root
from moonlet.sandbox.hostview import host_dirs

# Sentry, gofer and page tables: what a machine takes of the host beside what its guest was promised.
SENTRY_BYTES = 96 << 20
FILES_SHARE = 0.75  # of the memory, for files: they live there too

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# All that package managers and servers ask for; each one counts in the Sentry only, never on the host.
_COMMAND_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
)
# The agent gives clones their host name. Its commands must not have this one: it lifts the limit on processes.
_AGENT_CAPABILITIES = (*_COMMAND_CAPABILITIES, "CAP_SYS_ADMIN")


@dataclass(frozen=True)
class Bundle:
    """Where the parts of a live machine are; all below `folder`."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def rootfs(self) -> Path:
        """A link to the lower layer of the guest's root."""
        return self.folder / "rootfs"

    @property
    def to_guest(self) -> Path:
        return self.folder / "to_guest"

    @property
    def from_guest(self) -> Path:
        return self.folder / "from_guest"

    @property
    def guest_folder(self) -> Path:
        return self.folder / "guest"

    @property
    def states(self) -> Path:
        return self.folder / "runsc"

    def state(self, container: str) -> Path:
        """Where runsc keeps what it knows of a container; by this path all its processes can be told."""
        return self.states / container

    @property
    def log(self) -> Path:
        return self.folder / "runsc.log"

    @property
    def saved(self) -> Path:
        """A whole checkpoint that has not found its way into an image yet."""
        return self.folder / "saved"


def write_bundle(bundle: Bundle, spec: MachineSpec, guest_files: Mapping[str, Path], root_name: str = "") -> None:
    """Make everything but `config.json` in the empty folder; `guest_files` has the agent. Blocking.

    `root_name` is the host's root that a saved machine had.
    """
    bundle.states.mkdir()
    bundle.guest_folder.mkdir(mode=0o755)
    for name, file in guest_files.items():
        link_or_copy(file, bundle.guest_folder / name)
    for fifo in (bundle.to_guest, bundle.from_guest):
        os.mkfifo(fifo, 0o600)
    bundle.rootfs.symlink_to(spec.template.rootfs or find_host_root(root_name))


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file systems allow one, else a copy with the same times."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_config(bundle: Bundle, spec: MachineSpec, container: str, *, preload: bool) -> None:
    """Write `config.json` for one life of the machine. `preload` wraps `statx` in every program of the guest."""
    config = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": _agent_command(spec),
            "cwd": "/",
            "env": _environment(spec),
            "capabilities": {
                "bounding": _COMMAND_CAPABILITIES,
                "effective": _AGENT_CAPABILITIES,
                "permitted": _AGENT_CAPABILITIES,
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 65536, "soft": 1024}],
            "noNewPrivileges": False,
        },
        "root": {"path": str(bundle.rootfs.resolve()), "readonly": False},
        "hostname": spec.hostname,
        "mounts": _mounts(bundle, spec, preload=preload),
        "linux": {
            "cgroupsPath": cgroups_path(spec.label, container),
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "resources": _resources(spec),
        },
    }
    bundle.config.write_text(json.dumps(config))


def _agent_command(spec: MachineSpec) -> list[str]:
    limits = spec.limits
    return [
        f"{GUEST_FOLDER}/agent",
        *("--processes", str(limits.processes)),
        *("--file-bytes", str(limits.disk_bytes)),
        *("--open-files", str(limits.open_files)),
        *("--home", GUEST_HOME),
    ]


def _environment(spec: MachineSpec) -> list[str]:
    merged = {"PATH": _PATH, "HOME": GUEST_HOME, "LANG": "C.UTF-8", **spec.template.env}
    return [f"{name}={value}" for name, value in merged.items()]


def _mounts(bundle: Bundle, spec: MachineSpec, *, preload: bool) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        _memory_mount("/dev/shm", spec, mode="1777"),
        _memory_mount("/tmp", spec, mode="1777"),
        _bind(bundle.guest_folder, GUEST_FOLDER),
    ]
    if spec.template.rootfs is None:
        mounts += [_bind(host.path, host.path) for host in host_dirs() if not host.link_target]
    if not any((bundle.rootfs / GUEST_HOME[1:]).glob("*")):
        mounts.append(_memory_mount(GUEST_HOME, spec, mode="755"))
    if preload and (bundle.rootfs / "etc/ld.so.preload").is_file():
        mounts.append(_bind(bundle.guest_folder / "ld.so.preload", "/etc/ld.so.preload"))
    return mounts


def _bind(source: Path | str, destination: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "ro"]}


def _memory_mount(destination: str, spec: MachineSpec, *, mode: str) -> dict[str, Any]:
    size = min(spec.limits.disk_bytes, int(spec.limits.memory_bytes * FILES_SHARE))
    return {
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [f"size={size}", f"mode={mode}", "nosuid", "nodev"],
    }


def _resources(spec: MachineSpec) -> dict[str, Any]:
    """No limit on the number of processes here: it would count the Sentry's own threads, and end the machine."""
    period_us = 100_000
    return {
        "memory": {"limit": spec.limits.memory_bytes + SENTRY_BYTES},
        "cpu": {"period": period_us, "quota": max(1000, int(spec.limits.cpus * period_us))},
    }
