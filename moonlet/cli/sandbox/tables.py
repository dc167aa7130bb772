"""What the commands print: sandboxes, snapshots, templates and probes as tables; sizes and times as people write them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moonlet.errors import ConfigError

if TYPE_CHECKING:
    from moonlet.sandbox.api import SandboxInfo
    from moonlet.sandbox.backend import Probe

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_STATE_STYLES = {"running": "green", "failed": "red", "paused": "yellow"}
_WIDE = 10_000  # columns where no terminal limits them: a pipe gets whole lines


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """A table on standard output, or the sentence `empty` on standard error."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    if not rows:
        print(empty, file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STATE_STYLES.get(cell, "")) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def show_sandboxes(infos: Iterable[SandboxInfo]) -> None:
    now = time.time()
    show_table(
        ("id", "state", "backend", "template", "age", "time left", "memory", "metadata"),
        (
            (
                info.id,
                info.state if info.reason is None else f"{info.state} ({info.reason})",
                info.backend,
                info.template,
                duration(now - info.created_at),
                time_left(info, now),
                size(info.limits.memory_bytes),
                " ".join(f"{key}={value}" for key, value in info.metadata.items()),
            )
            for info in infos
        ),
        empty="no sandboxes; `moonlet sandbox start` makes one",
    )


def time_left(info: SandboxInfo, now: float) -> str:
    if info.state != "running":
        return "-"
    return "no limit" if info.expires_at is None else duration(max(0.0, info.expires_at - now))


def show_probes(probes: Iterable[Probe]) -> None:
    """What each backend can do here, or why it cannot."""
    probes = list(probes)
    columns = ("backend", "works", "isolation", "pause on disk", "frees memory", "forks processes", "network")
    show_table(columns, map(_probe_row, probes), empty="there are no backends")
    for probe in probes:
        print(f"\n{probe.backend} {probe.version}".rstrip())
        for note in probe.caps.notes if probe.caps else (probe.reason,):
            print(f"  {' '.join(note.split())}")


def _probe_row(probe: Probe) -> Sequence[str]:
    caps = probe.caps
    if caps is None:
        return (probe.backend, "no", *["-"] * 5)
    flags = (caps.processes_survive_pause, caps.frees_memory, caps.fork_processes, caps.network)
    return (probe.backend, "yes", caps.isolation, *("yes" if flag else "no" for flag in flags))


def duration(seconds: float) -> str:
    """Two units at most: 5s, 3m20s, 4h10m, 2d3h."""
    whole = int(seconds)
    for unit, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit}{name}" + (f"{rest}{below_name}" if rest else "")
    return f"{whole}s"


def size(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.4g} {unit}"
    return f"{num_bytes} B"


def parse_size(text: str) -> int:
    """`512M`, `2g`, `1.5GiB` or a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"'{text}' is no size: write 512M, 2G or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_pairs(texts: Iterable[str], what: str) -> dict[str, str]:
    """NAME=VALUE of each. Raises ConfigError."""
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"'{text}' is no {what}: write NAME=VALUE")
        pairs[name] = value
    return pairs
