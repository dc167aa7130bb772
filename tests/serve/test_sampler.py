"""Sampling: what is kept, what is penalised, and a distribution that is the one asked for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moonlet.errors import NonFiniteError
from moonlet.serve.sampler import SamplingParams, draw, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.0])


def _drawn(params: SamplingParams, count: int = 400, **options) -> Counter[int]:
    return Counter(draw(LOGITS, params, position, **options).token for position in range(count))


def test_the_same_seed_and_position_give_the_same_token() -> None:
    params = SamplingParams(seed=4)
    assert [draw(LOGITS, params, i).token for i in range(50)] == [draw(LOGITS, params, i).token for i in range(50)]
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_frequencies_follow_the_softmax() -> None:
    expected = torch.softmax(LOGITS / 0.7, 0)
    counts = _drawn(SamplingParams(temperature=0.7), 6000)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / 6000 - probability) < 4 * (probability / 6000) ** 0.5 + 0.003


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=0), {0}),
        (SamplingParams(top_k=1), {0}),
        (SamplingParams(top_k=3), {0, 1, 4}),
        (SamplingParams(top_p=0.5), {0, 4}),
        (SamplingParams(top_p=0.0), {0}),
        (SamplingParams(min_p=0.3), {0, 1, 4}),
        (SamplingParams(min_p=1.0), {0, 4}),
        (SamplingParams(logit_bias={3: 100.0}), {3}),
        (SamplingParams(top_k=4, top_p=0.9), {0, 1, 4}),
    ],
)
def test_only_what_is_kept_is_drawn(params: SamplingParams, kept: set[int]) -> None:
    assert set(_drawn(params)) == kept


def test_what_is_not_allowed_is_never_drawn() -> None:
    allowed = torch.tensor([False, True, False, True, False])
    assert set(_drawn(SamplingParams(temperature=5.0), allowed_V=allowed)) == {1, 3}


def test_penalties_see_prompt_and_answer() -> None:
    seen = Counter({0: 1}), Counter({4: 30})
    assert set(_drawn(SamplingParams(temperature=0, frequency_penalty=1.0), seen=seen)) == {0}
    assert set(_drawn(SamplingParams(temperature=0, presence_penalty=2.0), seen=seen)) == {0}
    assert set(_drawn(SamplingParams(temperature=0, repetition_penalty=4.0), seen=seen)) == {1}


def test_logprobs_are_the_models_own() -> None:
    drawn = draw(LOGITS, SamplingParams(temperature=0.1, top_k=1, logit_bias={3: 50}), 0, num_top=2)
    expected = LOGITS.log_softmax(0)
    assert drawn.token == 3 and drawn.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in drawn.top] == [0, 4] and drawn.top[0][1] == pytest.approx(float(expected[0]))


def test_broken_weights_are_an_error() -> None:
    with pytest.raises(NonFiniteError):
        draw(torch.tensor([0.0, torch.nan]), SamplingParams(), 0)
