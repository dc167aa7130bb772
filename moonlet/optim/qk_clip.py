"""QK-Clip (Kimi K2): after an optimiser step, scale down the heads of Gated MLA whose attention logits grew too large.

With S the largest logit of a head over the batch and gamma = min(1, tau / S), the part of the logit that goes through
the head's own keys and the part that goes through the shared key must both shrink by gamma: query and key rows of the
former take sqrt(gamma) each, the query rows of the latter take gamma, and the shared key is not touched. KDA needs
none of this, for its queries and keys have length one.

H query heads, G key heads (H a multiple of G).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moonlet.model.gated_mla import GatedMLA


class LogitTracker:
    """The largest attention logit of each head of each Gated MLA layer, over the micro-batches of one step."""

    def __init__(self, model: nn.Module) -> None:
        self.attentions = [module for module in model.modules() if isinstance(module, GatedMLA)]
        self.maxima: list[Tensor] = []

    def start(self, is_on: bool) -> None:
        """Begin a step; queries and keys are kept only where `is_on`."""
        for attention in self.attentions:
            attention.track_logits, attention.tracked = is_on, None
        self.maxima = [a.o_proj.weight.new_full((a.num_heads,), -math.inf).detach() for a in self.attentions]

    def observe(self, threshold: float) -> None:
        """Take in the last forward pass. Layers where no logit can exceed `threshold` are not computed exactly."""
        for index, attention in enumerate(self.attentions):
            if (kept := attention.tracked) is not None:  # under autocast queries and keys may differ in dtype
                attention.tracked = kept._replace(q_BTHK=kept.q_BTHK.float(), k_BTHK=kept.k_BTHK.float())
            seen = attention.tracked_max_logit(threshold)
            if seen is not None:
                self.maxima[index] = torch.maximum(self.maxima[index], seen.float())

    def stop(self) -> None:
        for attention in self.attentions:
            attention.track_logits, attention.tracked = False, None

    def clip(self, threshold: float) -> None:
        for attention, max_logit_H in zip(self.attentions, self.maxima):
            clip_qk(attention, max_logit_H, threshold)

    @property
    def largest(self) -> float | None:
        """Over all layers and heads; None where nothing was computed."""
        largest = max((float(maximum.max()) for maximum in self.maxima), default=-math.inf)
        return largest if math.isfinite(largest) else None


@torch.no_grad()
def clip_qk(attention: GatedMLA, max_logit_H: Tensor, threshold: float) -> None:
    """Scale the projections of `attention` so that logits like those seen stay within `threshold`.

    A key head that several query heads share shrinks for the one that needs it most; the others' queries make up for
    it.
    """
    is_large_H = max_logit_H > threshold
    if not bool(is_large_H.any()):
        return
    gamma_H = torch.where(is_large_H, threshold / max_logit_H, 1.0)
    key_G = gamma_H.view(attention.num_kv_heads, -1).amin(1).sqrt()
    own_H = gamma_H / key_G.repeat_interleave(attention.num_heads // attention.num_kv_heads)
    query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    _scale_rows(query, [(own_H, attention.nope_dim), (gamma_H, attention.rope_dim)])
    _scale_rows(attention.kv_b_proj, [(key_G, attention.nope_dim), (torch.ones_like(key_G), attention.value_dim)])


def _scale_rows(projection: nn.Linear, parts: list[tuple[Tensor, int]]) -> None:
    """Multiply the rows of each head; `parts` gives a factor by head and a number of rows, in order."""
    factors = torch.cat([factor.unsqueeze(1).expand(-1, rows) for factor, rows in parts], dim=1)
    projection.weight.mul_(factors.flatten().unsqueeze(1).to(projection.weight.dtype))
