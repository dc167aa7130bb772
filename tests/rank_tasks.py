"""What the tests run on several ranks: functions that a spawned process can import by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from moonlet.errors import DataError
from moonlet.parallel.ranks import Ranks


def collectives(ranks: Ranks, folder: Path) -> None:
    """Sums, maxima and broadcast of tensors of mixed dtypes and shapes."""
    mine = [torch.full((2, 3), float(ranks.rank + 1)), torch.tensor([ranks.rank, 5]), torch.tensor(float(ranks.rank))]
    summed, largest, sent = ([t.clone() for t in mine] for _ in range(3))
    ranks.sum_(summed)
    ranks.max_(largest)
    ranks.broadcast_(sent)
    torch.save((summed, largest, sent, list(ranks.share_of(5))), folder / f"rank_{ranks.rank}.pt")


def fail(ranks: Ranks, how: str) -> None:
    """The last rank fails; the others wait for it in a collective."""
    if ranks.rank == ranks.num_ranks - 1:
        if how == "known":
            raise DataError("the last rank has no data")
        if how == "unknown":
            raise ZeroDivisionError("an ordinary bug")
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()
    time.sleep(60)
