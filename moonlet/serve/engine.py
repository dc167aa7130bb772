"""The engine: requests in, tokens out, one forward pass after another (k3_system.md section 5, rl.md section 6)."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moonlet.errors import ConfigError, MoonletError, NonFiniteError, RequestError
from moonlet.model.k3 import K3
from moonlet.serve.outside import StoredPrefixes
from moonlet.serve.pages import OutOfPagesError, PagePool, pages_for
from moonlet.serve.prefix_cache import PrefixCache, chain_keys
from moonlet.serve.runner import Runner
from moonlet.serve.sampler import draw
from moonlet.serve.scheduler import Scheduler, SchedulerConfig
from moonlet.serve.sequence import Completion, Finish, Request, Sequence, TokenEvent
from moonlet.serve.state_record import compute_model_id
from moonlet.serve.state_store import StateStore

Mode = Literal["recurrent", "replay"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the cache and of what runs at once.

    Attributes:
        mode: 'recurrent' is fast; 'replay' gives every token the bits that it has in training.
        num_pages, page_rows: of the pool of MLA rows; `num_pages` * `page_rows` tokens fit in all.
        hash_block: tokens between two places where a prefix may end; divides `page_rows`.
        checkpoint_bytes: for KDA states of cached prefixes.
        prefix_cache: off for comparisons.
    """

    mode: Mode = "recurrent"
    num_pages: int = 1024
    page_rows: int = 64
    hash_block: int = 16
    checkpoint_bytes: int = 256 << 20
    prefix_cache: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.mode not in ("recurrent", "replay"):
            raise ConfigError(f"decode mode '{self.mode}' is not one of recurrent, replay")
        if self.num_pages < 2 or self.page_rows < 1:
            raise ConfigError("the pool needs at least 2 pages of at least 1 row")
        if self.page_rows % self.hash_block or self.scheduler.prefill_piece % self.hash_block:
            raise ConfigError(
                f"hash_block {self.hash_block} must divide page_rows {self.page_rows} and "
                f"prefill_piece {self.scheduler.prefill_piece}"
            )


@dataclass
class EngineCounters:
    """What happened since the start."""

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_steps: int = 0


