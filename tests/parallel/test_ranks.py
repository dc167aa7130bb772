"""Ranks: collectives, and how a failing rank ends the others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_tasks import collectives, fail

from moonlet.errors import DataError, MoonletError
from moonlet.parallel.ranks import Ranks, joined_ranks, spawn_ranks


def test_one_rank_does_nothing():
    ranks, tensor = Ranks(), torch.arange(3)
    ranks.sum_([tensor])
    ranks.max_([tensor])
    ranks.broadcast_([tensor])
    ranks.barrier()
    assert tensor.tolist() == [0, 1, 2]
    assert ranks.is_first and list(ranks.share_of(4)) == [0, 1, 2, 3]
    with joined_ranks() as joined:
        assert joined == ranks


@pytest.mark.parametrize(("count", "num_ranks"), [(8, 2), (5, 2), (1, 3), (0, 2), (7, 4)])
def test_shares_cover_everything_once(count: int, num_ranks: int):
    shares = [list(Ranks(rank, num_ranks).share_of(count)) for rank in range(num_ranks)]
    assert [place for share in shares for place in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_collectives_of_two_ranks(tmp_path: Path):
    spawn_ranks(collectives, 2, (tmp_path,))
    results = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    for summed, largest, sent, _ in results:
        assert [t.tolist() for t in summed] == [[[3.0] * 3] * 2, [1, 10], 1.0]
        assert [t.tolist() for t in largest] == [[[2.0] * 3] * 2, [1, 5], 1.0]
        assert [t.tolist() for t in sent] == [[[1.0] * 3] * 2, [0, 5], 0.0]
    assert [result[3] for result in results] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("how", "num_ranks", "kind", "message"),
    [
        ("known", 2, DataError, "the last rank has no data"),
        ("killed", 2, MoonletError, "rank 1 ended without a word .*-9"),
        ("unknown", 1, RuntimeError, r"rank 0 failed[\s\S]*ZeroDivisionError"),
    ],
)
def test_a_failing_rank_ends_the_others_with_one_error(how: str, num_ranks: int, kind: type[Exception], message: str):
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        spawn_ranks(fail, num_ranks, (how,))
    assert time.monotonic() - start < 50  # the other rank would sleep for a minute


def test_joins_a_torchrun_group(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch\nfrom pathlib import Path\nfrom moonlet.parallel.ranks import joined_ranks\n"
        "with joined_ranks() as ranks:\n"
        "    total = torch.tensor(ranks.rank + 1)\n    ranks.sum_([total])\n"
        "    Path(sys.argv[1], f'total_{ranks.rank}').write_text(str(total.item()))\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path),
    ]
    # Whatever network the machine is in, these two talk over the loopback device.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"total_{rank}").read_text() for rank in range(2)] == ["3", "3"]
