"""What a pool may do, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.errors import ConfigError


@dataclass(frozen=True)
class PoolConfig:
    """Limits and patience of a pool. Times are in seconds.

    `max_running` machines run at once, `max_alive` exist, paused ones and spares among them. `warm` spares are kept of
    each kind of machine that was announced or leased more than once, while there is room, until nobody has asked for the
    kind for `spare_idle_s`. An idle machine keeps running for `idle_grace_s`, and longer while nobody waits.

    A machine that fails for reasons of infrastructure is made anew, `max_attempts` times in all; over the pool's life at
    most the share `retry_share` of the leases may be such repetitions, so that a broken host is noticed.

    Machines end `orphan_ttl_s` after a pool that was killed. Paused ones do not end on their own in a service: they carry
    the metadata `moonlet-pool` with the `name` of the pool, by which `moonlet sandbox rm --metadata` finds them.
    """

    max_running: int = 8
    max_alive: int = 64
    warm: int = 1
    idle_grace_s: float = 0.5
    spare_idle_s: float = 300.0
    orphan_ttl_s: float = 180.0
    max_attempts: int = 3
    retry_share: float = 0.2
    name: str = "pool"

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_alive:
            raise ConfigError(
                f"pool: max_running ({self.max_running}) must be at least 1 and at most max_alive ({self.max_alive})"
            )
        if self.warm < 0 or self.max_attempts < 1 or self.orphan_ttl_s <= 0:
            raise ConfigError("pool: warm must be at least 0, max_attempts at least 1, orphan_ttl_s more than 0")


@dataclass(frozen=True)
class PoolStats:
    """Machines now, and what has happened since the start.

    `alive` and `running` count places taken, machines under way among them; `waiting` are leases and resumes that wait
    for one. `undestroyed` are the ids of machines that could not be deleted; each heartbeat tries again.
    """

    alive: int
    running: int
    paused: int
    spares: int
    waiting: int
    leases: int
    created: int
    destroyed: int
    pauses: int
    resumes: int
    retries: int
    undestroyed: tuple[str, ...]
