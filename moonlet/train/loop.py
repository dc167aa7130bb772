"""The loop over optimiser steps: stage after stage, with metrics, measurements, checkpoints, and a clean end on Ctrl-C."""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moonlet.config import StageConfig
from moonlet.data.batches import BatchStream
from moonlet.data.corpus import Corpus
from moonlet.errors import NonFiniteError
from moonlet.model.k3 import K3
from moonlet.ops.quantile_balancing import max_violation
from moonlet.optim.schedule import learning_rate_scale
from moonlet.train.checkpoint import Checkpoint, prune_checkpoints, save_checkpoint
from moonlet.train.rundir import RunDirectory
from moonlet.train.stages import Place, find_place
from moonlet.train.step import Parts, StepResult, train_step

# Metrics lines about a model: (model, corpus, stage, whether the stage is over) -> [{"kind": ..., ...}, ...].
Measure = Callable[[K3, Corpus, StageConfig, bool], list[dict[str, Any]]]

_LOAD_EVERY_LINES = 5  # the loads of all experts are long
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Sink(Protocol):
    """Where the loop says how it goes; `report.metrics` has real ones."""

    def metrics(self, step: int, /, **values: Any) -> None: ...

    def event(self, event: str, /, **values: Any) -> None: ...

    def close(self) -> None: ...


@dataclass
class Run:
    """Everything that outlives a step."""

    parts: Parts
    corpus: Corpus
    directory: RunDirectory
    sink: Sink
    measure: Measure | None
    data_state: dict[str, Any] | None = None  # of the BatchStream after `step` steps
    step: int = 0  # finished steps
    seconds: float = 0.0  # of training so far, over all attempts


def train_stages(run: Run) -> None:
    """Train from where the run stands to the end of its last stage.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM, once the step is finished and saved.
    """
    config = run.parts.config
    with _stop_requests() as stop:
        while run.step < config.num_steps:
            place = find_place(config, run.step)
            stage = config.stages[place.index]
            stream = BatchStream(run.corpus, stage, config.seed, run.data_state)
            run.sink.event("stage", name=stage.name, step=run.step, seq_len=stage.seq_len, tokens=place.tokens)
            _train_stage(run, stage, stream, place, stop)


def _train_stage(run: Run, stage: StageConfig, stream: BatchStream, place: Place, stop: StopRequest) -> None:
    config, clock = run.parts.config, _Clock(run.seconds, place.tokens)
    for finished in range(place.step + 1, stage.num_steps + 1):
        scale = learning_rate_scale(run.step, config.num_steps, config.optim)
        is_last = finished == stage.num_steps
        has_line = is_last or run.step == 0 or (run.step + 1) % config.train.log_every == 0
        result = train_step(run.parts, stream.next_rows(), run.step + 1, scale, look_closer=has_line)
        run.step, run.data_state = run.step + 1, stream.state_dict()
        run.seconds = clock.count(stage.batch_tokens)
        if has_line:
            run.sink.metrics(run.step, **_train_line(run, stage, result, scale, clock))
        stopping = stop.agreed(run.parts)
        with clock.paused():
            _measure_and_save(run, stage, clock.tokens, is_last, stopping)
        if stopping:
            run.sink.event("interrupt", step=run.step)
            raise KeyboardInterrupt(f"stopped after step {run.step}")


class _Clock:
    """Seconds of training and tokens so far, and the rate since the last look; what `paused` encloses does not count."""

    def __init__(self, seconds: float, tokens: int) -> None:
        self.tokens = self._seen_tokens = tokens
        self._start = time.monotonic() - seconds
        self._seen_seconds = seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def count(self, tokens: int) -> float:
        self.tokens += tokens
        return self.seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        seconds = self.seconds
        yield
        self._start = time.monotonic() - seconds

    def rate(self) -> float:
        """Tokens a second since the last call."""
        seconds, tokens = self.seconds - self._seen_seconds, self.tokens - self._seen_tokens
        self._seen_seconds, self._seen_tokens = self.seconds, self.tokens
        return tokens / max(1e-9, seconds)


