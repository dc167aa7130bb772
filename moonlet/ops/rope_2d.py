"""Rotary positions on a plane, as MoonViT-V2 uses them (k3_model.md section 1).

Adjacent channels form pairs. With j = 0, 1, ..., K/4 - 1, pair 2j turns by column * theta^(-4j/K) and pair 2j+1 by
row * theta^(-4j/K). Frames of a video share the angles of their patches.

Legend: L patches, H heads, K head dim (a multiple of 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

THETA = 10_000.0


def plane_angles(height: int, width: int, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Angles in radians of each pair, for patches in row-major order: float32 [height * width, K / 2].

    Raises:
        ValueError: K is not a multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(f"2-D rotary positions need a head dim that is a multiple of 4, got {head_dim}")
    frequency = THETA ** (torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / -head_dim)
    rows = torch.arange(height, device=device).repeat_interleave(width)
    columns = torch.arange(width, device=device).repeat(height)
    position = torch.stack([columns, rows], dim=-1).float()
    return (frequency[:, None] * position[:, None, :]).flatten(1)


def rotate_pairs(x_LHK: Tensor, angles_LP: Tensor) -> Tensor:
    """Turn each adjacent pair of channels; x [L, H, K], angles [L, K / 2] -> [L, H, K] in x's dtype."""
    even, odd = x_LHK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = angles_LP.cos()[:, None], angles_LP.sin()[:, None]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2).to(x_LHK.dtype)


def rotate_plane_plain(x_LHK: Tensor, height: int, width: int) -> Tensor:
    """Both steps by their definition, patch by patch and pair by pair, in float64."""
    out = x_LHK.double().clone()
    head_dim = x_LHK.shape[-1]
    for patch in range(height * width):
        for pair in range(head_dim // 2):
            position = patch // width if pair % 2 else patch % width
            angle = position * THETA ** (-4 * (pair // 2) / head_dim)
            even, odd = x_LHK[patch, :, 2 * pair].double(), x_LHK[patch, :, 2 * pair + 1].double()
            out[patch, :, 2 * pair] = even * math.cos(angle) - odd * math.sin(angle)
            out[patch, :, 2 * pair + 1] = even * math.sin(angle) + odd * math.cos(angle)
    return out
