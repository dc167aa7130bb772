"""A long prompt read in pieces: what it needs in memory beyond its cache does not grow with its length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3

PIECE, num_tokens = 512, int(sys.argv[1])
model = K3(resolve_model({"preset": "nano"})).eval()
init_weights(model, 0)
ids = torch.arange(num_tokens).remainder(2000).unsqueeze(0)

def resident(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def read(state, ids):
    for piece in ids.split(PIECE, dim=1):
        model.hidden(piece, state=state)

with torch.inference_mode():
    read(model.new_state(1), ids[:, :PIECE])
    state = model.new_state(1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    read(state, ids)
print(json.dumps({"peak": resident("VmHWM") - before, "cache": state.num_bytes}))
"""


def _peak_beyond_the_cache(num_tokens: int) -> int:
    # Every large tensor gets pages of its own, so that the peak does not depend on what the heap happens to keep.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _MEASURE, str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    return figures["peak"] - figures["cache"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure a peak")
def test_memory_of_a_prefill_is_bounded_by_its_pieces() -> None:
    assert _peak_beyond_the_cache(8192) <= 1.3 * _peak_beyond_the_cache(4096)
