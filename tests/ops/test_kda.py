"""KDA against golden vectors, pencil numbers and its own definition, under every kernel setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonlet.ops.kda import kda, kda_gate, kda_gate_plain, kda_recurrent, kda_step, l2_normalize
from moonlet.ops.kda_chunk import kda_chunk

pytestmark = pytest.mark.usefixtures("which_kernels")
NAMES = ("o", "final_state", "d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial")
GATES = ("usual", "floor", "wide", "none", "deep", "spikes")


def random_gate(kind: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return {
        "usual": -5 * torch.sigmoid(1.5 * noise - 3),
        "floor": torch.full_like(noise, -5.0),
        "wide": -5 * torch.sigmoid(6 * noise),
        "none": -5 * torch.sigmoid(noise - 9),
        "deep": -60 * torch.sigmoid(3 * noise),
        "spikes": torch.where(noise > 1.5, -60.0, -0.1).double(),
    }[kind]


def random_inputs(
    batch: int, tokens: int, heads: int = 2, dims: tuple[int, int] = (16, 24), gate: str = "usual", seed: int = 0
) -> list[Tensor]:
    """q, k, v, g, beta in float64, exactly representable in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (l2_normalize(normal(batch, tokens, heads, dims[0])) for _ in range(2))
    v, beta = normal(batch, tokens, heads, dims[1]), torch.sigmoid(normal(batch, tokens, heads))
    g = random_gate(gate, (batch, tokens, heads, dims[0]), generator)
    return [x.float().double() for x in (q, k, v, g, beta)]


def run_with_grads(form: Any, inputs: Sequence[Tensor], num_states: int, **options: Any) -> dict[str, Tensor]:
    """Outputs and all gradients of a loss on o and on the final state, from a random initial state."""
    dtype, (heads, key_dim), value_dim = inputs[0].dtype, inputs[0].shape[-2:], inputs[2].shape[-1]
    generator = torch.Generator().manual_seed(99)
    initial, to_final = (torch.randn(num_states, heads, key_dim, value_dim, generator=generator) for _ in range(2))
    to_o = torch.randn(*inputs[2].shape, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial.to(dtype))]
    o, final = form(*leaves[:5], initial_state=leaves[5], **options)
    grads = torch.autograd.grad([o, final], leaves, [to_o.to(dtype), to_final.to(dtype)])
    return dict(zip(NAMES, (o.detach(), final.detach(), *grads)))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], ratio: float) -> None:
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-30)
        assert error <= ratio, f"{name}: relative error {error:.2e} > {ratio:.0e}"


# --- golden vectors


def test_golden(golden: Any) -> None:
    for case in golden.info("a_kda_op")["cases"]:
        check_golden_case(case, golden.tensors("a_kda_op", case["name"]))


