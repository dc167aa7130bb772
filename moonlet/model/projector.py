"""The projector from merged vision features to the width of the text model (k3_model.md section 1)."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from moonlet.config import VisionConfig
from moonlet.model.norm import RMSNorm, linear


class Projector(nn.Module):
    """norm(W2 gelu(W0 x)): [N, 4 D] -> [N, text width], with the exact GELU."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        merged = vision.mm_hidden_size * prod(vision.merge_kernel_size)
        self.proj = nn.Sequential(linear(merged, merged), nn.GELU(), linear(merged, vision.text_hidden_size))
        self.post_norm = RMSNorm(vision.text_hidden_size, vision.projector_ln_eps)

    def forward(self, features: Tensor) -> Tensor:
        return self.post_norm(self.proj(features))
