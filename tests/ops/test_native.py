"""Every C++ kernel against its plain definition: values and gradients, odd shapes, determinism; and how they are built."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.errors import KernelError
from moonlet.ops.attn_residuals import mix_plain
from moonlet.ops.backend import use_kernels
from moonlet.ops.kda import kda, kda_gate, kda_gate_plain, l2_normalize
from moonlet.ops.kda_inputs import conv_norm, kda_inputs
from moonlet.ops.native import build, cross_entropy, library, norm, usable
from moonlet.ops.native.attn_res_mix import attn_res_mix
from moonlet.ops.native.kda_inputs import conv_norm as native_conv_norm
from moonlet.ops.rms_norm import gated_head_norm, rms_norm
from moonlet.ops.short_conv import short_conv


@pytest.fixture(autouse=True)
def native_kernels() -> Iterator[None]:
    try:
        setting = use_kernels("native")
        setting.__enter__()
    except KernelError as error:
        pytest.skip(str(error))
    yield
    setting.__exit__(None, None, None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values_and_grads(form: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs; the cotangent is not contiguous, as real ones may be."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = form(*leaves)
    cotangent = normal(*reversed(out.shape), seed=9).permute(*reversed(range(out.ndim))).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_same(form: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Native float32 against the definition in float64."""
    found = values_and_grads(form, inputs)
    expected = values_and_grads(plain, [x.double() for x in inputs])
    for place, (value, reference) in enumerate(zip(found, expected)):
        assert value.shape == reference.shape
        error = (value.double() - reference).norm() / reference.norm().clamp_min(1e-30)
        assert error <= 2e-6, f"result {place}: relative error {error:.1e}"


# --- twins


@pytest.mark.parametrize("seq_lens", [None, (1, 2, 3, 4, 150, 127, 13)])
@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_conv_norm(seq_lens: tuple[int, ...] | None, eps: float | None, width: int) -> None:
    def form(x: Tensor, weight: Tensor) -> Tensor:
        return native_conv_norm(x, weight, num_heads=3, eps=eps, seq_lens=seq_lens)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        heads = short_conv(x, weight, seq_lens=seq_lens)[0].unflatten(-1, (3, -1))
        return heads if eps is None else l2_normalize(heads, eps)

    shape = (2, 131, 48) if seq_lens is None else (1, sum(seq_lens), 48)
    assert_same(form, plain, [normal(*shape), normal(48, width, seed=1)])


def test_conv_norm_reads_a_part_of_a_wider_product() -> None:
    wide, weight = normal(1, 40, 96), normal(32, 4, seed=1)
    part = wide[..., 32:64]
    whole = native_conv_norm(part.contiguous(), weight, num_heads=2, eps=1e-6)
    assert torch.equal(native_conv_norm(part, weight, num_heads=2, eps=1e-6), whole)


def test_conv_norm_of_a_document_does_not_depend_on_its_neighbours() -> None:
    x, weight, seq_lens = normal(1, 280, 32), normal(32, 4, seed=1), (130, 1, 149)
    packed = native_conv_norm(x, weight, num_heads=2, eps=1e-6, seq_lens=seq_lens)
    alone = [native_conv_norm(part, weight, num_heads=2, eps=1e-6) for part in x.split(seq_lens, dim=1)]
    assert torch.equal(packed, torch.cat(alone, dim=1))
    x[:, 129] = torch.nan
    poisoned = native_conv_norm(x, weight, num_heads=2, eps=1e-6, seq_lens=seq_lens)
    assert torch.equal(poisoned[:, 130:], packed[:, 130:])


