"""Recall of planted facts by distance: can the model name the digit that a line `#@ name7` gave, d tokens later?

A probe context holds a block of facts on different names and, exactly `distance` tokens further, the questions in the
same order, each answered truthfully before the next is asked:

    text | #@ name7 #@ other3 ... | text | #? name7 #? other3 ...

Fact lines and question lines are equally long, so every question is at the same distance from its fact. Asking several
questions of one context costs one pass for all of them. Chance is 0.1: a guess among the ten digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moonlet.data.long_context import PlantedVocabulary
from moonlet.errors import DataError
from moonlet.eval.perplexity import evaluating
from moonlet.model.k3 import K3
from moonlet.text.tokenizer import Tokenizer

CHANCE = 0.1
FACTS_IN_CONTEXT = 8
LEAD_TOKENS = 64  # text before the first fact
_Z_95 = 1.959964


@dataclass(frozen=True)
class ProbeContext:
    """`ids` int64 [T]; the token at each of `questions` [K] is a name, and `answers` [K] (0 to 9) are the digits asked."""

    ids: np.ndarray
    questions: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class RecallPlan:
    """`distances`: tokens strictly between a fact's value and the first token of its question's line.

    `probes` questions are asked at each distance, in batches of at most `batch_tokens`.
    """

    distances: Sequence[int]
    probes: int
    seed: int = 0
    batch_tokens: int = 8192


def recall_by_distance(
    model: K3,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    plan: RecallPlan,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Share of right answers at each distance, with its 95 % Wilson interval: the contents of eval/recall.json.

    Args:
        filler: token ids of real text, out of which each context cuts its own.
        progress: called with the number of questions asked so far.

    Raises:
        DataError: a distance is too short for a line end, or there is no text.
    """
    vocabulary = PlantedVocabulary.of(tokenizer)
    ordered = sorted(set(plan.distances))
    rights: list[int] = []
    for distance in ordered:
        batches = _batches(vocabulary, filler, distance, plan)
        hits = np.concatenate([_hits(model, vocabulary, batch) for batch in batches])
        rights.append(int(hits[: plan.probes].sum()))
        if progress is not None:
            progress(len(rights) * plan.probes)
    bounds = [wilson_interval(right, plan.probes) for right in rights]
    return {
        "chance": CHANCE,
        "probes": plan.probes,
        "distances": ordered,
        "accuracy": [right / plan.probes for right in rights],
        "low": [low for low, _ in bounds],
        "high": [high for _, high in bounds],
    }


def wilson_interval(successes: int, trials: int, z: float = _Z_95) -> tuple[float, float]:
    """The Wilson score interval of a share; with z = 1.96 it covers the true one 95 times in 100."""
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def probe_context(
    rng: np.random.Generator, vocabulary: PlantedVocabulary, filler: np.ndarray, distance: int
) -> ProbeContext:
    """A context whose questions all lie `distance` tokens behind their facts. Raises DataError as `recall_by_distance`."""
    closing, fact, question = vocabulary.closing, vocabulary.openings["@"], vocabulary.openings["?"]
    line_length = len(fact) + 2 + len(closing)
    if len(fact) != len(question) or distance < len(closing) or not len(filler):
        raise DataError(f"no recall at distance {distance}: it must be {len(closing)} at least, in text that is there")
    # The first question comes right after the last fact at the nearest.
    num_facts = max(1, min(FACTS_IN_CONTEXT, (distance - len(closing)) // line_length + 1, len(vocabulary.names)))
    names = rng.permutation(np.asarray(vocabulary.names))[:num_facts]
    answers = rng.integers(10, size=num_facts)
    digits = np.asarray(vocabulary.digits)[answers]
    between = distance - len(closing) - (num_facts - 1) * line_length
    text = np.take(filler, rng.integers(len(filler)) + np.arange(LEAD_TOKENS + between), mode="wrap")
    facts = [(*fact, name, digit, *closing) for name, digit in zip(names, digits)]
    asked = [(*question, name, digit, *closing) for name, digit in zip(names, digits)]
    ids = np.concatenate([text[:LEAD_TOKENS], *facts, text[LEAD_TOKENS:], *asked]).astype(np.int64)
    starts = len(ids) - line_length * np.arange(num_facts, 0, -1)
    return ProbeContext(ids, starts + len(question), answers)


def _batches(
    vocabulary: PlantedVocabulary, filler: np.ndarray, distance: int, plan: RecallPlan
) -> Iterator[list[ProbeContext]]:
    """Contexts with `probes` questions or a few more. Those of one distance are equally long: a batch needs no packing."""
    batch: list[ProbeContext] = []
    asked = count = 0
    while asked < plan.probes:
        rng = np.random.default_rng([plan.seed, distance, count])
        batch.append(probe_context(rng, vocabulary, filler, distance))
        asked, count = asked + len(batch[-1].questions), count + 1
        if asked >= plan.probes or (len(batch) + 1) * len(batch[-1].ids) > plan.batch_tokens:
            yield batch
            batch = []


@torch.inference_mode()
def _hits(model: K3, vocabulary: PlantedVocabulary, batch: Sequence[ProbeContext]) -> np.ndarray:
    """Which answers are right, bool [B * K]: the likeliest of the ten digits is the guess."""
    device = model.output_weight.device
    ids_BT = torch.from_numpy(np.stack([context.ids for context in batch])).to(device)
    digit_rows = model.output_weight[torch.tensor(vocabulary.digits, device=device)]
    with evaluating(model):
        hidden_BKD = model.hidden(ids_BT)[:, torch.from_numpy(batch[0].questions).to(device)]
    guesses = F.linear(hidden_BKD, digit_rows).argmax(-1).flatten().cpu().numpy()
    return guesses == np.concatenate([context.answers for context in batch])
