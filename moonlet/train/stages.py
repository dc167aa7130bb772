"""The context curriculum as a line of optimiser steps: which stage a step belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.config import RunConfig


@dataclass(frozen=True)
class Place:
    """Where in the curriculum a number of finished steps stands.

    Attributes:
        index: the stage that the next step belongs to.
        step: finished steps of that stage.
        tokens: tokens of all finished steps.
    """

    index: int
    step: int
    tokens: int


def find_place(config: RunConfig, finished_steps: int) -> Place:
    """The place after `finished_steps` steps. At the end of the run it is the end of the last stage."""
    tokens, left = 0, finished_steps
    for index, stage in enumerate(config.stages):
        if left < stage.num_steps or index == len(config.stages) - 1:
            return Place(index, left, tokens + left * stage.batch_tokens)
        left -= stage.num_steps
        tokens += stage.num_steps * stage.batch_tokens
    raise AssertionError("a run has at least one stage")


def total_tokens(config: RunConfig) -> int:
    """Tokens of all stages, as whole optimiser steps."""
    return sum(stage.num_steps * stage.batch_tokens for stage in config.stages)
