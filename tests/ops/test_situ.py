"""SiTU-GLU against golden vectors and its definition, under every kernel setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moonlet.ops.situ import situ_glu, situ_glu_packed, situ_glu_plain, swiglu

pytestmark = pytest.mark.usefixtures("which_kernels")


def test_golden_values_and_gradients(golden: Any) -> None:
    for name, betas in golden.info("e_situ_glu").items():
        tensors = golden.tensors("e_situ_glu", name)
        for form in (in_halves, situ_glu_packed):
            x = tensors["x_gate_then_up"].clone().requires_grad_()
            y = form(x, betas["beta"], betas["linear_beta"])
            torch.testing.assert_close(y, tensors["y"], atol=5e-6, rtol=5e-6)
            (d_x,) = torch.autograd.grad(y, x, tensors["cotangent"])
            torch.testing.assert_close(d_x, tensors["grad_x"], atol=5e-6, rtol=5e-6)


def test_golden_half_precision(golden: Any) -> None:
    for name, betas in golden.info("e_situ_glu").items():
        tensors = golden.tensors("e_situ_glu", name)
        y = situ_glu_packed(tensors["x_bf16"], betas["beta"], betas["linear_beta"])
        assert torch.equal(y, tensors["y_bf16"])


def test_golden_mlp(golden: Any) -> None:
    tensors = golden.tensors("e_situ_glu", "mlp")
    (betas, *_) = golden.info("e_situ_glu").values()
    gate, up = (tensors["x"] @ tensors[f"param/{name}_proj.weight"].T for name in ("gate", "up"))
    y = situ_glu(gate, up, betas["beta"], betas["linear_beta"]) @ tensors["param/down_proj.weight"].T
    torch.testing.assert_close(y, tensors["y"], atol=5e-6, rtol=5e-6)


def in_halves(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    return situ_glu(*x.chunk(2, dim=-1), beta, linear_beta)


@pytest.mark.parametrize("spread", [1e-2, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("betas", [(4.0, 25.0), (1.5, 3.0)])
@pytest.mark.parametrize("form", [in_halves, situ_glu_packed])
def test_equals_the_definition(spread: float, betas: tuple[float, float], form: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (spread * torch.randn(3, 5, 48, generator=generator)).requires_grad_()
    d_out = torch.randn(3, 5, 24, generator=generator)
    wide = x.detach().double().requires_grad_()
    expected = situ_glu_plain(*wide.chunk(2, dim=-1), *betas)
    found = form(x, *betas)
    (d_x,), (d_wide,) = torch.autograd.grad(found, x, d_out), torch.autograd.grad(expected, wide, d_out.double())
    for value, reference in ((found, expected), (d_x, d_wide)):
        assert bool(value.isfinite().all())
        assert (value.double() - reference).norm() <= 2e-6 * reference.norm().clamp_min(1.0)


def test_double_precision_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, 4.0, 25.0), (gate, up))


def test_is_bounded_and_becomes_swiglu() -> None:
    huge = torch.tensor([1e6, -1e6, 1e6]), torch.tensor([1e6, 1e6, -1e6])
    assert situ_glu(*huge, 4.0, 25.0).tolist() == pytest.approx([100.0, 0.0, -100.0])
    gate, up = torch.linspace(-2, 2, 16), torch.linspace(1, -1, 16)
    torch.testing.assert_close(situ_glu(gate, up, 1e4, 1e4), swiglu(gate, up), atol=1e-6, rtol=1e-5)


def test_saves_only_its_inputs(which_kernels: str) -> None:
    if which_kernels == "naive":
        pytest.skip("the definition keeps every intermediate")
    saved: list[Tensor] = []
    gate, up = (torch.randn(4, 16).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        situ_glu(gate, up, 4.0, 25.0)
    assert len(saved) == 2
