"""Rows by weight, from a counter."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moonlet.data.mixture import Mixture

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 10), min_size=1)


@given(WEIGHTS, st.integers(0, 100), st.integers(1, 400))
def test_shares_are_kept_at_every_moment(weights, seed, rows):
    mixture = Mixture(weights, seed)
    drawn = Counter(mixture.next() for _ in range(rows))
    for name, weight in weights.items():
        assert abs(drawn[name] - rows * weight / sum(weights.values())) < 8


def test_random_choice_would_not_keep_them_so_well():
    mixture = Mixture({"a": 0.88, "b": 0.12}, 0)
    drawn = Counter(mixture.next() for _ in range(10_000))
    assert abs(drawn["b"] - 1200) <= 4  # a random choice is off by 32 on average


@given(WEIGHTS, st.integers(0, 50))
def test_resume_continues(weights, cut):
    straight = Mixture(weights, 3)
    expected = [straight.next() for _ in range(cut + 20)][cut:]
    resumed = Mixture(weights, 3)
    resumed.load_state_dict({"rows": cut})
    assert [resumed.next() for _ in range(20)] == expected


def test_zero_weight_is_never_drawn():
    mixture = Mixture({"a": 1.0, "b": 0.0}, 0)
    assert {mixture.next() for _ in range(50)} == {"a"}
