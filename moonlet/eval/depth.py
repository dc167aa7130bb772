"""What each mix in depth reads: mean weights of Block Attention Residuals on held-out text, site by source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonlet.eval.perplexity import evaluating
from moonlet.model.attn_residuals import DepthTrace
from moonlet.model.k3 import K3


@torch.inference_mode()
def depth_attention(model: K3, documents: Sequence[Tensor], *, row_tokens: int = 2048) -> dict[str, Any]:
    """{"sites": [name], "weights": [[S floats or None]]}: mean over all tokens of the weight of each source.

    Column j is block j, finished or still running; block 0 is the embedding. None: the site cannot see that block.
    A model without AttnRes has no site.

    Args:
        documents: token ids [N] each, read from their start, at most `row_tokens` of each in one pass.
    """
    sums: dict[str, Tensor] = {}
    num_tokens = 0
    with evaluating(model):
        for ids_N in documents:
            trace = DepthTrace()
            model.hidden(ids_N[:row_tokens].to(model.output_weight.device).unsqueeze(0), trace=trace)
            num_tokens += len(ids_N[:row_tokens])
            for name, mix in trace.mixes.items():
                total_S = mix.weights.flatten(0, -2).double().sum(0).cpu()
                sums[name] = sums[name] + total_S if name in sums else total_S
    width = max(map(len, sums.values()), default=0)
    rows = [(total_S / num_tokens).tolist() for total_S in sums.values()]
    return {"sites": list(sums), "weights": [row + [None] * (width - len(row)) for row in rows]}
