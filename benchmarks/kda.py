"""How fast KDA and its neighbours run on this machine: CPU time of one thread, as ratios to what is measured beside it.

    python benchmarks/kda.py [tokens]

Wall clocks lie on a busy machine, and so does a figure measured an hour ago: every line is the best of several thread-CPU
times, and is compared with a float32 matrix product timed in the same process. FLOPs are those that the chunk form needs
with 16-token tiles, whatever a kernel really computes, so that kernels stay comparable.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from moonlet.process import settle_process

settle_process(1)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from moonlet.ops.backend import kernel_report, use_kernels  # noqa: E402
from moonlet.ops.kda import kda, kda_step, l2_normalize  # noqa: E402

HEADS, DIM = 2, 64


def cpu_seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """Best thread-CPU time of a call."""
    function()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def matmul_rate() -> float:
    """FLOP/s of a 512 x 512 x 512 float32 product."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    return 2 * 512**3 / cpu_seconds(lambda: a @ b, repeats=20)


def kda_inputs(tokens: int) -> list[Tensor]:
    q, k = (l2_normalize(torch.randn(1, tokens, HEADS, DIM)) for _ in range(2))
    v, beta = torch.randn(1, tokens, HEADS, DIM), torch.rand(1, tokens, HEADS)
    g = -5 * torch.sigmoid(torch.randn(1, tokens, HEADS, DIM) - 3)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def measure(kernels: str, inputs: Sequence[Tensor], seq_lens: Sequence[int]) -> tuple[float, float]:
    """Seconds of the forward pass alone, and with the backward pass."""
    cotangent = torch.randn_like(inputs[2])

    def forward() -> None:
        with torch.no_grad():
            kda(*inputs, seq_lens=seq_lens)

    def both() -> None:
        torch.autograd.grad(kda(*inputs, seq_lens=seq_lens)[0], inputs, cotangent)

    repeats = 1 if kernels == "naive" else 7
    with use_kernels(kernels):
        return cpu_seconds(forward, repeats), cpu_seconds(both, repeats)


def main(tokens: int) -> None:
    print({key: value for key, value in kernel_report().items() if key in ("kernels", "why", "lanes")})
    inputs = kda_inputs(tokens)
    flops_forward = tokens * HEADS * (6 * DIM * DIM + 10 * 16 * DIM)
    flops_both = tokens * HEADS * (24 * DIM * DIM + 40 * 16 * DIM)
    print(f"{tokens} tokens, {HEADS} heads, K = V = {DIM}")
    for seq_lens in ((tokens,), (256,) * (tokens // 256)):
        for kernels in ("naive", "torch", "native"):
            if kernels == "naive" and len(seq_lens) > 1:
                continue
            rate = matmul_rate()
            forward, both = measure(kernels, inputs, seq_lens)
            print(
                f"  {kernels:7} {len(seq_lens):3} documents: forward {1e3 * forward:8.2f} ms, with backward "
                f"{1e3 * both:8.2f} ms = {flops_both / both / 1e9:5.1f} GFLOP/s, {flops_both / both / rate:4.0%} of a matrix "
                f"product ({rate / 1e9:.0f}); forward {flops_forward / forward / rate:4.0%}"
            )
    q, k, v, g, beta = (x.detach()[:, 0] for x in inputs)
    state = torch.randn(1, HEADS, DIM, DIM)
    for kernels in ("torch", "native"):
        with use_kernels(kernels), torch.no_grad():
            print(
                f"  {kernels:7} decoding step: {1e6 * cpu_seconds(lambda: kda_step(q, k, v, g, beta, state), 50):.0f} us"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