def check_golden_case(case: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    heads, key_dim = case["H"], case["K"]
    inputs = {n.removeprefix("in/"): x for n, x in tensors.items() if n.startswith("in/") and n != "in/cu_seqlens"}
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    seq_lens = None if case["cu_seqlens"] is None else tuple(torch.tensor(case["cu_seqlens"]).diff().tolist())
    found = {
        "q_l2": l2_normalize(leaves["q"], case["l2norm_eps"]),
        "k_l2": l2_normalize(leaves["k"], case["l2norm_eps"]),
        "beta": torch.sigmoid(leaves["beta_raw"]),
        "log_decay": kda_gate(
            leaves["g_raw"], leaves["A_log"], leaves["dt_bias"].view(heads, key_dim), case["lower_bound"]
        ),
    }
    initial = leaves["initial_state"].mT if "initial_state" in leaves else None  # golden states are value first
    o, final = kda(
        found["q_l2"], found["k_l2"], leaves["v"], found["log_decay"], found["beta"],
        scale=case["scale"], initial_state=initial, seq_lens=seq_lens,
    )  # fmt: skip
    found |= {"o": o, "final_state": final.mT}
    cotangents = [tensors["cotangent/o"], tensors["cotangent/final_state"]]
    grads = torch.autograd.grad([o, found["final_state"]], list(leaves.values()), cotangents)
    pairs = {f"out/{name}": value for name, value in found.items()}
    pairs |= {f"grad/{name}": value for name, value in zip(leaves, grads)}
    for name, value in pairs.items():
        torch.testing.assert_close(value, tensors[name], atol=5e-6, rtol=5e-6, msg=lambda m, n=name: f"{n}: {m}")


# --- pencil numbers (bugs B02, B03)


def test_recurrence_by_hand() -> None:
    e = torch.tensor([[1.0, 0], [1, 0]]).view(1, 2, 1, 2)
    v = torch.tensor([[1.0, 2], [3, 0]]).view(1, 2, 1, 2)
    g, beta = torch.full((1, 2, 1, 2), math.log(0.5)), torch.tensor([1, 0.5]).view(1, 2, 1)
    for form in (kda, kda_recurrent, kda_chunk):
        o, state = form(e, e, v, g, beta, scale=1.0)
        torch.testing.assert_close(o.view(2, 2), torch.tensor([[1.0, 2], [1.75, 0.5]]))
        torch.testing.assert_close(state.view(2, 2), torch.tensor([[1.75, 0.5], [0, 0]]))


@pytest.mark.parametrize(
    ("logit", "A_log", "bounded", "softplus"),
    [(0.0, 0.0, -2.5, -0.6931472), (1.0, math.log(2), -4.4039854, -2.6265234)],
)
def test_gate_by_hand(logit: float, A_log: float, bounded: float, softplus: float) -> None:
    f, A, bias = torch.full((1, 1, 1, 1), logit), torch.tensor([A_log]), torch.zeros(1, 1)
    assert kda_gate(f, A, bias, -5.0).item() == pytest.approx(bounded, abs=1e-6)
    assert kda_gate(f, A, bias, None).item() == pytest.approx(softplus, abs=1e-6)


def test_gate_stays_in_its_bounds_and_has_exact_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    f = 30 * torch.randn(2, 9, 3, 16, generator=generator)
    A, bias = torch.randn(3, generator=generator), torch.randn(3, 16, generator=generator)
    d_out = torch.randn(2, 9, 3, 16, generator=generator)
    for bound in (-5.0, -2.0, None):
        leaves = [x.clone().requires_grad_() for x in (f, A, bias)]
        wide = [x.double().requires_grad_() for x in (f, A, bias)]
        g, expected = kda_gate(*leaves, bound), kda_gate_plain(*wide, bound)
        assert bound is None or bool(((g >= bound) & (g <= 0)).all())
        found = dict(zip("gfAb", (g, *torch.autograd.grad(g, leaves, d_out))))
        assert_close(found, dict(zip("gfAb", (expected, *torch.autograd.grad(expected, wide, d_out.double())))), 2e-6)


# --- the fast forms are the definition (bug B04)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seq_lens", [None, (5, 1, 65, 16, 32)])
def test_equals_the_definition(gate: str, seq_lens: tuple[int, ...] | None) -> None:
    batch, states = (2, 2) if seq_lens is None else (1, len(seq_lens))
    inputs = random_inputs(batch, 119, gate=gate)
    expected = run_with_grads(kda_recurrent, inputs, states, seq_lens=seq_lens)
    assert_close(run_with_grads(kda, [x.float() for x in inputs], states, seq_lens=seq_lens), expected, 2e-6)
    assert_close(run_with_grads(kda, inputs, states, seq_lens=seq_lens), expected, 1e-13)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_any_length(tokens: int) -> None:
    inputs = random_inputs(1, tokens, dims=(8, 8))
    expected = run_with_grads(kda_recurrent, inputs, 1)
    assert_close(run_with_grads(kda, [x.float() for x in inputs], 1), expected, 2e-6)


@pytest.mark.parametrize("dims", [(64, 64), (64, 48), (40, 72), (128, 128), (4, 6), (1, 3)])
def test_any_head_size(dims: tuple[int, int]) -> None:
    inputs = random_inputs(1, 35, dims=dims)
    expected = run_with_grads(kda_recurrent, inputs, 1)
    assert_close(run_with_grads(kda, [x.float() for x in inputs], 1), expected, 2e-6)


def test_fifty_repeats_are_equal_to_the_bit(which_kernels: str) -> None:
    inputs = [x.float() for x in random_inputs(1, 281, dims=(8, 8), heads=1)]
    seq_lens = (65, 66, 71, 79)
    first = run_with_grads(kda, inputs, 4, seq_lens=seq_lens)
    assert_close(first, run_with_grads(kda_recurrent, [x.double() for x in inputs], 4, seq_lens=seq_lens), 1e-5)
    for _ in range(50 if which_kernels != "naive" else 1):
        again = run_with_grads(kda, inputs, 4, seq_lens=seq_lens)
        assert all(torch.equal(again[name], first[name]) for name in NAMES)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_packed_documents_are_documents_alone(lengths: list[int], seed: int) -> None:
    inputs = [x.float() for x in random_inputs(1, sum(lengths), dims=(8, 16), seed=seed)]
    packed, states = kda(*inputs, seq_lens=lengths)
    documents = zip(*(x.split(lengths, dim=1) for x in inputs))
    alone = [kda(*document) for document in documents]
    assert torch.equal(packed, torch.cat([o for o, _ in alone], dim=1))
    assert torch.equal(states, torch.cat([state for _, state in alone]))


# --- state contract (bugs B01, B08, B09)


@pytest.mark.parametrize("split", [1, 2, 3, 15, 16, 17, 63, 64, 65, 69])
def test_continues_from_a_state(split: int) -> None:
    inputs = random_inputs(1, 70, heads=1, dims=(4, 6))  # K != V: a transposed state cannot pass
    o, final = kda(*inputs)
    first, middle = kda(*(x[:, :split] for x in inputs))
    second, end = kda(*(x[:, split:] for x in inputs), initial_state=middle)
    torch.testing.assert_close(torch.cat([first, second], dim=1), o, atol=1e-10, rtol=0)
    torch.testing.assert_close(end, final, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dims", [(16, 24), (16, 72), (5, 3)])
def test_steps_equal_the_whole(dims: tuple[int, int]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        inputs = [x.to(dtype) for x in random_inputs(3, 20, dims=dims)]
        o, final = kda(*inputs)
        state = torch.zeros_like(final)
        for t in range(20):
            o_t, state = kda_step(*(x[:, t] for x in inputs), state)
            torch.testing.assert_close(o_t, o[:, t], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(state, final, atol=tolerance, rtol=tolerance)


def test_a_step_leaves_the_given_state_alone_and_has_gradients() -> None:
    inputs = [x[:, 0].float().requires_grad_() for x in random_inputs(2, 1)]
    state = torch.randn(2, 2, 16, 24)
    before = state.clone()
    o, _ = kda_step(*inputs, state)
    with torch.no_grad():
        again, _ = kda_step(*inputs, state)
    assert torch.equal(state, before)
    torch.testing.assert_close(again, o, atol=2e-6, rtol=2e-6)
    expected, _ = kda_recurrent(*(x.unsqueeze(1) for x in inputs), initial_state=state)
    grads = torch.autograd.grad(o.sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), inputs), atol=2e-6, rtol=2e-6)


def test_a_document_never_sees_its_neighbour() -> None:
    seq_lens = (37, 50)
    inputs = [x.float() for x in random_inputs(1, 87)]
    o, states = kda(*inputs, seq_lens=seq_lens)
    for change in (torch.nan, -0.5):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, 36] = change
        other, other_states = kda(*changed, seq_lens=seq_lens)
        assert torch.equal(o[:, 37:], other[:, 37:]) and torch.equal(states[1], other_states[1])
    torch.testing.assert_close(other[:, :36], o[:, :36], atol=1e-6, rtol=1e-6)  # nor does a token see a later one
    leaves = [x.clone().requires_grad_() for x in inputs]
    kda(*leaves, seq_lens=seq_lens)[0][:, 37:].square().sum().backward()
    assert all(not x.grad[:, :37].any() for x in leaves)


@pytest.mark.parametrize("seq_lens", [(5, 4), (5, 0, 5), (), (11, -1)])
def test_wrong_seq_lens_are_refused(seq_lens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="seq_lens"):
        kda(*random_inputs(1, 10), seq_lens=seq_lens)


def test_seq_lens_with_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="packed row"):
        kda(*random_inputs(2, 10), seq_lens=(10,))


