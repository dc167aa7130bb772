"""Who is read next. It decides; the engine does.

Requests wait by priority and arrival. Running ones read their prompts in pieces whose ends lie at fixed places, so that the
numbers of a request do not depend on the others, and then go on token by token in one batch.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from moonlet.errors import ConfigError, EngineBusyError
from moonlet.model.gated_mla import MIN_ROWS
from moonlet.serve.sequence import Sequence


@dataclass(frozen=True)
class SchedulerConfig:
    """How much at once.

    Attributes:
        max_running: sequences that are read or decode.
        max_waiting: requests beyond them; more are refused.
        prefill_piece: tokens of a prompt read at a time; a multiple of the cache's page.
        prefill_budget: prompt tokens read between two decode steps, at least one piece.
    """

    max_running: int = 16
    max_waiting: int = 1024
    prefill_piece: int = 512
    prefill_budget: int = 512

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "prefill_piece", "prefill_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class Scheduler:
    """The waiting and the running."""

    def __init__(self, config: SchedulerConfig, block: int) -> None:
        self.config, self.block = config, block
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrival = itertools.count()
        self._front = itertools.count(-1, -1)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Raises EngineBusyError where too many wait."""
        if self.num_waiting >= self.config.max_waiting:
            raise EngineBusyError(f"{self.num_waiting} requests wait already: try again later", retry_after_s=1.0)
        heapq.heappush(self._waiting, (sequence.request.priority, next(self._arrival), sequence))

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence goes before all that wait at its priority."""
        self.running.remove(sequence)
        heapq.heappush(self._waiting, (sequence.request.priority, next(self._front), sequence))

    def admit(self) -> Sequence | None:
        """The next one to run, if there is room; the caller adds it to `running`."""
        if not self._waiting or len(self.running) >= self.config.max_running:
            return None
        return heapq.heappop(self._waiting)[2]

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            return
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)

    def everyone(self) -> list[Sequence]:
        return [*self.running, *(entry[2] for entry in sorted(self._waiting, key=lambda entry: entry[:2]))]

    def victim(self, other_than: Sequence) -> Sequence | None:
        """Whom to preempt: the last in order of those that run, not `other_than`."""
        others = [sequence for sequence in self.running if sequence is not other_than]
        return max(others, key=lambda s: (s.request.priority, s.submitted_at), default=None)

    def piece(self, sequence: Sequence) -> int:
        """How many tokens of a sequence to read at once; 0 where the decode batch reads them one by one."""
        start, stop = sequence.num_computed, len(sequence.ids)
        if stop - start < MIN_ROWS:
            return 0
        size = self.config.prefill_piece
        end = min((start // size + 1) * size, stop)
        aligned = (stop - 1) // self.block * self.block
        if end == stop and aligned - start >= MIN_ROWS:
            end = aligned  # the last state that the same prompt can go on from
        return end - start
