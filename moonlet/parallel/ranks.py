"""Data-parallel ranks: processes that hold equal weights and sum their gradients.

A rank is told who it is by torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...) or by `spawn_ranks`, which
starts ranks on this machine over gloo and the loopback device. One rank is the ordinary case, where every verb does
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonlet.errors import MoonletError
from moonlet.process import settle_process

_TIMEOUT = timedelta(hours=2)  # the first rank evaluates and saves alone while the others wait
_LAST_WORDS_S = 2.0  # what the other ranks get to report after the first failure
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """This process among its equals."""

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up over the ranks, in place, through one flat buffer for each dtype."""
        self._reduce_(tensors, dist.ReduceOp.SUM)

    def max_(self, tensors: Sequence[Tensor]) -> None:
        """Largest value over the ranks, entry by entry, in place."""
        self._reduce_(tensors, dist.ReduceOp.MAX)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first rank's values to all, in place."""
        if self.num_ranks > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def share_of(self, count: int) -> range:
        """This rank's positions among `count` things, in order and as even as can be; may be empty."""
        return range(count * self.rank // self.num_ranks, count * (self.rank + 1) // self.num_ranks)

    @torch.no_grad()
    def _reduce_(self, tensors: Sequence[Tensor], operation: Any) -> None:
        if self.num_ranks == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            group = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(flat, op=operation)
            parts = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group)])


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started, or one rank where it did not. Leaves the group at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT)
    with _leaving_group():
        yield Ranks(dist.get_rank(), dist.get_world_size())


def spawn_ranks(function: Callable[..., None], num_ranks: int, arguments: tuple[Any, ...]) -> None:
    """Run `function(ranks, *arguments)` in `num_ranks` new processes, one thread each, and wait for them.

    Function and arguments must be picklable by name. SIGINT and SIGTERM are passed on to the ranks, and this process
    waits for them to finish. If this process dies, so do they.

    Raises:
        MoonletError: whatever a rank raised of that kind, once; or a rank was killed. The other ranks are ended.
        RuntimeError: a rank failed otherwise; its traceback is in the message.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="moonlet-ranks-") as folder, _passing_signals_to(processes) as passed:
        pipes = {}
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                task = (function, Ranks(rank, num_ranks), arguments, f"{folder}/rendezvous", sender, os.getpid())
                process = context.Process(target=_rank_main, args=task, name=f"rank {rank}")
                process.start()
                sender.close()
                processes.append(process)
                pipes[process] = receiver
            failed = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    _raise_first_failure(failed, pipes)
    if passed:
        raise KeyboardInterrupt


def _wait(processes: list[Any]) -> list[Any]:
    """Until all are done or one has failed; then a moment for the others to say why. Returns the failed ones."""
    deadline = math.inf
    while time.monotonic() < deadline:
        running = [process for process in processes if process.exitcode is None]
        if not running:
            break
        if deadline == math.inf and any(process.exitcode for process in processes):
            deadline = time.monotonic() + _LAST_WORDS_S
        patience = None if deadline == math.inf else _LAST_WORDS_S / 4
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=patience)
    return [process for process in processes if process.exitcode]


def _raise_first_failure(failed: list[Any], pipes: dict[Any, Any]) -> None:
    """Raise what went wrong first; what the others then said about a lost connection is not news."""
    told: dict[Any, tuple[float, BaseException | None, str]] = {}
    for process in failed:
        with contextlib.suppress(EOFError, OSError):
            if pipes[process].poll():
                told[process] = pipes[process].recv()
    for process in failed:
        if process not in told:
            code = process.exitcode
            raise MoonletError(f"{process.name} ended without a word (exit code {code}); was the memory full?")
    if told:
        process, (_, error, trace) = min(told.items(), key=lambda item: item[1][0])
        if isinstance(error, MoonletError | KeyboardInterrupt):
            raise error
        raise RuntimeError(f"{process.name} failed, so the run was ended:\n{trace}") from error


def _rank_main(
    function: Callable[..., None], ranks: Ranks, arguments: tuple[Any, ...], rendezvous: str, sender: Any, parent: int
) -> None:
    settle_process()
    _die_with(parent)
    os.setpgrp()  # the terminal's Ctrl-C goes to the parent, which passes it on: once, not twice
    # Nothing but this machine takes part, whatever its network looks like.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ["LOCAL_RANK"] = str(ranks.rank)  # as torchrun would say: which device is this rank's
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=ranks.rank, world_size=ranks.num_ranks, timeout=_TIMEOUT
        )
        with _leaving_group():
            function(ranks, *arguments)
    except (Exception, KeyboardInterrupt) as error:
        # The pipe holds 64 KiB before somebody reads it.
        sender.send((time.monotonic(), _picklable(error), traceback.format_exc()[-30_000:]))
        sys.exit(1)


@contextlib.contextmanager
def _leaving_group() -> Iterator[None]:
    yield
    # Only where all went well: after a failure the other ranks may never come to this point.
    dist.destroy_process_group()


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere it fails at the next collective)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _passing_signals_to(processes: list[Any]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on; the ranks decide what they mean. Yields the list of those that came."""
    passed: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        passed.append(number)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    try:
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which gets no signals
        yield passed
        return
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
