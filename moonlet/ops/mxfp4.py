"""MXFP4: four-bit floats in blocks of 32 that share a power-of-two scale (k3_model.md section 3).

    w[o, i] = grid(code[o, i]) * 2^(scale[o, i // 32] - 127)

A code is sign << 3 | index into the E2M1 grid {0, .5, 1, 1.5, 2, 3, 4, 6}; two codes share a byte, the even column in
the low nibble. A scale is one E8M0 byte: 0 is 2^-127 (a subnormal float32, not zero) and 255 is NaN. The plain
definitions walk over the elements one by one; the others are their vectorised twins.

Legend: O rows, C input columns, G = C / 32 blocks in a row.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 255

_BIAS = 127
_GRID_EXPONENT = 2  # the largest grid value, 6, is 1.5 * 2^2
# A quarter of a binade in float32 bits: amax rounds to one mantissa bit, so that from 1.75 * 2^e it counts as 2^(e+1).
_HALF_OF_LAST_MANTISSA_BIT = 1 << 21
# Finite weights stay finite: a larger scale would send the code for 4 beyond float32.
_LARGEST_SCALE = 252


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode MXFP4.

    Args:
        packed: uint8 [..., O, C / 2], even columns in the low nibbles.
        scale: uint8 [..., O, C / 32].
        dtype: of the result; every value but those below 2^-133 is exact in bfloat16.

    Returns:
        [..., O, C].

    Raises:
        ValueError: the two shapes do not belong together.
    """
    columns = packed.shape[-1] * 2
    _check_shapes(packed, scale)
    pairs = _byte_table(packed.device)[packed.int()]
    values = pairs.view(*packed.shape[:-1], columns // BLOCK, BLOCK) * _scale_table(packed.device)[scale.int(), None]
    return values.view(*packed.shape[:-1], columns).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode MXFP4 by the rule of the released checkpoint (compressed-tensors).

    The scale exponent is that of the block's largest magnitude, rounded to one mantissa bit, minus 2; elements go to
    the nearest grid value, ties to the even code, and saturate at 6. An all-zero block has scale byte 0; a block with
    a NaN or an infinity becomes all NaN (scale byte 255). What the encoder itself wrote encodes to the same bytes.

    Args:
        weight: [..., O, C] of any float type.

    Returns:
        packed uint8 [..., O, C / 2] and scale uint8 [..., O, C / 32].

    Raises:
        ValueError: C is not a multiple of 32.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a multiple of {BLOCK} input columns, got {weight.shape[-1]}")
    blocks = weight.detach().float().reshape(*weight.shape[:-1], -1, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    scale = _scale_byte(amax)
    codes = _nearest_code(blocks * _inverse_scale(scale)[..., None])
    codes = codes.masked_fill((scale == NAN_SCALE)[..., None], 0).view(weight.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def dequantize_plain(packed: Tensor, scale: Tensor) -> Tensor:
    """`dequantize` of one matrix by its definition, element by element, in float64."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    result = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            byte, e8m0 = int(packed[row, column // 2]), int(scale[row, column // BLOCK])
            code = byte >> 4 if column % 2 else byte & 15
            factor = math.nan if e8m0 == NAN_SCALE else math.ldexp(1.0, e8m0 - _BIAS)
            result[row, column] = math.copysign(GRID[code & 7], -1.0 if code & 8 else 1.0) * factor
    return result


def quantize_plain(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of one matrix of finite values by its definition, element by element."""
    rows, columns = weight.shape
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    scale = torch.zeros(rows, columns // BLOCK, dtype=torch.uint8)
    for row in range(rows):
        for block in range(columns // BLOCK):
            values = weight[row, block * BLOCK : (block + 1) * BLOCK].double().tolist()
            mantissa, exponent = math.frexp(max(abs(value) for value in values))  # mantissa in [0.5, 1)
            exponent += -1 if mantissa < 0.875 else 0
            biased = exponent - _GRID_EXPONENT + _BIAS if mantissa else 0
            scale[row, block] = min(max(biased, 0), _LARGEST_SCALE)
            for offset, value in enumerate(values):
                code = _nearest_code_plain(value * math.ldexp(1.0, _BIAS - int(scale[row, block])))
                packed[row, (block * BLOCK + offset) // 2] |= code << (4 if offset % 2 else 0)
    return packed, scale


def _check_shapes(packed: Tensor, scale: Tensor) -> None:
    blocks, remainder = divmod(packed.shape[-1] * 2, BLOCK)
    if remainder or scale.shape != (*packed.shape[:-1], blocks):
        raise ValueError(f"packed {list(packed.shape)} and scale {list(scale.shape)} are not one MXFP4 tensor")


def _byte_table(device: torch.device) -> Tensor:
    """[256, 2]: the two grid values of each byte, low nibble first."""
    codes = torch.tensor([*GRID, *(-value for value in GRID)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)


def _scale_table(device: torch.device) -> Tensor:
    """[256]: 2^(byte - 127); made from float64, so that 2^-127 is the exact subnormal."""
    exponents = torch.arange(256, device=device, dtype=torch.float64) - _BIAS
    table = torch.exp2(exponents).float()
    table[NAN_SCALE] = math.nan
    return table


def _scale_byte(amax: Tensor) -> Tensor:
    bits = amax.contiguous().view(torch.int32) + _HALF_OF_LAST_MANTISSA_BIT
    byte = ((bits >> 23) - _GRID_EXPONENT).clamp(0, _LARGEST_SCALE)
    return torch.where(amax.isfinite(), byte, NAN_SCALE).to(torch.uint8)


def _inverse_scale(scale: Tensor) -> Tensor:
    return torch.exp2(_BIAS - scale.double()).float()


def _nearest_code(scaled: Tensor) -> Tensor:
    """E2M1 codes, uint8. Between two grid values the even code wins the tie: strict and weak bounds alternate."""
    size = scaled.abs()
    index = torch.zeros_like(scaled, dtype=torch.uint8)
    for position, (below, above) in enumerate(pairwise(GRID)):
        middle = (below + above) / 2
        index += size >= middle if position % 2 else size > middle
    return index | torch.signbit(scaled).to(torch.uint8) << 3


def _nearest_code_plain(value: float) -> int:
    size = abs(value)
    index = min(range(len(GRID)), key=lambda code: (abs(GRID[code] - size), code % 2))
    return index | (8 if math.copysign(1.0, value) < 0 else 0)
