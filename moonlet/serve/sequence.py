"""A request on its way through the engine, and what comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from moonlet.model.state import KDAState
from moonlet.serve.prefix_cache import Node
from moonlet.serve.sampler import Drawn, SamplingParams

Finish = Literal["stop", "length", "abort", "deadline", "error"]


class Constraint(Protocol):
    """What the answer may be, token by token (JSON schema, grammar)."""

    def allowed(self) -> Tensor | None:
        """Bool [V]: tokens that may come next; None allows all."""

    def advance(self, token: int) -> None: ...


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        ids: the prompt.
        max_tokens: of the answer.
        stop_ids: tokens that end the answer; they are part of it.
        banned_ids: never drawn.
        num_top: how many of the most probable tokens to report at each place.
        deadline_s: from submission; what is there by then is the answer.
        priority: lower goes first; requests of one priority in the order of their arrival.
        should_stop: sees each new token; True ends the answer there (stop strings, closed messages).
    """

    ids: Items[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    banned_ids: frozenset[int] = frozenset()
    num_top: int = 0
    deadline_s: float | None = None
    priority: int = 0
    constraint: Constraint | None = None
    should_stop: Callable[[int], bool] | None = None


@dataclass(frozen=True)
class TokenEvent:
    """One token of an answer, or its end. `version`: of the weights that drew it; `num_cached` as in `Completion`."""

    request_id: str
    drawn: Drawn | None
    version: int
    finish: Finish | None = None
    error: str = ""
    num_cached: int = 0


@dataclass(frozen=True)
class Completion:
    """An answer: ids, their log-probabilities under the model, and the version of the weights behind each.

    `num_cached` prompt tokens were read from the prefix cache.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    num_cached: int = 0
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    error: str = ""


@dataclass(eq=False)
class Sequence:
    """The engine's side of a request. `ids` are prompt and answer; the model has read the first `num_computed`."""

    id: str
    request: Request
    sink: Callable[[TokenEvent], None]
    ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    table: list[int] = field(default_factory=list)
    states: dict[int, KDAState] = field(default_factory=dict)  # by layer, while it is in no decode batch
    submitted_at: float = field(default_factory=time.monotonic)
    finish: Finish | None = None
    is_mixed: bool = False  # its state is in part of older weights: nothing of it may enter the cache
    turn: Node | None = None  # the cache's newest checkpoint of this sequence, which the next one replaces
    keys: list[bytes] = field(default_factory=list)  # of the cache, for the blocks that were entered so far
    seen: tuple[Counter[int], Counter[int]] | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)
        if self.request.sampling.needs_history:
            self.seen = Counter(self.ids), Counter()

    @property
    def num_answered(self) -> int:
        return len(self.ids) - len(self.request.ids)

    @property
    def num_pending(self) -> int:
        """Tokens that the model has yet to read before it can say the next one."""
        return len(self.ids) - self.num_computed

    @property
    def deadline(self) -> float | None:
        return None if self.request.deadline_s is None else self.submitted_at + self.request.deadline_s
