"""What the service may do and where it listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ENVD_PORT = 49983  # the port under which E2B's clients ask for the files and processes of a sandbox

# Clients choose how to talk by this number: from 0.5.7 on they upload octet streams, from 0.6.2 on they would keep
# metadata in extended attributes, which our guest agent does not.
ENVD_VERSION = "0.6.1"


@dataclass(frozen=True)
class Bounds:
    """What one client may ask for. Sizes in bytes."""

    json_bytes: int = 1 << 20  # a body of the control API
    message_bytes: int = 8 << 20  # one message of the processes and files API; files themselves have no bound
    metadata_entries: int = 128
    env_entries: int = 1024
    mapping_chars: int = 128 << 10  # of all names and values together, of metadata and of variables
    fork_count: int = 64
    page: int = 100
    streams: int = 256  # open at once per sandbox
    watchers: int = 64  # per sandbox
    watcher_events: int = 10_000  # kept per watcher between two polls
    entries: int = 100_000  # of one listing
    upload_parts: int = 10_000  # files in one upload


@dataclass(frozen=True)
class ServerConfig:
    """`host` and `port` (0: a free one) to listen on; `domain` if `<port>-<id>.<domain>` names resolve to this service.

    `templates` maps names that clients use to ours: E2B's SDK asks for "base" when nothing is asked for.
    """

    host: str = "127.0.0.1"
    port: int = 8490
    domain: str | None = None
    templates: dict[str, str] = field(default_factory=lambda: {"base": "host"})
    keepalive_s: float = 30.0
    audit_bytes: int = 64 << 20  # size at which the audit log is rotated
    audit_files: int = 4  # rotated files kept
    grace_s: float = 5.0  # time that open requests have to end at shutdown
    bounds: Bounds = field(default_factory=Bounds)
    service: Any = None  # the manager's ServiceConfig, for `serve`
