"""Short convolution: gradients with windows, packed documents, continuation (bugs B06, B07)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonlet.ops.short_conv import short_conv

WIDTH = 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_by_hand() -> None:
    x, weight = torch.tensor([1.0, 2, 3]).view(1, 3, 1), torch.tensor([[1.0, 10, 100, 1000]])
    y, window = short_conv(x, weight, activation=False)
    assert y.flatten().tolist() == [1000, 2100, 3210]
    assert window.tolist() == [[[0, 1, 2, 3]]]
    activated, _ = short_conv(x, weight)
    torch.testing.assert_close(activated, torch.nn.functional.silu(y))


def test_equals_torch_conv1d() -> None:
    x, weight = normal(2, 11, 6), normal(6, WIDTH, seed=1)
    expected = torch.nn.functional.conv1d(x.mT, weight.unsqueeze(1), padding=WIDTH - 1, groups=6)[..., :11].mT
    torch.testing.assert_close(short_conv(x, weight, activation=False)[0], expected)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_with_windows(tokens: int, packed: bool) -> None:
    """The loss is on the outputs and on the final window, also where a document is shorter than the window."""
    batch, seq_lens = (2, None) if not packed else (1, (tokens, 2, tokens))
    length = tokens if seq_lens is None else sum(seq_lens)
    documents = batch if seq_lens is None else len(seq_lens)
    leaves = [normal(batch, length, 3), normal(3, WIDTH, seed=1), normal(documents, 3, WIDTH, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]

    def run(x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x, weight, initial_window=window, seq_lens=seq_lens)

    assert torch.autograd.gradcheck(run, leaves)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_packed_weight_gradient_is_the_sum_over_documents(lengths: list[int]) -> None:
    x, cotangent = normal(1, sum(lengths), 3), normal(1, sum(lengths), 3, seed=3)
    weight = normal(3, WIDTH, seed=1).requires_grad_()
    packed, _ = short_conv(x, weight, seq_lens=lengths)
    (d_packed,) = torch.autograd.grad(packed, weight, cotangent)
    alone = [short_conv(part, weight)[0] for part in x.split(lengths, 1)]
    assert torch.equal(packed, torch.cat(alone, dim=1))
    d_alone = [torch.autograd.grad(y, weight, d)[0] for y, d in zip(alone, cotangent.split(lengths, 1))]
    torch.testing.assert_close(d_packed, torch.stack(d_alone).sum(0), atol=1e-6, rtol=1e-6)


def test_seq_lens_with_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="packed row"):
        short_conv(normal(2, 5, 3), normal(3, WIDTH), seq_lens=(5,))


def test_a_document_never_sees_its_neighbour() -> None:
    x, weight = normal(1, 12, 3), normal(3, WIDTH, seed=1)
    poisoned = x.clone()
    poisoned[:, 4] = torch.nan
    y, _ = short_conv(x, weight, seq_lens=(5, 7))
    other, _ = short_conv(poisoned, weight, seq_lens=(5, 7))
    assert torch.equal(y[:, 5:], other[:, 5:])


@pytest.mark.parametrize("split", [1, 2, 3, 4, 7])
def test_continues_from_a_window(split: int) -> None:
    x, weight = normal(2, 8, 3), normal(3, WIDTH, seed=1)
    y, final = short_conv(x, weight)
    first, window = short_conv(x[:, :split], weight)
    second, end = short_conv(x[:, split:], weight, initial_window=window)
    assert torch.equal(torch.cat([first, second], dim=1), y) and torch.equal(end, final)
