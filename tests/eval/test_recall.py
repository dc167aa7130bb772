"""Recall by distance: exact distances, right answers counted, intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moonlet.data.long_context import PlantedVocabulary
from moonlet.errors import DataError
from moonlet.eval.recall import RecallPlan, probe_context, recall_by_distance, wilson_interval
from moonlet.text.tokenizer import train_tokenizer

WORDS = "about above after again along among apart begin below bring build carry cause chase class clean clear close"


@pytest.fixture(scope="module")
def words():
    """A tokenizer with enough one-token words for names."""
    return train_tokenizer([f" {word}" * 40 for word in WORDS.split()] * 3, 360)


@pytest.fixture(scope="module")
def vocabulary(words) -> PlantedVocabulary:
    return PlantedVocabulary.of(words)


FILLER = np.arange(40, 240)


@given(distance=st.integers(1, 600), seed=st.integers(0, 1000))
def test_every_question_is_at_its_distance_and_answered_by_its_fact(vocabulary, distance: int, seed: int) -> None:
    closing = len(vocabulary.closing)
    context = probe_context(np.random.default_rng(seed), vocabulary, FILLER, distance + closing - 1)
    ids, opening = context.ids.tolist(), list(vocabulary.openings["@"])
    facts = [
        place + len(opening)
        for place in range(len(ids) - len(opening))
        if ids[place : place + len(opening)] == opening and ids[place + len(opening)] in vocabulary.names
    ]
    value_of = {ids[name]: (name + 1, ids[name + 1]) for name in facts}
    assert len(value_of) == len(context.questions) == len(context.answers)
    for question, answer in zip(context.questions, context.answers):
        position, value = value_of[ids[question]]
        line_start = question - len(vocabulary.openings["?"])
        assert line_start - position - 1 == distance + closing - 1
        assert ids[question + 1] == value == vocabulary.digits[answer]


class _Reader(nn.Module):
    """A scripted model: it looks the asked name up in the text, within `reach` tokens, and is sure of what it finds."""

    def __init__(self, vocabulary: PlantedVocabulary, vocab_size: int, reach: int) -> None:
        super().__init__()
        self.vocabulary, self.reach = vocabulary, reach
        self.output_weight = torch.eye(vocab_size)

    def hidden(self, ids_BT: torch.Tensor) -> torch.Tensor:
        rows = [self._row(ids) for ids in ids_BT.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(rows), len(self.output_weight)).float()

    def _row(self, ids: list[int]) -> list[int]:
        said = []
        for place, token in enumerate(ids):
            seen = [past for past in range(max(0, place - self.reach), place) if ids[past] == token]
            said.append(ids[seen[-1] + 1] if token in self.vocabulary.names and seen else self.vocabulary.digits[0])
        return said


@pytest.mark.parametrize("batch_tokens", [1, 700])
def test_a_reader_recalls_what_lies_in_its_reach(words, vocabulary, batch_tokens: int) -> None:
    reader = _Reader(vocabulary, words.vocab_size, reach=150)
    plan = RecallPlan([200, 20, 100, 20], probes=30, batch_tokens=batch_tokens)
    seen = []
    found = recall_by_distance(reader, words, FILLER, plan, seen.append)  # type: ignore[arg-type]
    assert found["distances"] == [20, 100, 200] and seen == [30, 60, 90]
    assert found["accuracy"][:2] == [1.0, 1.0] and found["accuracy"][2] < 0.5
    for low, rate, high in zip(found["low"], found["accuracy"], found["high"]):
        assert 0 <= low <= rate <= high <= 1


def test_an_untrained_model_guesses(new_model, words) -> None:
    model = new_model(vocab_size=words.vocab_size, pad_token_id=words.vocab_size - 1)
    found = recall_by_distance(model, words, FILLER, RecallPlan([16, 40], probes=150))
    assert all(low < found["chance"] < high + 0.05 for low, high in zip(found["low"], found["high"]))


def test_probes_depend_on_the_seed_alone(new_model, words) -> None:
    model = new_model(vocab_size=words.vocab_size, pad_token_id=words.vocab_size - 1)
    plans = [
        RecallPlan([16], probes=40, seed=seed, batch_tokens=tokens) for seed, tokens in ((1, 100), (1, 9000), (2, 100))
    ]
    first, again, other = (recall_by_distance(model, words, FILLER, plan)["accuracy"] for plan in plans)
    assert first == again and first != other


def test_impossible_distances_are_named(vocabulary) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="distance 0"):
        probe_context(rng, vocabulary, FILLER, 0)
    with pytest.raises(DataError, match="text"):
        probe_context(rng, vocabulary, FILLER[:0], 50)


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_interval_solves_its_equation(successes: int, trials: int) -> None:
    """The bounds are the shares p at which the observed one lies 1.96 standard errors away."""
    successes = min(successes, trials)
    share = successes / trials
    for bound in wilson_interval(successes, trials):
        assert 0 <= bound <= 1
        if 0 < bound < 1:
            error = math.sqrt(bound * (1 - bound) / trials)
            assert abs(share - bound) == pytest.approx(1.959964 * error, rel=1e-6, abs=1e-7)
