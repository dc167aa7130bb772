"""One decoded token of absorbed MLA over pages in C++; the definition is `ops/mla_pages.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.ops.native.library import run


def attend_pages(
    q_BHL: Tensor, pool_NSL: Tensor, tables_BP: Tensor, lengths_B: Tensor, latent: int, scale: float
) -> Tensor:
    """Arguments and result as in `ops/mla_pages.py`; float32 on the CPU, widths in whole registers. No autograd."""
    q_BHL, tables_BP, lengths_B = q_BHL.contiguous(), tables_BP.contiguous(), lengths_B.contiguous()
    batch, heads, width = q_BHL.shape
    out_BHR = q_BHL.new_empty(batch, heads, latent)
    sizes = batch, heads, latent, width, pool_NSL.shape[1], tables_BP.shape[1], float(scale), torch.get_num_threads()
    run("mla_decode", q_BHL, pool_NSL, tables_BP, lengths_B, out_BHR, *sizes)
    return out_BHR
