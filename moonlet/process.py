"""What a process must settle before torch is loaded, in one place.

- `OMP_WAIT_POLICY=PASSIVE`: OpenMP threads sleep at a barrier instead of spinning. With one busy neighbour a spinning
  barrier makes small operations 10 to 1000 times slower.
- One thread per process: at these sizes two one-thread processes do twice the work of one, two threads do 1.4 times.
- The allocator keeps what it has: by default glibc hands every multi-megabyte temporary back to the kernel, and the
  page faults of the next one cost more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def settle_process(num_threads: int = 1) -> None:
    """Set thread policy and allocator for this process; call it before `import torch`. Safe to call twice."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    _keep_freed_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory; silently does nothing on other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 64 << 20)
