"""MXFP4 against the released encoder's vectors, its plain definition, and every byte there is (B17)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from conftest import golden_stems
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.mxfp4 import BLOCK, GRID, dequantize, dequantize_plain, quantize, quantize_plain


def cases(golden, stem):
    tensors = golden.tensors(stem)
    names = sorted({name.split("/")[0] for name in tensors})
    return [
        (name, {key.split("/")[1]: tensors[key] for key in tensors if key.startswith(f"{name}/")}) for name in names
    ]


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("i_mxfp4*"))
def test_golden_decode_is_exact(golden, stem):
    checked = 0
    for _, case in cases(golden, stem):
        for key in case:
            if key.startswith("dequant_"):
                want = case[key]
                assert torch.equal(dequantize(case["weight_packed"], case["weight_scale"], want.dtype), want)
                checked += 1
    assert checked


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("i_mxfp4*"))
def test_golden_encode_is_byte_equal(golden, stem):
    checked = 0
    for _, case in cases(golden, stem):
        for key in case:
            if key.startswith("weight_") and case[key].is_floating_point():
                for encoder in (quantize, quantize_plain):
                    packed, scale = encoder(case[key])
                    assert torch.equal(packed, case["weight_packed"])
                    assert torch.equal(scale, case["weight_scale"])
                checked += 1
    assert checked


def test_low_nibble_is_the_even_column():
    packed = torch.full((1, 16), 0xA3, dtype=torch.uint8)
    assert dequantize(packed, torch.tensor([[128]], dtype=torch.uint8), torch.float32)[0, :2].tolist() == [3.0, -2.0]


def test_every_scale_byte_with_every_code_matches_the_definition():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes << 4).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    plain = dequantize_plain(packed, scale).float()
    assert torch.equal(dequantize(packed, scale, torch.float32).nan_to_num(7), plain.nan_to_num(7))
    smallest = dequantize(packed[:1], scale[:1], torch.float32)
    assert smallest[0, 4] == math.ldexp(1.0, -127) > 0, "scale byte 0 is 2^-127, not zero"
    assert dequantize(packed[255:], scale[255:], torch.float32).isnan().all()


@settings(max_examples=200, deadline=None)
@given(
    codes=st.lists(st.integers(0, 15), min_size=BLOCK, max_size=BLOCK),
    top=st.sampled_from([6, 7, 14, 15]),
    place=st.integers(0, BLOCK - 1),
    exponent=st.integers(0, 252),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_the_encoder_can_write_survives_a_round_trip(codes, top, place, exponent, dtype):
    """Its blocks reach 4 or 6 somewhere, whatever the other codes are (negative zero among them)."""
    codes[place] = top
    packed = torch.tensor([[low | high << 4 for low, high in zip(codes[0::2], codes[1::2])]], dtype=torch.uint8)
    scale = torch.tensor([[exponent]], dtype=torch.uint8)
    again, scale_again = quantize(dequantize(packed, scale, dtype))
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, scale)


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.integers(0, 15), min_size=BLOCK, max_size=BLOCK), exponent=st.integers(0, 252))
def test_any_finite_block_keeps_its_values(codes, exponent):
    """A block that only reaches 3 is written with a smaller scale: other bytes, the same numbers."""
    packed = torch.tensor([[low | high << 4 for low, high in zip(codes[0::2], codes[1::2])]], dtype=torch.uint8)
    values = dequantize(packed, torch.tensor([[exponent]], dtype=torch.uint8), torch.float32)
    assert torch.equal(dequantize(*quantize(values), torch.float32), values)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(
        st.floats(-8, 8, width=32) | st.sampled_from([(a + b) / 2 for a, b in pairwise(GRID)]),
        min_size=BLOCK,
        max_size=BLOCK,
    ),
    shift=st.integers(-140, 120),
)
def test_fast_encoder_equals_the_definition(values, shift):
    weight = (torch.tensor([values], dtype=torch.float64) * math.ldexp(1.0, shift)).float()
    for fast, plain in zip(quantize(weight), quantize_plain(weight)):
        assert torch.equal(fast, plain)


def test_ties_go_to_the_even_code():
    ties = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
    weight = torch.tensor([[tie for tie, _ in ties] + [6.0] + [0.0] * (BLOCK - len(ties) - 1)])
    assert dequantize(*quantize(weight), torch.float32)[0, : len(ties)].tolist() == [want for _, want in ties]


def test_zero_and_non_finite_blocks():
    weight = torch.zeros(3, BLOCK)
    weight[1, 5], weight[2, 7] = math.nan, math.inf
    packed, scale = quantize(weight)
    assert scale.flatten().tolist() == [0, 255, 255]
    decoded = dequantize(packed, scale, torch.float32)
    assert torch.equal(decoded[0], torch.zeros(BLOCK)) and decoded[1:].isnan().all()


def test_the_largest_finite_weights_stay_finite():
    weight = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    assert dequantize(*quantize(weight), torch.float32).isfinite().all()


def test_stacks_of_experts_decode_like_each_expert():
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = quantize(weight)
    assert packed.shape == (3, 8, 32) and scale.shape == (3, 8, 2)
    for expert in range(3):
        assert torch.equal(packed[expert], quantize(weight[expert])[0])
        assert torch.equal(
            dequantize(packed, scale, torch.float32)[expert], dequantize(packed[expert], scale[expert], torch.float32)
        )


def test_wrong_widths_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.zeros(4, 24))
    with pytest.raises(ValueError, match="not one MXFP4 tensor"):
        dequantize(torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), torch.float32)