def _train_line(run: Run, stage: StageConfig, result: StepResult, scale: float, clock: _Clock) -> dict[str, Any]:
    optim, every = run.parts.config.optim, run.parts.config.train.log_every * _LOAD_EVERY_LINES
    is_long = run.step % every == 0 or run.step == 1
    return {
        "kind": "train",
        "stage": stage.name,
        "tokens": clock.tokens,
        "loss": result.loss,
        "lr": optim.adam_lr * scale,
        "muon_lr": optim.muon_lr * scale,
        "grad_norm": result.grad_norm,
        "tokens_per_s": round(clock.rate(), 1),
        "seconds": round(run.seconds, 3),
        "max_violation": {name: max_violation(load) for name, load in result.loads.items()},
        "grad_norm_by_layer": norms_by_layer(result.grad_norms),
        **({"expert_load": {name: load.tolist() for name, load in result.loads.items()}} if is_long else {}),
        "qk_max_logit": result.max_logit,
    }


def norms_by_layer(grad_norms: dict[str, float]) -> list[float]:
    """Gradient norm of each layer's parameters together, first layer first."""
    squares: dict[int, float] = {}
    for name, norm in grad_norms.items():
        if match := _LAYER.search(f".{name}"):
            squares[int(match[1])] = squares.get(int(match[1]), 0.0) + norm**2
    return [squares[layer] ** 0.5 for layer in sorted(squares)]


def _measure_and_save(run: Run, stage: StageConfig, tokens: int, is_last: bool, stopping: bool) -> None:
    """What is due after a step: held-out loss and the like, then a checkpoint. The first rank does it alone."""
    train = run.parts.config.train
    if not run.parts.ranks.is_first:
        return
    is_due = is_last or bool(train.heldout_every and run.step % train.heldout_every == 0)
    if run.measure is not None and is_due:
        for line in run.measure(run.parts.model, run.corpus, stage, is_last):
            run.sink.metrics(run.step, stage=stage.name, tokens=tokens, **line)
    is_permanent = is_last or bool(train.keep_every and run.step % train.keep_every == 0)
    if is_permanent or stopping or run.step % train.checkpoint_every == 0:
        refuse_non_finite(run.parts.model, run.step)
        path = save_checkpoint(run.directory.checkpoints, run_checkpoint(run), is_permanent)
        prune_checkpoints(run.directory.checkpoints, train.keep_last)
        run.sink.event("checkpoint", step=run.step, path=str(path.relative_to(run.directory.root)))


def refuse_non_finite(model: K3, step: int) -> None:
    """Weights that overflowed must not push good checkpoints out.

    Raises:
        NonFiniteError: names the first such weight.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"'{name}' is not finite after step {step}, so nothing was saved. Resume from the last checkpoint with "
                "lower learning rates (optim.muon_lr, optim.adam_lr)"
            )


def run_checkpoint(run: Run) -> Checkpoint:
    config = run.parts.config
    state = {
        "step": run.step,
        "seconds": run.seconds,
        "data": run.data_state,
        "rng": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
        "tokenizer_hash": run.corpus.tokenizer.hash,
        "config": config.model_dump(mode="json"),
    }
    tensors: dict[str, Tensor] = run.parts.model.state_dict()
    tokenizer = (run.corpus.folder / "tokenizer.json").read_bytes()
    return Checkpoint(tensors, run.parts.optimizers.state_tensors(), state, tokenizer)


class StopRequest:
    """Whether a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.is_asked = False

    def agreed(self, parts: Parts) -> bool:
        """Whether any rank was asked: signals reach the ranks at different steps, but all must stop at the same one."""
        asked = torch.tensor(float(self.is_asked), device=parts.device)
        parts.ranks.max_([asked])
        return bool(asked)


@contextlib.contextmanager
def _stop_requests() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request, and the second into an interrupt at once."""
    stop = StopRequest()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt("stopped at once")
        stop.is_asked = True

    try:
        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which gets no signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
