"""What the manager of a state directory may do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moonlet.errors import ConfigError, nearest_name


def default_state_dir() -> Path:
    """$MOONLET_STATE_DIR, else `moonlet` below $XDG_STATE_HOME or ~/.local/state."""
    named = os.environ.get("MOONLET_STATE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moonlet"


@dataclass(frozen=True)
class ServiceConfig:
    """Times in seconds, sizes in bytes.

    `max_running` counts machines that run or change, `max_total` all sandboxes; `max_starting` machines start at once, the
    others wait in line. A sandbox is acted on `scoring_slack_s` after its time to live is over, so that a client which
    gave a rollout exactly its budget can still read the result. A pause waits `drain_s` for file transfers, then cuts them.
    `reserve_bytes` stay free on the disk whatever is saved.
    """

    state_dir: Path
    backend: str = "auto"
    max_running: int = 64
    max_total: int = 1000
    max_starting: int = 2 * (os.cpu_count() or 1)
    default_ttl_s: float = 300.0
    max_ttl_s: float | None = None
    scoring_slack_s: float = 30.0
    create_timeout_s: float = 60.0
    drain_s: float = 10.0
    reserve_bytes: int = 64 << 20
    template_cache_bytes: int = 20 << 30
    snapshot_url: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_dir", Path(self.state_dir).absolute())
        for name in ("max_running", "max_total", "max_starting", "default_ttl_s", "create_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)!r}")
        for name in ("scoring_slack_s", "drain_s", "reserve_bytes", "template_cache_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, it is {getattr(self, name)!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ServiceConfig:
        """From a file or the command line; `state_dir` may be left out. Raises ConfigError for an unknown key."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"there is no setting '{name}' of the sandbox service{nearest_name(name, known)}")
        return cls(**{"state_dir": default_state_dir(), **values})
