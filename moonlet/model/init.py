"""Initial weights. K3 discloses A = 0 and zero depth queries; the rest is our choice, named here.

- Linears: normal with std 0.5 / sqrt(fan in). Embedding: normal with std 0.5, its padding row zero.
- A_log = 0 (the report; the released class draws log U(1, 16)). dt_bias: inverse softplus of dt, log-uniform in
  [1e-3, 1e-1], as in Mamba-2, so that the bounded gate starts between -0.5 and -0.005 a token.
- Depth queries zero: every mix starts as the plain average, which the AttnRes paper calls crucial.
- Convolutions: normal with std 0.3 and the newest tap raised by one, so that they start near the identity.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from moonlet.model.k3 import K3
from moonlet.model.kda import KimiDeltaAttention, ShortConv
from moonlet.model.latent_moe import Experts
from moonlet.model.norm import RMSNorm
from moonlet.model.router import Router

_DT_MIN, _DT_MAX = 1e-3, 1e-1


@torch.no_grad()
def init_weights(model: K3, seed: int) -> None:
    """Fill all parameters in place, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            normal(module.weight, 0.5)
            module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.Linear):
            std = 0.0 if name.endswith("_res_proj") else 0.5 / math.sqrt(module.in_features)
            normal(module.weight, std)
        elif isinstance(module, Router):
            normal(module.weight, 0.5 / math.sqrt(module.weight.shape[1]))
            module.e_score_correction_bias.zero_()
        elif isinstance(module, Experts):
            for weight in (module.w13, module.w2):
                normal(weight, 0.5 / math.sqrt(weight.shape[-1]))
        elif isinstance(module, ShortConv):
            normal(module.weight, 0.3)
            module.weight[..., -1] += 1
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1)
        elif isinstance(module, KimiDeltaAttention):
            module.A_log.zero_()
            draw = torch.rand(module.dt_bias.shape, generator=generator)
            dt = torch.exp(math.log(_DT_MIN) + draw * (math.log(_DT_MAX) - math.log(_DT_MIN)))
            module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
