"""What a service with the API of E2B is sent and answers, to and from the types of the seam."""

from __future__ import annotations

import base64
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from moonlet.sandbox.api import Caps, FileInfo, Limits, ProcessInfo, SandboxInfo, SandboxSpec, State
from moonlet.sandbox.server.schema import OPTION_PREFIX, info_of, option_metadata

# What every service with this API is known to do. What isolates its machines from each other it does not say.
FOREIGN_CAPS = Caps(
    processes_survive_pause=True,
    frees_memory=True,
    fork_processes=True,
    isolation="remote",
    network=True,
    notes=("as the service's documentation says; not probed",),
)
LONGEST_TTL_S = 24 * 3600  # asked for in place of "for ever", which other services do not know
_KINDS = {"FILE_TYPE_FILE": "file", "FILE_TYPE_DIRECTORY": "dir", "FILE_TYPE_SYMLINK": "symlink"}
_KIND_BITS = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK, "other": 0}


def create_body(spec: SandboxSpec) -> dict[str, Any]:
    """`secure` is for the older path: only with it a sandbox has a token."""
    body: dict[str, Any] = {
        "templateID": spec.template,
        "timeout": whole_seconds(spec.ttl_s),
        "metadata": {**spec.metadata, **option_metadata(spec)},
        "envVars": dict(spec.env),
        "autoPause": spec.on_timeout == "pause",
        "secure": True,
        "allow_internet_access": bool(spec.allow_hosts),
    }
    if spec.allow_hosts:
        body["network"] = {"allowOut": list(spec.allow_hosts), "denyOut": ["0.0.0.0/0"]}
    return body


def connect_body(is_ours: bool, ttl_s: float | None) -> dict[str, Any]:
    """Other services need a time to live; ours keeps the one that it was given."""
    return {} if is_ours and ttl_s is None else {"timeout": whole_seconds(ttl_s)}


def lifetime_s(detail: Mapping[str, Any]) -> float | None:
    """What a sandbox was given to live, as far as the service says."""
    start, end = _seconds(detail.get("startedAt")), _seconds(detail.get("endAt"))
    return min(max(end - start, 60.0), LONGEST_TTL_S) if end else 300.0


def whole_seconds(ttl_s: float | None) -> int:
    return LONGEST_TTL_S if ttl_s is None else max(1, math.ceil(ttl_s))


def info_from_detail(body: Mapping[str, Any]) -> SandboxInfo:
    """From what a service says of a sandbox; one of another service has the capabilities that are known of them."""
    if isinstance(extension := body.get("moonlet"), Mapping):
        return without_options(info_of(extension))
    state = str(body.get("state", "running"))
    mib = 1 << 20
    return SandboxInfo(
        id=str(body["sandboxID"]),
        state=State.PAUSED if state == "paused" else State.RUNNING,
        backend="remote",
        template=str(body.get("alias") or body.get("templateID", "")),
        created_at=_seconds(body.get("startedAt")),
        expires_at=_seconds(body.get("endAt")) or None,
        limits=Limits(
            memory_bytes=int(body.get("memoryMB", 0)) * mib,
            disk_bytes=int(body.get("diskSizeMB", 0)) * mib,
            cpus=float(body.get("cpuCount", 1)),
        ),
        caps=FOREIGN_CAPS,
        metadata={
            key: value for key, value in (body.get("metadata") or {}).items() if not key.startswith(OPTION_PREFIX)
        },
    )


def without_options(info: SandboxInfo) -> SandboxInfo:
    """Metadata as the user gave it, without the entries that carried options."""
    kept = {key: value for key, value in info.metadata.items() if not key.startswith(OPTION_PREFIX)}
    return replace(info, metadata=kept)


def file_info(entry: Mapping[str, Any]) -> FileInfo:
    kind = _KINDS.get(str(entry.get("type")), "other")
    if entry.get("isSymlink"):
        kind = "symlink"
    mode = int(entry.get("fullMode") or entry.get("mode") or 0)
    raw = entry.get("rawPath")
    return FileInfo(
        path=os.fsdecode(base64.b64decode(raw)) if raw else str(entry.get("path", "")),
        kind=kind,  # type: ignore[arg-type]
        size=int(entry.get("size") or 0),
        mode=mode | (0 if entry.get("fullMode") else _KIND_BITS[kind]),
        mtime=_seconds(entry.get("modifiedTime")),
        owner=_account(entry.get("owner")),
        group=_account(entry.get("group")),
        link_target=str(entry.get("symlinkTarget") or ""),
    )


def _account(name: object) -> int:
    """-1 for an account that the service knows by a name only."""
    return 0 if name == "root" else int(name) if isinstance(name, str) and name.isdecimal() else -1


def _seconds(text: object) -> float:
    if not isinstance(text, str):
        return 0.0
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def process_info(body: Mapping[str, Any]) -> ProcessInfo:
    config, pid = body.get("config") or {}, int(body.get("pid", 0))
    return ProcessInfo(
        command_id=str((body.get("moonlet") or {}).get("command_id") or pid),
        pid=pid,
        argv=(str(config.get("cmd", "")), *map(str, config.get("args") or ())),
        is_running=True,
        exit_code=None,
        tag=str(body.get("tag") or ""),
    )


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