# --- numerics


def test_repeated_keys_without_decay() -> None:
    """The powers of the chunk matrix reach 2^15 here: an inverse by a Neumann series loses all digits in float32."""
    q, k, v, g, beta = random_inputs(1, 64)
    inputs = q, k[:, :1].expand_as(k).contiguous(), v, torch.full_like(g, -1e-3), torch.full_like(beta, 0.998)
    inputs = [x.float().double() for x in inputs]
    expected = run_with_grads(kda_recurrent, inputs, 1)
    assert_close(run_with_grads(kda, [x.float() for x in inputs], 1), expected, 5e-6)


@pytest.mark.parametrize("floor", [-5.0, -60.0, -1000.0, 0.0])
def test_gate_at_one_value_everywhere_has_finite_gradients(floor: float) -> None:
    q, k, v, g, beta = random_inputs(1, 50)
    inputs = [q, k, v, torch.full_like(g, floor), beta]
    expected = run_with_grads(kda_recurrent, inputs, 1)
    found = run_with_grads(kda, [x.float() for x in inputs], 1)
    assert all(bool(x.isfinite().all()) for x in found.values())
    assert_close(found, {name: x for name, x in expected.items() if x.norm() > 1e-20}, 2e-6)


def test_mixed_rates_of_decay_in_one_chunk() -> None:
    """Channels that forget at once beside channels that keep everything, chunk after chunk."""
    inputs = random_inputs(1, 96)
    inputs[3] = torch.where(torch.arange(16) % 3 == 0, -60.0, -1e-4).expand_as(inputs[3]).double().contiguous()
    expected = run_with_grads(kda_recurrent, inputs, 1)
    assert_close(run_with_grads(kda, [x.float() for x in inputs], 1), expected, 2e-6)


