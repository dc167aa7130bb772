"""From logits to a token. Every random number depends on (seed, position) alone: who shares a batch changes nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonlet.errors import NonFiniteError, RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Names and meanings are OpenAI's where it has them.

    Attributes:
        temperature: 0 takes the most probable token.
        top_k: 0 keeps all. top_p, min_p: kept are the most probable tokens up to the mass top_p, and those of at least
            min_p times the largest probability.
        presence_penalty, frequency_penalty: subtracted from logits of tokens generated so far, once or for each time.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or answer.
        logit_bias: added to logits, by token.
        seed: names the stream of random numbers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "top_k": (0, 2**31)}
        bounds |= {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (1e-3, 1e3)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise RequestError(f"{name} must lie between {low} and {high}, got {getattr(self, name)}")

    @property
    def needs_history(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class Drawn:
    """`logprob` is that of the model itself: before temperature, penalties and truncation. `top` likewise, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position in the text that `seed` names (53 bits of a hash of both)."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def draw(
    logits_V: Tensor,
    params: SamplingParams,
    position: int,
    *,
    allowed_V: Tensor | None = None,
    seen: tuple[Counter[int], Counter[int]] | None = None,
    num_top: int = 0,
) -> Drawn:
    """The token at `position` (tokens before it, prompt included).

    Args:
        logits_V: float32.
        allowed_V: bool; other tokens are never drawn.
        seen: how often each token is in the prompt, and in the answer so far; for penalties.
        num_top: how many of the most probable tokens to report.
    Raises:
        NonFiniteError: the weights give NaN or infinite logits.
    """
    if not bool(logits_V.isfinite().all()):
        raise NonFiniteError("the model's logits are not finite: these weights cannot be sampled from")
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    shaped_V = _shaped(logits_V, params, allowed_V, seen)
    token = (
        int(shaped_V.argmax()) if params.temperature == 0 else _pick(shaped_V, params, uniform(params.seed, position))
    )
    top = logprobs_V.topk(min(num_top, len(logits_V))) if num_top else None
    pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist()))
    return Drawn(token, float(logprobs_V[token]), pairs)


def _shaped(
    logits_V: Tensor,
    params: SamplingParams,
    allowed_V: Tensor | None,
    seen: tuple[Counter[int], Counter[int]] | None,
) -> Tensor:
    """Logits after penalties, bias and what is allowed."""
    if not (params.logit_bias or params.needs_history or allowed_V is not None):
        return logits_V
    shaped_V = logits_V.clone()
    if params.needs_history and seen is not None:
        prompt, answer = seen
        known = torch.tensor(sorted({*prompt, *answer}), dtype=torch.int64)
        values = shaped_V[known]
        shaped_V[known] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        said = torch.tensor(sorted(answer), dtype=torch.int64)
        counts = torch.tensor([answer[token] for token in sorted(answer)], dtype=torch.float32)
        shaped_V[said] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        shaped_V[token] += bias
    if allowed_V is not None:
        shaped_V.masked_fill_(~allowed_V, -torch.inf)
    return shaped_V


def _pick(logits_V: Tensor, params: SamplingParams, point: float) -> int:
    """Inverse of the cumulative distribution, in float64."""
    scaled_V = (logits_V.double() - logits_V.max()) / params.temperature  # at most 0, however small the temperature
    probabilities_V = _truncated(torch.softmax(scaled_V, dim=-1), params)
    edges_V = probabilities_V.cumsum(0)
    # Scaled by the last edge, which rounding leaves beside 1: the point lies below it, in a token of some probability.
    return int(torch.searchsorted(edges_V, point * edges_V[-1], right=True))


def _truncated(probabilities_V: Tensor, params: SamplingParams) -> Tensor:
    """Zeros for what top-k, top-p and min-p drop; the most probable token always stays."""
    if params.min_p > 0:
        floor = params.min_p * probabilities_V.max()
        probabilities_V = torch.where(probabilities_V >= floor, probabilities_V, 0.0)
    if not params.top_k and params.top_p >= 1:
        return probabilities_V
    values, order = probabilities_V.sort(descending=True, stable=True)
    if params.top_k:
        values[params.top_k :] = 0
    if params.top_p < 1:
        before = values.cumsum(0) - values
        values[before >= params.top_p * values.sum()] = 0
        values[0] = probabilities_V[order[0]]
    return torch.zeros_like(probabilities_V).scatter_(0, order, values)
