"""The chunked linear cross-entropy: its definition, its gradients and its peak memory."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_plain

# Peak memory that one head adds, in a fresh process: the kernel's high-water mark after resetting it.
PEAK_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from moonlet.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_plain

def memory(field):
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(field)) * 1024

N, V, D = 2048, 16384, 64
hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D).mul_(0.1).requires_grad_()
labels = torch.randint(0, V, (N,))
linear_cross_entropy(hidden[:8], weight, labels[:8], 8).backward()
hidden.grad = weight.grad = None
open('/proc/self/clear_refs', 'w').write('5')
before = memory('VmRSS')
if sys.argv[1] == 'chunked':
    loss = linear_cross_entropy(hidden, weight, labels, 256)
else:
    loss = linear_cross_entropy_plain(hidden, weight, labels)
loss.backward()
print(memory('VmHWM') - before, loss.item())
"""


def problem(tokens: int, vocab: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=random, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    labels[torch.rand(tokens, generator=random) < 0.3] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(2, 30), st.integers(1, 8), st.integers(1, 50), st.integers(0, 2**16))
def test_chunks_equal_the_definition(tokens: int, vocab: int, dim: int, chunk: int, seed: int):
    hidden, weight, labels = problem(tokens, vocab, dim, seed)
    chunked = linear_cross_entropy(hidden, weight, labels, chunk)
    plain = linear_cross_entropy_plain(hidden, weight, labels)
    torch.testing.assert_close(chunked, plain, atol=1e-10, rtol=1e-12)
    ours = torch.autograd.grad(3 * chunked, (hidden, weight))
    for got, expected in zip(ours, torch.autograd.grad(3 * plain, (hidden, weight))):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def test_gradcheck_of_both_inputs():
    hidden, weight, labels = problem(7, 5, 3)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, 3), (hidden, weight))


def test_sum_not_mean_of_means():
    """Token losses [4] and [0, 0, 0] are 4 together, whatever the split: the caller divides once (B38)."""
    weight = torch.eye(2)
    bad, good = torch.tensor([[4.0, 0.0]]), torch.tensor([[40.0, 0.0]]).expand(3, 2)
    parts = (
        linear_cross_entropy(bad, weight, torch.tensor([1]), 8),
        linear_cross_entropy(good, weight, torch.zeros(3).long(), 8),
    )
    whole = linear_cross_entropy(torch.cat([bad, good]), weight, torch.tensor([1, 0, 0, 0]), 8)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert whole.item() / 4 == pytest.approx(1.0, abs=0.01)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.eye(2), torch.tensor([1]), 4)
    loss.backward()
    assert loss.item() == 400.0
    torch.testing.assert_close(hidden.grad, torch.tensor([[1.0, -1.0]]))


def test_nothing_to_learn_from():
    hidden, weight, labels = problem(4, 3, 2)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), 2)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0


def test_autocast_runs_the_products_in_its_dtype():
    hidden, weight, labels = (x.float() if x.is_floating_point() else x for x in problem(32, 20, 16))
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, 8)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    exact = linear_cross_entropy_plain(hidden, weight, labels)
    assert 0 < abs(loss.item() / exact.item() - 1) < 0.02


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for the peak memory")
def test_peak_memory_is_a_quarter_at_most():
    """B39: a chunk loop that saves its chunks saves nothing."""

    def peak(kind: str) -> tuple[int, float]:
        run = subprocess.run([sys.executable, "-c", PEAK_SCRIPT, kind], capture_output=True, text=True, check=True)
        used, loss = run.stdout.split()
        return int(used), float(loss)

    full, chunked = peak("full"), peak("chunked")
    print(f"full logits +{full[0] >> 20} MiB, chunked +{chunked[0] >> 20} MiB, ratio {full[0] / chunked[0]:.1f}")
    assert full[0] >= 4 * chunked[0]