@pytest.mark.parametrize("which", ["native", "torch"])
@pytest.mark.parametrize("head_dim", [16, 6])
def test_kda_inputs(which: str, head_dim: int) -> None:
    """The composition, also where head sizes send it to torch."""
    seq_lens, channels = (9, 30), 2 * head_dim
    raw = [normal(1, 39, channels, seed=i) for i in range(3)]
    weights = tuple(normal(channels, 4, seed=i + 5) for i in range(3))
    with use_kernels(which):
        q, k, v = kda_inputs(*raw, weights, num_heads=2, seq_lens=seq_lens)  # type: ignore[arg-type]
    convolved = [short_conv(x, w, seq_lens=seq_lens)[0].unflatten(-1, (2, -1)) for x, w in zip(raw, weights)]
    torch.testing.assert_close(q, l2_normalize(convolved[0]), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(k, l2_normalize(convolved[1]), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(v, convolved[2], atol=2e-6, rtol=2e-6)
    with pytest.raises(ValueError, match="seq_lens"), use_kernels(which):
        conv_norm(raw[0], weights[0], num_heads=2, eps=None, seq_lens=(9, 29))


@pytest.mark.parametrize("bound", [-5.0, -1.0])
def test_gate(bound: float) -> None:
    inputs = [3 * normal(2, 140, 3, 16), normal(3, seed=1), normal(3, 16, seed=2)]
    assert_same(lambda f, A, b: kda_gate(f, A, b, bound), lambda f, A, b: kda_gate_plain(f, A, b, bound), inputs)


@pytest.mark.parametrize("shape", [(2, 150, 3, 16), (1, 64), (7, 128)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, gate, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    assert_same(lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: rms_norm(x, w, 1e-5), [x, weight])
    forms = [lambda x, g, w, f=f: f(x, g, w, 1e-5) for f in (norm.gated_head_norm, gated_head_norm)]
    assert_same(*forms, [x, gate, weight])  # type: ignore[arg-type]


@pytest.mark.parametrize("num_sources", [1, 2, 5, 9])
def test_attn_res_mix(num_sources: int) -> None:
    inputs = [normal(32, seed=50), *(normal(2, 133, 32, seed=i) * (i + 1) for i in range(num_sources))]
    if num_sources == 1:
        inputs[0] *= 0  # one source: its weight is 1 and the query has no gradient
    assert_same(
        lambda query, *sources: attn_res_mix(sources, query, 1e-5),
        lambda query, *sources: mix_plain(sources, query, 1e-5).out,
        inputs,
    )


def test_attn_res_mix_of_a_zero_query_is_the_mean() -> None:
    sources = [normal(3, 16, seed=i) for i in range(4)]
    torch.testing.assert_close(attn_res_mix(sources, torch.zeros(16), 1e-5), torch.stack(sources).mean(0))


def test_cross_entropy() -> None:
    logits, labels = 4 * normal(37, 64), torch.arange(37) % 64
    labels[::5] = -100
    assert_same(
        lambda x: cross_entropy.softmax_cross_entropy(x, labels),
        lambda x: F.cross_entropy(x, labels, reduction="none"),
        [logits],
    )
    in_place = logits.clone()
    losses = cross_entropy.softmax_cross_entropy_(in_place, labels)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels, reduction="sum").backward()
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(in_place, leaf.grad, atol=2e-6, rtol=2e-6)


def test_cross_entropy_of_extreme_logits() -> None:
    logits = torch.zeros(3, 16)
    logits[0, 3], logits[1], logits[2, 5] = 1e4, -1e4, torch.nan
    losses = cross_entropy.softmax_cross_entropy(logits, torch.tensor([3, 0, 0]))
    torch.testing.assert_close(losses[:2], torch.tensor([0.0, math.log(16)]))
    assert bool(losses[2].isnan())


def test_not_a_number_passes_through() -> None:
    x = normal(1, 20, 1, 16)
    x[0, 7] = torch.nan
    one = torch.zeros(1)
    assert bool(kda_gate(x, one, torch.zeros(1, 16), -5.0)[0, 7].isnan().all())
    assert bool(norm.rms_norm(x, torch.ones(16), 1e-5)[0, 7].isnan().all())
    assert bool(native_conv_norm(x.flatten(2), normal(16, 4), num_heads=1, eps=1e-6)[0, 7].isnan().all())
    assert bool(kda(x, x, x, -x.abs(), torch.ones(1, 20, 1))[0][0, 7:].isnan().all())


# --- determinism


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    def everything() -> list[Tensor]:
        qkv = [normal(1, 700, 32, seed=i) for i in range(3)]
        weights = tuple(normal(32, 4, seed=i + 5) for i in range(3))
        A_log, dt_bias, query, norm_weight = normal(2), normal(2, 16), normal(16), normal(16, seed=4)
        leaves = [x.requires_grad_() for x in (*qkv, *weights, A_log, dt_bias, query, norm_weight)]
        q, k, v = kda_inputs(*qkv, weights, num_heads=2, seq_lens=(300, 399, 1))  # type: ignore[arg-type]
        g = kda_gate(q, A_log, dt_bias, -5.0)
        o, _ = kda(q, k, v, g, torch.sigmoid(v.sum(-1)), seq_lens=(300, 399, 1))
        y = attn_res_mix([norm.gated_head_norm(o, v, norm_weight, 1e-5), v], query, 1e-5)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(one, everything()))
    finally:
        torch.set_num_threads(threads)


def test_memory_of_long_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few checkpoints the states between them are rebuilt: the same bits."""
    from moonlet.ops.native import kda as native

    inputs = [normal(1, 500, 2, 16, seed=i) for i in range(4)]
    leaves = [x.requires_grad_() for x in (l2_normalize(inputs[0]), l2_normalize(inputs[1]), inputs[2])]
    g, beta = -inputs[3].abs(), torch.full((1, 500, 2), 0.5)

    def grads() -> Any:
        o, state = native.kda(*leaves, g, beta, seq_lens=(17, 480, 3))
        return torch.autograd.grad(o.square().sum() + state.square().sum(), leaves)

    roomy = grads()
    monkeypatch.setattr(native, "CHECKPOINT_BYTES", 4 * 2 * 16 * 16 * 5)
    assert native._layout((17, 480, 3), (2, 16, 16), 1.0).interval == 7
    assert all(torch.equal(a, b) for a, b in zip(roomy, grads()))


# --- what is taken, how it is built


def test_usable_tells_what_the_kernels_take() -> None:
    lanes = library.load().lanes
    assert usable(torch.zeros(2, lanes), None, width=lanes)
    assert not usable(torch.zeros(2, lanes), width=lanes + 1)
    assert not usable(torch.zeros(2, lanes, dtype=torch.float64), width=lanes)
    with use_kernels("torch"):
        assert not usable(torch.zeros(2, lanes), width=lanes)


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "small.cpp").write_text('extern "C" long moonlet_lanes() { return 5; }')
    code = f"""
from pathlib import Path
from moonlet.ops.native import build, library
build.SOURCE_FOLDER = Path({str(tmp_path)!r})
print(library.load().lanes)
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def start(_: int) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(start, range(2)))
    assert outputs == ["5\n"] * 2
    assert len(list((tmp_path / "moonlet").iterdir())) == 1, "one library and no unfinished file"


def test_a_changed_source_flag_or_processor_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, flags = build.find_compiler(), ("-O2",)
    first = build._fingerprint(compiler, flags)
    assert build._fingerprint(compiler, flags) == first
    assert build._fingerprint(compiler, ("-O3",)) != first
    monkeypatch.setattr(build, "processor_name", lambda: "another processor")
    assert build._fingerprint(compiler, flags) != first


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 16])
def test_other_register_widths_give_the_same_numbers(lanes: int, tmp_path: Path) -> None:
    """One source for all processors: build it for other widths and run KDA and its neighbours with them."""
    code = f"""
import torch
from moonlet.ops.native import build, library
library.build = lambda: build.build(("-DMOONLET_LANES={lanes}", "-O1"))
from moonlet.ops.backend import use_kernels
torch.manual_seed(0)
q, k, v = (torch.randn(1, 83, 2 * 32).requires_grad_() for _ in range(3))
weights = tuple(torch.randn(64, 4) for _ in range(3))
from moonlet.ops.kda import kda, kda_gate
from moonlet.ops.kda_inputs import kda_inputs
from moonlet.ops.situ import situ_glu
results = []
for which in ("native", "torch"):
    with use_kernels(which):
        x = kda_inputs(q, k, v, weights, num_heads=2, seq_lens=(40, 43))
        g = kda_gate(x[0], torch.zeros(2), torch.zeros(2, 32), -5.0)
        o, state = kda(*x, g, torch.sigmoid(x[2].sum(-1)), seq_lens=(40, 43))
        o = situ_glu(o, x[2], 4.0, 25.0)
        results.append([o, state, *torch.autograd.grad(o.square().sum() + state.sum(), (q, k, v))])
assert library.load().lanes == {lanes}
print(max(((a - b).norm() / b.norm()).item() for a, b in zip(*results)))
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 5e-6
