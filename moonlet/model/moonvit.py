"""MoonViT-V2, the vision tower (k3_model.md section 1): images and short clips of any size, patch by patch.

An item is t frames of h x w patches. A batch is all patches of all items in one row; attention stays inside an item.

Legend: L patches of all items, D width, H heads, K head dim, P patch side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moonlet.config import VisionConfig
from moonlet.model.norm import RMSNorm, linear
from moonlet.ops.rope_2d import plane_angles, rotate_pairs

# The released norms have no epsilon of their own: torch then takes the smallest step of float32, for bfloat16 too.
NORM_EPS = torch.finfo(torch.float32).eps


class Grid(NamedTuple):
    """Patches of one item: frames, rows, columns."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


def as_grids(grids: Tensor | Sequence[Sequence[int]]) -> list[Grid]:
    """Grids from an integer tensor [items, 3] or from rows (t, h, w)."""
    return [Grid(*(int(size) for size in row)) for row in grids]


class PatchEmbed(nn.Module):
    """Patches [L, 3, P, P] -> [L, D]: a linear map and a position."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        side = vision.patch_size
        self.proj = nn.Conv2d(3, vision.vt_hidden_size, kernel_size=side, stride=side, bias=False)
        self.pos_emb = PositionTable(vision)

    def forward(self, pixels_LCPP: Tensor, grids: list[Grid]) -> Tensor:
        weight = self.proj.weight.flatten(1)
        positions = torch.cat([self.pos_emb(grid) for grid in grids])
        return F.linear(pixels_LCPP.flatten(1).to(weight.dtype), weight) + positions


class PositionTable(nn.Module):
    """Learned positions on a plane, stretched to the grid of an item, and for clips a fixed embedding of the time."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        table = torch.empty(vision.init_pos_emb_height, vision.init_pos_emb_width, vision.vt_hidden_size)
        self.weight = nn.Parameter(nn.init.normal_(table, std=0.02))
        self.max_frames, self.mode = vision.init_pos_emb_time, vision.pos_emb_interpolation_mode

    def forward(self, grid: Grid) -> Tensor:
        """[t * h * w, D]. A lone frame has no time: an image and a clip of one frame are the same."""
        if grid.frames > self.max_frames:
            raise ValueError(f"a clip has at most {self.max_frames} frames, got {grid.frames}")
        table = self.weight
        if table.shape[:2] != (grid.height, grid.width):
            image = table.permute(2, 0, 1)[None]
            table = F.interpolate(image, (grid.height, grid.width), mode=self.mode)[0].permute(1, 2, 0)
        plane = table.flatten(0, 1)
        if grid.frames == 1:
            return plane
        time = time_embedding(grid.frames, plane.shape[-1], plane.device).to(plane.dtype)
        return (time[:, None] + plane).flatten(0, 1)


def time_embedding(frames: int, dim: int, device: torch.device | None = None) -> Tensor:
    """[frames, dim]: sines, then cosines, of frame * 10000^(-i / (dim / 2))."""
    omega = 10_000.0 ** (torch.arange(dim // 2, device=device, dtype=torch.float32) / -(dim // 2))
    angle = torch.arange(frames, device=device)[:, None] * omega
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class VisionMLP(nn.Module):
    """fc1(gelu(fc0(x))) with the tanh form of GELU."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.fc0 = linear(vision.vt_hidden_size, vision.vt_intermediate_size)
        self.fc1 = linear(vision.vt_intermediate_size, vision.vt_hidden_size)

    def forward(self, x_LD: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x_LD), approximate="tanh"))


class VisionBlock(nn.Module):
    """x + wo(attention(norm0(x))), then x + mlp(norm1(x))."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        width, self.num_heads = vision.vt_hidden_size, vision.vt_num_attention_heads
        self.norm0, self.norm1 = RMSNorm(width, NORM_EPS), RMSNorm(width, NORM_EPS)
        self.wqkv = linear(width, 3 * vision.qkv_hidden_size)
        self.wo = linear(vision.qkv_hidden_size, width)
        self.mlp = VisionMLP(vision)

    def forward(self, x_LD: Tensor, angles_LP: Tensor, lengths: list[int]) -> Tensor:
        x_LD = x_LD + self.wo(self._attend(self.norm0(x_LD), angles_LP, lengths))
        return x_LD + self.mlp(self.norm1(x_LD))

    def _attend(self, x_LD: Tensor, angles_LP: Tensor, lengths: list[int]) -> Tensor:
        """Full attention among all patches of an item (all frames together), never across items."""
        q, k, v = self.wqkv(x_LD).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        q, k = rotate_pairs(q, angles_LP), rotate_pairs(k, angles_LP)
        items = zip(*(part.transpose(0, 1).split(lengths, dim=1) for part in (q, k, v)))
        out = [F.scaled_dot_product_attention(*(part[None] for part in item))[0] for item in items]
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)


class VisionEncoder(nn.Module):
    """All blocks and the final norm, [L, D] -> [L, D]."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.head_dim = vision.qkv_hidden_size // vision.vt_num_attention_heads
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(vision.vt_hidden_size, NORM_EPS)

    def forward(self, x_LD: Tensor, grids: list[Grid]) -> Tensor:
        angles = [
            plane_angles(grid.height, grid.width, self.head_dim, x_LD.device).repeat(grid.frames, 1) for grid in grids
        ]
        angles_LP, lengths = torch.cat(angles), [grid.patches for grid in grids]
        for block in self.blocks:
            x_LD = block(x_LD, angles_LP, lengths)
        return self.final_layernorm(x_LD)


class MoonViT(nn.Module):
    """Patches of images and clips -> merged features of each item.

    Shapes: pixels [L, 3, P, P], grids one (t, h, w) for each item, result one [h/2 * w/2, 4 D] for each item.
    """

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.merge_rows, self.merge_columns = vision.merge_kernel_size
        self.patch_embed = PatchEmbed(vision)
        self.encoder = VisionEncoder(vision)

    def forward(self, pixels_LCPP: Tensor, grids: list[Grid]) -> list[Tensor]:
        """Raises ValueError: the patches do not fill the grids, or a side cannot be merged."""
        self._check(pixels_LCPP, grids)
        encoded = self.encoder(self.patch_embed(pixels_LCPP, grids), grids)
        items = encoded.split([grid.patches for grid in grids])
        return [self._merge(item, grid) for item, grid in zip(items, grids)]

    def _merge(self, x_LD: Tensor, grid: Grid) -> Tensor:
        """Mean over the frames, then each tile of neighbours side by side, row by row inside the tile."""
        plane = x_LD.view(*grid, -1).mean(0)
        tiles = plane.unflatten(0, (-1, self.merge_rows)).unflatten(2, (-1, self.merge_columns))
        return tiles.transpose(1, 2).flatten(2).flatten(0, 1)

    def _check(self, pixels_LCPP: Tensor, grids: list[Grid]) -> None:
        if (expected := sum(grid.patches for grid in grids)) != pixels_LCPP.shape[0]:
            raise ValueError(f"{pixels_LCPP.shape[0]} patches do not fill grids of {expected}")
        for grid in grids:
            if grid.height % self.merge_rows or grid.width % self.merge_columns:
                raise ValueError(
                    f"grid {tuple(grid)} does not divide into {self.merge_rows} x {self.merge_columns} tiles"
                )
