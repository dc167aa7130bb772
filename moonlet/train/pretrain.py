"""Pre-training: build the model, find the place to start from, and train all stages, on one rank or on several."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moonlet.config import RunConfig
from moonlet.data.corpus import Corpus
from moonlet.errors import ConfigError, NoCheckpointError
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.ops.backend import kernels
from moonlet.ops.precision import matmul_dtype, multiplies_bf16
from moonlet.optim.optimizers import Optimizers
from moonlet.optim.per_head_muon import WorkShare
from moonlet.optim.qk_clip import LogitTracker
from moonlet.parallel.ranks import Ranks, joined_ranks, spawn_ranks
from moonlet.train.checkpoint import Checkpoint, latest_complete, load_checkpoint, prune_checkpoints
from moonlet.train.loop import Measure, Run, Sink, train_stages
from moonlet.train.restore import check_belongs, load_weights
from moonlet.train.rundir import RunDirectory
from moonlet.train.stages import total_tokens
from moonlet.train.step import Parts

log = logging.getLogger("moonlet")

# Opens the sink of the first rank. The number is the step that is resumed from: later metrics will be written again.
OpenSink = Callable[[RunDirectory, RunConfig, int], Sink]


class _Silence:
    """The sink of ranks other than the first."""

    def metrics(self, step: int, /, **values: object) -> None: ...

    def event(self, event: str, /, **values: object) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Options:
    resume: bool
    reset_optimizer: bool
    open_sink: OpenSink | None
    measure: Measure | None


def pretrain(
    config: RunConfig,
    run: RunDirectory,
    resume: bool = False,
    *,
    reset_optimizer: bool = False,
    open_sink: OpenSink | None = None,
    measure: Measure | None = None,
) -> None:
    """Train `config` on the corpus in `run.data`, on `train.num_processes` ranks or on those that torchrun started.

    With `resume` it goes on from the newest complete checkpoint, to the same numbers as if it had never stopped.
    With several processes `open_sink` and `measure` must be picklable by name.

    Args:
        reset_optimizer: start the optimisers' state afresh, where the saved one does not fit.
        open_sink: opens the sink of the first rank.
        measure: what to measure at the end of each stage and every `train.heldout_every` steps.
    Raises:
        ConfigError: the recipe asks for what cannot work.
        CheckpointError: the checkpoint does not belong to this recipe or data.
        NonFiniteError, StorageError: see `train_step`, `save_checkpoint`.
        KeyboardInterrupt: after Ctrl-C, with everything saved.
    """
    options = _Options(resume, reset_optimizer, open_sink, measure)
    under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    num_ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else config.train.num_processes
    if num_ranks > 1 and config.balance.method == "exact":
        raise ConfigError("balance.method 'exact' needs all tokens on one rank: use 'histogram', or num_processes = 1")
    if under_torchrun or num_ranks == 1:
        with joined_ranks() as ranks:
            pretrain_rank(ranks, config, run, options)
    else:
        spawn_ranks(pretrain_rank, num_ranks, (config, run, options))


def pretrain_rank(ranks: Ranks, config: RunConfig, directory: RunDirectory, options: _Options) -> None:
    """What one rank does."""
    with _log_file(directory, ranks.rank):
        corpus = Corpus(directory.data)
        checkpoint = _checkpoint_to_resume(directory) if options.resume else None
        changed = check_belongs(checkpoint, config, corpus.tokenizer.hash) if checkpoint else []
        parts = build_parts(config, ranks)
        first_step = checkpoint.step if checkpoint else 0
        opens = ranks.is_first and options.open_sink is not None
        sink: Sink = options.open_sink(directory, config, first_step) if opens and options.open_sink else _Silence()
        run = Run(parts, corpus, directory, sink, options.measure)
        try:
            if ranks.is_first:
                prune_checkpoints(directory.checkpoints, config.train.keep_last)
            _announce(run)
            if checkpoint is not None:
                restore(run, checkpoint, options.reset_optimizer)
                sink.event("resume", step=run.step)
                if changed:
                    message = f"{', '.join(changed)} changed since the checkpoint: the numbers will differ"
                    sink.event("warning", message=message)
            if ranks.is_first:
                directory.record(config)
            train_stages(run)
            sink.event("done", step=run.step, tokens=total_tokens(config), seconds=round(run.seconds, 1))
        finally:
            sink.close()


def build_parts(config: RunConfig, ranks: Ranks) -> Parts:
    """Model with initial weights, optimisers and settings; equal on all ranks, for all start from the same seed."""
    torch.manual_seed(config.seed)
    device = _device()
    model = K3(config.model)
    init_weights(model, config.seed)
    model.to(device)
    model.activation_checkpointing = config.train.activation_checkpointing
    for router in model.routers().values():
        router.method, router.bins = config.balance.method, config.balance.bins
    share = WorkShare(ranks.rank, ranks.num_ranks, ranks.sum_)
    optimizers, tracker = Optimizers(model, config.optim, share), LogitTracker(model)
    return Parts(model, optimizers, tracker, ranks, config, device, choose_dtype(config.train.precision, device))


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of products: 'auto' is bfloat16 exactly where the hardware multiplies it."""
    if precision == "bf16" and not multiplies_bf16(device):
        log.warning("train.precision = 'bf16': this hardware only emulates it, which is slow; 'auto' would take fp32")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": matmul_dtype(device)}[precision]


def restore(run: Run, checkpoint: Checkpoint, reset_optimizer: bool = False) -> None:
    """Put a run where it was when the checkpoint was saved."""
    load_weights(run.parts.model, checkpoint.model)
    if not reset_optimizer:
        run.parts.optimizers.load_state_tensors(checkpoint.optimizer)
    torch.set_rng_state(torch.tensor(list(base64.b64decode(checkpoint.state["rng"])), dtype=torch.uint8))
    run.step, run.seconds = checkpoint.step, checkpoint.state["seconds"]
    run.data_state = checkpoint.state["data"]


def _checkpoint_to_resume(directory: RunDirectory) -> Checkpoint | None:
    """The newest complete checkpoint; None where the run was stopped before its first one, which is a fresh start."""
    try:
        return load_checkpoint(latest_complete(directory.checkpoints))
    except NoCheckpointError:
        log.warning("there is no complete checkpoint in '%s' yet: training starts from step 0", directory.checkpoints)
        return None


def _announce(run: Run) -> None:
    parts, config = run.parts, run.parts.config
    run.sink.event(
        "start",
        name=config.name,
        parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
        steps=config.num_steps,
        tokens=total_tokens(config),
        ranks=parts.ranks.num_ranks,
        device=str(parts.device),
        precision=str(parts.dtype).removeprefix("torch."),
        kernels=kernels(),
        attempt=run.directory.attempt,
    )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _log_file(directory: RunDirectory, rank: int) -> Iterator[None]:
    """Copy the package's log into the run directory."""
    directory.logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory.logs / f"rank_{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
