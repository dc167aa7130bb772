"""Newton-Schulz against the polar factor by SVD, and its two forms against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.newton_schulz import GRAM_ASPECT, newton_schulz, polar

# Five steps of the quintic leave singular values in this band.
LOW, HIGH = 0.6, 1.25


def random_matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_polar_is_the_nearest_orthogonal_matrix():
    matrix = random_matrices(3, 5, 8, dtype=torch.float64)
    factor = polar(matrix)
    torch.testing.assert_close(factor @ factor.mT, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))
    stretch = factor.mT @ matrix  # symmetric and positive: what is left of the matrix is no rotation
    torch.testing.assert_close(stretch, stretch.mT)
    assert torch.linalg.eigvalsh(stretch).min() > -1e-10


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 24), st.integers(1, 90), st.integers(0, 2**16))
def test_same_singular_vectors_and_values_near_one(batch: int, rows: int, columns: int, seed: int):
    matrix = random_matrices(batch, rows, columns, seed=seed, dtype=torch.float64)
    result, exact = newton_schulz(matrix, steps=12), polar(matrix)
    assert result.shape == matrix.shape
    # U diag(s) V^T times the transposed polar factor is U diag(s) U^T: symmetric only if U and V are the same.
    values = torch.linalg.svdvals(result)
    assert values.max() < HIGH
    inner = result @ exact.mT
    torch.testing.assert_close(inner, inner.mT, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(4, 16, 16), (4, 16, 40), (4, 40, 16), (2, 8, 64), (2, 64, 8)])
def test_five_steps_reach_the_band(shape: tuple[int, int, int]):
    values = torch.linalg.svdvals(newton_schulz(random_matrices(*shape)))
    assert values.min() > 0.3  # a square Gaussian matrix has singular values near zero
    assert values.max() < HIGH
    if shape[1] != shape[2]:
        assert values.min() > LOW


@pytest.mark.parametrize("aspect", [GRAM_ASPECT, 2 * GRAM_ASPECT])
def test_gram_form_is_the_same_polynomial(aspect: int):
    wide = random_matrices(2, 8, 8 * aspect)
    by_gram = newton_schulz(wide)
    # One column fewer than the threshold takes the plain form; a zero column changes nothing but the shape.
    plain = torch.stack([newton_schulz(part) for part in wide.double()])
    torch.testing.assert_close(by_gram.double(), plain, atol=2e-5, rtol=0)


def test_batch_equals_one_by_one_and_transposes():
    stack = random_matrices(5, 12, 20)
    together = newton_schulz(stack)
    torch.testing.assert_close(together, torch.stack([newton_schulz(m) for m in stack]), atol=2e-6, rtol=0)
    torch.testing.assert_close(newton_schulz(stack.mT), together.mT, atol=2e-6, rtol=0)


def test_zero_stays_zero_and_scale_does_not_matter():
    assert newton_schulz(torch.zeros(2, 4, 6)).count_nonzero() == 0
    matrix = random_matrices(1, 6, 9)
    for scale in (1e-18, 1e12):
        torch.testing.assert_close(newton_schulz(matrix * scale), newton_schulz(matrix), atol=1e-5, rtol=0)


def test_bfloat16_stays_in_the_band():
    values = torch.linalg.svdvals(newton_schulz(random_matrices(2, 16, 80), dtype=torch.bfloat16).float())
    assert values.min() > 0.55 and values.max() < 1.3
