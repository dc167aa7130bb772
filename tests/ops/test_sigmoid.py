"""The logistic function: its definition, its gradient, and bits that do not depend on the neighbours."""

from __future__ import annotations

import torch

from moonlet.ops.sigmoid import sigmoid


def test_every_number_has_its_own_bits():
    x = torch.cat([torch.randn(37) * 5, torch.tensor([-200.0, 200.0, 0.0, -torch.inf, torch.inf])])
    whole = sigmoid(x)
    torch.testing.assert_close(whole, torch.sigmoid(x), atol=1e-7, rtol=1e-6)
    for start in range(len(x)):
        assert torch.equal(sigmoid(x[start:]), whole[start:])
    assert sigmoid(torch.tensor([torch.nan])).isnan().all()


def test_gradient():
    x = torch.randn(11, dtype=torch.float32, requires_grad=True)
    (grad,) = torch.autograd.grad(sigmoid(x).sum(), x)
    torch.testing.assert_close(grad, torch.sigmoid(x.detach()) * torch.sigmoid(-x.detach()), atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradcheck(sigmoid, x.detach().double().requires_grad_())
