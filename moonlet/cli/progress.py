"""Where a command's progress goes: metrics files and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonlet.report.console import ConsoleLog, Phase
from moonlet.report.metrics import FanOut, MetricsLog, Sink

if TYPE_CHECKING:
    from moonlet.config import RunConfig
    from moonlet.train.rundir import RunDirectory


def open_sink(directory: RunDirectory, config: RunConfig, first_step: int) -> Sink:
    """Files and terminal together. Picklable by name, for training in several processes."""
    total_tokens = sum(stage.num_steps * stage.batch_tokens for stage in config.stages)
    return FanOut([MetricsLog(directory.root, resume_step=first_step), ConsoleLog(config.num_steps, total_tokens)])


class Phases:
    """A progress callback (phase, done, total) as one console line after the other."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._phase: Phase | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self._name:
            self.close()
            self._name, self._phase = name, Phase(name, total).__enter__()
        if self._phase is not None:
            self._phase(done, total)

    def close(self) -> None:
        """Finish the line of the last phase."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._name = self._phase = None
