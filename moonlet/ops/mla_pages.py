"""Absorbed attention of Gated MLA over latent rows that lie in pages of one pool (k3_system.md section 5).

B sequences, H heads, R latent width, L = R + shared key width, N pages of S rows, P pages in a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.ops.native import usable
from moonlet.ops.native.mla_decode import attend_pages as native_attend
from moonlet.ops.rms_norm import at_least_fp32


def attend_pages_plain(
    q_BHL: Tensor, pool_NSL: Tensor, tables_BP: Tensor, lengths_B: Tensor, latent: int, scale: float
) -> Tensor:
    """softmax(scale * q . rows) @ latents for one new token of each sequence, [B, H, R] in at least float32.

    `tables_BP` (int64) lists each sequence's pages in order, `lengths_B` (int64, at least 1) how many rows count.
    """
    rows_BKL = pool_NSL[tables_BP].flatten(1, 2)
    scores = at_least_fp32(torch.einsum("bhl,bkl->bhk", q_BHL, rows_BKL)) * scale
    beyond = torch.arange(rows_BKL.shape[1], device=q_BHL.device) >= lengths_B.unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(beyond.unsqueeze(1), -torch.inf), dim=-1)
    return torch.einsum("bhk,bkr->bhr", weights, at_least_fp32(rows_BKL[..., :latent]))


def attend_pages(
    q_BHL: Tensor, pool_NSL: Tensor, tables_BP: Tensor, lengths_B: Tensor, latent: int, scale: float
) -> Tensor:
    """`attend_pages_plain` by the fastest kernel that runs here; a sequence's bits do not depend on the others."""
    form = native_attend if usable(q_BHL, pool_NSL, width=latent) and _fits(q_BHL.shape[-1]) else attend_pages_plain
    return form(q_BHL, pool_NSL, tables_BP, lengths_B, latent, scale)


def _fits(width: int) -> bool:
    from moonlet.ops.native.library import load

    return width % load().lanes == 0