class Engine:
    """Not thread-safe: one thread submits, steps and updates (`serve/engine_thread.py` is that thread).

    Args:
        store: where prefixes go that the cache forgets, and come from that it misses.
    """

    def __init__(
        self,
        model: K3,
        config: EngineConfig = EngineConfig(),
        *,
        weights_version: int = 0,
        store: StateStore | None = None,
    ) -> None:
        self.model, self.config, self.weights_version = model, config, weights_version
        self.pool = PagePool(model, config.num_pages, config.page_rows)
        self.runner = Runner(model, self.pool, replay=config.mode == "replay")
        self.scheduler = Scheduler(config.scheduler, config.hash_block)
        self.model_id = compute_model_id(model)
        outside = None if store is None else StoredPrefixes(self, store)
        self.cache = PrefixCache(self.pool, config.hash_block, self._root(), config.checkpoint_bytes, outside)
        self.pool.evict = self.cache.evict
        self.counters = EngineCounters()
        self._ids = itertools.count()

    def _root(self) -> bytes:
        """What a cached number depends on besides tokens: the model, its weights, and how it was computed."""
        name = f"{self.model_id}:{self.weights_version}:{self.config.mode}"
        return hashlib.sha256(name.encode()).digest()

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence: all pages but the one that padding writes to."""
        return (self.config.num_pages - 1) * self.config.page_rows

    # -- requests -----------------------------------------------------------------------------------------------------
    def submit(self, request: Request, sink: Callable[[TokenEvent], None], request_id: str | None = None) -> str:
        """Queue a request; `sink` gets its tokens during `step`. Raises RequestError, EngineBusyError."""
        self._check(request)
        sequence = Sequence(request_id or f"request-{next(self._ids)}", request, sink)
        self.scheduler.submit(sequence)
        self.counters.num_requests += 1
        self.counters.num_prompt_tokens += len(request.ids)
        return sequence.id

    def _check(self, request: Request) -> None:
        if not request.ids:
            raise RequestError("a prompt needs at least one token")
        vocab = self.model.config.vocab_size
        strange = [token for token in request.ids if not 0 <= token < vocab]
        if strange:
            raise RequestError(f"token {strange[0]} of the prompt is not in the vocabulary of {vocab}")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}")
        total = len(request.ids) + request.max_tokens
        if total > self.max_context:
            raise RequestError(
                f"{len(request.ids)} prompt tokens and max_tokens {request.max_tokens} need a context of {total}; "
                f"this engine has {self.max_context}: shorten one of them or start it with more pages"
            )

    def abort(self, request_id: str, finish: Finish = "abort") -> bool:
        """End a request now; returns whether there was one."""
        for sequence in self.scheduler.everyone():
            if sequence.id == request_id:
                self._end(sequence, finish)
                return True
        return False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- one step -----------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Admit, read pieces of prompts within the budget, then one token of everybody that decodes."""
        self.counters.num_steps += 1
        self._end_late()
        self._admit()
        budget = self.config.scheduler.prefill_budget
        for sequence in list(self.scheduler.running):
            while budget > 0 and sequence in self.scheduler.running and (count := self.scheduler.piece(sequence)):
                budget -= count
                self._guard(sequence, lambda sequence=sequence, count=count: self._prefill(sequence, count))
        self._decode()

    def _end_late(self) -> None:
        now = time.monotonic()
        for sequence in self.scheduler.everyone():
            if sequence.deadline is not None and now >= sequence.deadline:
                self._end(sequence, "deadline")

    def _admit(self) -> None:
        while (sequence := self.scheduler.admit()) is not None:
            self.scheduler.running.append(sequence)
            if not self.config.prefix_cache:
                continue
            try:
                hit = self.cache.match(sequence.ids)
            except OutOfPagesError:
                continue  # it starts cold; what runs now frees pages
            if hit is not None:
                sequence.table, sequence.num_computed = hit.pages, hit.length
                sequence.states = {index: state.clone() for index, state in hit.checkpoint.items()}
                if not sequence.num_answered:
                    sequence.num_cached = hit.length
                self.counters.num_cached_tokens += hit.length

    def _guard(self, sequence: Sequence, work: Callable[[], None]) -> None:
        """A request whose own numbers or constraint fail ends with the error; the others go on."""
        try:
            work()
        except (NonFiniteError, RequestError) as error:
            self._end(sequence, "error", str(error))

    def _prefill(self, sequence: Sequence, count: int) -> None:
        if not self._make_room(sequence, sequence.num_computed + count):
            return
        logits_V = self.runner.prefill(sequence, count)
        self.counters.num_prefill_tokens += count
        self._remember(sequence, is_turn=False)
        if sequence.num_pending == 0:
            self._draw(sequence, logits_V)

    def _decode(self) -> None:
        ready = [s for s in self.scheduler.running if s.num_pending > 0 and not self.scheduler.piece(s)]
        for sequence in ready:
            if sequence in self.scheduler.running:  # else an earlier one took its pages
                sequence.states = sequence.states or ({} if sequence.num_computed else self.runner.new_states())
                self._make_room(sequence, sequence.num_computed + 1)
        ready = [sequence for sequence in ready if sequence in self.scheduler.running]
        if not ready:
            return
        logits_BV = self.runner.decode(ready)
        self.counters.num_decode_tokens += len(ready)
        for sequence, logits_V in zip(ready, logits_BV):
            self._remember(sequence, is_turn=True)
            if sequence.num_pending == 0:
                self._guard(sequence, lambda sequence=sequence, logits_V=logits_V: self._draw(sequence, logits_V))

    def _make_room(self, sequence: Sequence, num_rows: int) -> bool:
        """Pages for the first `num_rows` tokens, at the cost of others if need be. False: it waits itself now."""
        while len(sequence.table) < pages_for(num_rows, self.config.page_rows):
            try:
                sequence.table.append(self.pool.take())
            except OutOfPagesError:
                victim = self.scheduler.victim(sequence)
                if victim is None or _order(victim) < _order(sequence):
                    self._preempt(sequence)
                    return False
                self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything away; it is read again later, prompt and answer, from the cache where that still has it."""
        self.counters.num_preempted += 1
        self._release(sequence)
        self.scheduler.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.runner.leave([sequence])
        for page in sequence.table:
            self.pool.release(page)
        sequence.table, sequence.keys, sequence.states = [], [], {}
        sequence.num_computed, sequence.turn, sequence.is_mixed = 0, None, False

    def _remember(self, sequence: Sequence, *, is_turn: bool) -> None:
        """Enter what is computed into the cache; a decoding sequence's newest checkpoint replaces its last one."""
        done = sequence.num_computed
        if not self.config.prefix_cache or sequence.is_mixed or done % self.config.hash_block:
            return
        checkpoint = self.runner.states_of(sequence)
        chain_keys(sequence.keys, self.cache.root, sequence.ids[:done], self.config.hash_block)
        node = self.cache.enter(sequence.keys, sequence.table, checkpoint)
        if is_turn and node is not None and node.checkpoint is checkpoint:
            if sequence.turn is not None:
                self.cache.drop_checkpoint(sequence.turn)
            sequence.turn = node

    # -- tokens -------------------------------------------------------------------------------------------------------
    def _draw(self, sequence: Sequence, logits_V: Tensor) -> None:
        request = sequence.request
        allowed_V = self._allowed(sequence, len(logits_V))
        position = len(sequence.ids)
        drawn = draw(
            logits_V, request.sampling, position, allowed_V=allowed_V, seen=sequence.seen, num_top=request.num_top
        )
        sequence.ids.append(drawn.token)
        if sequence.seen is not None:
            sequence.seen[1][drawn.token] += 1
        if request.constraint is not None:
            request.constraint.advance(drawn.token)
        finish: Finish | None = None
        if drawn.token in request.stop_ids or (request.should_stop is not None and request.should_stop(drawn.token)):
            finish = "stop"
        elif sequence.num_answered >= request.max_tokens:
            finish = "length"
        sequence.sink(TokenEvent(sequence.id, drawn, self.weights_version, finish, num_cached=sequence.num_cached))
        if finish is not None:
            self._end(sequence, finish, tell=False)

    def _allowed(self, sequence: Sequence, vocab: int) -> Tensor | None:
        request = sequence.request
        allowed_V = None if request.constraint is None else request.constraint.allowed()
        if request.banned_ids:
            allowed_V = torch.ones(vocab, dtype=torch.bool) if allowed_V is None else allowed_V.clone()
            allowed_V[sorted(request.banned_ids)] = False
        if allowed_V is not None and not bool(allowed_V.any()):
            raise RequestError("no token may come next: the constraint and the banned tokens leave none")
        return allowed_V

    def _end(self, sequence: Sequence, finish: Finish, error: str = "", *, tell: bool = True) -> None:
        sequence.finish = finish
        self._release(sequence)
        self.scheduler.remove(sequence)
        self.counters.num_finished[finish] = self.counters.num_finished.get(finish, 0) + 1
        if tell:
            sequence.sink(TokenEvent(sequence.id, None, self.weights_version, finish, error, sequence.num_cached))

    # -- weights ------------------------------------------------------------------------------------------------------
    def update_weights(self, weights: Mapping[str, Tensor], version: int, *, keep_states: bool = False) -> None:
        """Other weights from now on; nothing computed with the old ones is ever matched again.

        What runs is read again with the new weights, or goes on from its old state with `keep_states`; each token says
        which version drew it. Raises MoonletError where the weights do not fit; then nothing has changed.
        """
        _check_fit(self.model, weights)
        if not keep_states:
            for sequence in list(self.scheduler.running):
                self._preempt(sequence)
        with torch.no_grad():
            for name, target in self.model.state_dict().items():
                target.copy_(weights[name])
        for sequence in self.scheduler.running:
            sequence.turn, sequence.is_mixed = None, sequence.num_computed > 0
        self.weights_version, self.model_id = version, compute_model_id(self.model)
        self.cache.clear(self._root())

    # -- the simplest use -----------------------------------------------------------------------------------------------
    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run requests to their ends together; answers in their order."""
        collectors = [Collector() for _ in requests]
        names = [self.submit(request, collector) for request, collector in zip(requests, collectors)]
        by_id = {s.id: s for s in self.scheduler.everyone()}
        mine = [by_id[name] for name in names]
        while any(sequence.finish is None for sequence in mine):
            self.step()
        return [collector.completion() for collector in collectors]


class Collector:
    """A sink that keeps an answer together: ids, log-probabilities and versions grow by one call."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)

    def completion(self) -> Completion:
        drawn = [(event.drawn, event.version) for event in self.events if event.drawn is not None]
        last = self.events[-1]
        return Completion(
            ids=[token.token for token, _ in drawn],
            logprobs=[token.logprob for token, _ in drawn],
            versions=[version for _, version in drawn],
            finish=last.finish or "abort",
            num_cached=last.num_cached,
            tops=[token.top for token, _ in drawn],
            error=last.error,
        )


def _order(sequence: Sequence) -> tuple[int, float]:
    return sequence.request.priority, sequence.submitted_at


def _check_fit(model: K3, weights: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    missing, strange = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or strange or wrong:
        raise MoonletError(
            f"these weights are of another model: missing {missing[:3]}, unknown {strange[:3]}, other shape {wrong[:3]}"
        )
