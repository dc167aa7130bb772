"""What this machine's torch can do among processes: tried for real, with values checked, in two ranks over gloo.

Documentation disagrees about which collectives gloo has, and about grouped products on a CPU, so that only trying tells.
The ranks write one line for each finished check; a check that hangs or kills its process has no line, which is an
answer too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moonlet.parallel.ranks import Ranks, spawn_ranks
from moonlet.process import settle_process

_NUM_RANKS = 2
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Check:
    """The outcome of one check over all ranks. `is_needed`: Moonlet cannot train on this machine without it."""

    name: str
    is_ok: bool
    message: str
    is_needed: bool


def probe(timeout_s: float = _TIMEOUT_S) -> list[Check]:
    """Run every check in processes of their own and gather the outcomes. Never raises for a check that fails."""
    with tempfile.TemporaryDirectory(prefix="moonlet-probe-") as folder:
        command = [sys.executable, "-c", f"from moonlet.parallel.probe import run_checks; run_checks({folder!r})"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
            silence = (done.stderr.strip().splitlines() or ["it ended without an answer"])[-1]
        except subprocess.TimeoutExpired:
            silence = f"no answer in {timeout_s:.0f} s"
        lines = [_read_lines(Path(folder) / f"rank_{rank}") for rank in range(_NUM_RANKS)]
    return [_outcome(name, [ranks.get(name) for ranks in lines], silence) for name in _CHECKS]


def _outcome(name: str, messages: list[str | None], silence: str) -> Check:
    """One check's messages of all ranks ('' is fine, None is silence) as one outcome."""
    said = [silence if message is None else message for message in messages]
    return Check(name, not any(said), next((message for message in said if message), ""), name in _NEEDED)


def _read_lines(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines() if line.endswith("]"))


def run_checks(folder: str) -> None:
    """Run the checks in new ranks; each writes its lines into `folder`."""
    settle_process()
    spawn_ranks(_check_rank, _NUM_RANKS, (folder,))


def _check_rank(ranks: Ranks, folder: str) -> None:
    with (Path(folder) / f"rank_{ranks.rank}").open("w") as out:
        for name, check in _CHECKS.items():
            try:
                check(ranks)
                message = ""
            except Exception as error:
                message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            print(json.dumps([name, message]), file=out, flush=True)


def _expect(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, check_dtype=True)


def _all_reduce_sum(ranks: Ranks) -> None:
    x = torch.full((4,), ranks.rank + 1.0)
    dist.all_reduce(x)
    _expect(x, torch.full((4,), 3.0))


def _all_reduce_mean(ranks: Ranks) -> None:
    x = torch.full((4,), ranks.rank + 1.0)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    _expect(x, torch.full((4,), 1.5))


def _all_reduce_bf16(ranks: Ranks) -> None:
    x = torch.full((4,), ranks.rank + 1.0, dtype=torch.bfloat16)
    dist.all_reduce(x)
    _expect(x, torch.full((4,), 3.0, dtype=torch.bfloat16))


def _broadcast(ranks: Ranks) -> None:
    x = torch.tensor([5, 7]) if ranks.is_first else torch.zeros(2, dtype=torch.int64)
    dist.broadcast(x, src=0)
    _expect(x, torch.tensor([5, 7]))


def _reduce_scatter(ranks: Ranks) -> None:
    mine = torch.empty(3)
    dist.reduce_scatter_tensor(mine, torch.arange(6.0))
    _expect(mine, 2 * torch.arange(6.0)[3 * ranks.rank : 3 * ranks.rank + 3])


def _exchange(ranks: Ranks, rows: list[list[int]]) -> None:
    """all_to_all_single where rank s sends `rows[s][r]` rows to rank r; each row says who sent it to whom."""
    sent = [torch.full((rows[ranks.rank][to], 2), 10.0 * ranks.rank + to) for to in range(_NUM_RANKS)]
    got = [rows[sender][ranks.rank] for sender in range(_NUM_RANKS)]
    received = torch.empty(sum(got), 2)
    dist.all_to_all_single(received, torch.cat(sent), got, rows[ranks.rank])
    wanted = [torch.full((count, 2), 10.0 * sender + ranks.rank) for sender, count in enumerate(got)]
    _expect(received, torch.cat(wanted))


def _fsdp(ranks: Ranks) -> None:
    """Sharded weights give the gradients of whole ones, averaged over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    whole, sharded = nn.Linear(6, 5), nn.Linear(6, 5)
    sharded.load_state_dict(whole.state_dict())
    x = torch.randn(2 * _NUM_RANKS, 6)
    whole(x).square().mean().backward()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (_NUM_RANKS,)))
    sharded(x.chunk(_NUM_RANKS)[ranks.rank]).square().mean().backward()
    grad = sharded.weight.grad
    assert isinstance(grad, DTensor) and whole.weight.grad is not None
    _expect(grad.full_tensor(), whole.weight.grad)


def _grouped_product(dtype: torch.dtype) -> None:
    """Forward and backward of a grouped product whose second expert gets no rows, against one product an expert."""
    ends = torch.tensor([16, 16, 24], dtype=torch.int32)
    torch.manual_seed(0)
    grouped = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((24, 16), (3, 16, 32))]
    looped = [x.detach().clone().requires_grad_() for x in grouped]
    product = F.grouped_mm(grouped[0], grouped[1], offs=ends)
    parts = looped[0].split([16, 0, 8])
    reference = torch.cat([part @ weight for part, weight in zip(parts, looped[1])])
    # an expanded gradient, as that of sum(), is refused
    gradient = torch.ones_like(product)
    product.backward(gradient)
    reference.backward(gradient)
    for found, wanted in [(product, reference), *((a.grad, b.grad) for a, b in zip(grouped, looped))]:
        assert found is not None and wanted is not None
        _expect(found, wanted)


_CHECKS: dict[str, Callable[[Ranks], None]] = {
    "all_reduce, sum": _all_reduce_sum,
    "all_reduce, mean": _all_reduce_mean,
    "all_reduce, bf16": _all_reduce_bf16,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_to_all, even rows": lambda ranks: _exchange(ranks, [[2, 2], [2, 2]]),
    "all_to_all, uneven rows": lambda ranks: _exchange(ranks, [[1, 3], [2, 5]]),
    "all_to_all, no rows": lambda ranks: _exchange(ranks, [[0, 2], [0, 0]]),
    "sharded weights (FSDP2)": _fsdp,
    "grouped product, fp32": lambda _: _grouped_product(torch.float32),
    "grouped product, bf16": lambda _: _grouped_product(torch.bfloat16),
}
_NEEDED = ("all_reduce, sum", "broadcast", "grouped product, fp32")