def test_half_precision_is_computed_in_float32() -> None:
    inputs = [x.bfloat16() for x in random_inputs(1, 20)]
    o, state = kda(*inputs)
    expected, _ = kda(*(x.float() for x in inputs))
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(o, expected.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = kda(*(x.float() for x in inputs))
    assert torch.equal(under_autocast, expected)


def test_l2_normalize_adds_eps_to_the_sum() -> None:
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(l2_normalize(x), x / math.sqrt(4e-6 + 1e-6))


@pytest.mark.parametrize("split", [4112, 8200])
def test_rows_longer_than_a_segment(which_kernels: str, split: int) -> None:
    """More chunks than are held at once, and one document much longer than its neighbours."""
    if which_kernels == "naive":
        pytest.skip("the definition has no segments")
    inputs = [x.float() for x in random_inputs(1, 9000, heads=1, dims=(8, 8))]

    def in_two_parts(*whole: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        first, state = kda(*(x[:, :split] for x in whole), initial_state=initial_state)
        second, state = kda(*(x[:, split:] for x in whole), initial_state=state)
        return torch.cat([first, second], dim=1), state

    assert_close(run_with_grads(kda, inputs, 1), run_with_grads(in_two_parts, inputs, 1), 1e-6)
    seq_lens = (8300, 9, 600, 91)
    packed = run_with_grads(kda, inputs, 4, seq_lens=seq_lens)
    alone = [kda(*document) for document in zip(*(x[:, -91:].split(91, 1) for x in inputs))]
    torch.testing.assert_close(kda(*inputs, seq_lens=seq_lens)[0][:, -91:], alone[0][0], atol=0, rtol=0)
    assert all(bool(x.isfinite().all()) for x in packed.values())
