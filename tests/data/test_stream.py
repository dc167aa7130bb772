"""Every document once an epoch, in an order that a resume continues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.data.stream import DocumentStream, counter_rng
from moonlet.errors import CheckpointError


@given(st.integers(1, 40), st.integers(0, 10))
def test_each_epoch_has_every_document_once(count, seed):
    stream = DocumentStream(count, seed, "s")
    drawn = [stream.next() for _ in range(3 * count)]
    for epoch in range(3):
        assert sorted(index for number, index in drawn if number == epoch) == list(range(count))


def test_epochs_seeds_and_sources_have_their_own_order():
    def order(seed: int, name: str, epoch: int = 0) -> list[int]:
        stream = DocumentStream(50, seed, name)
        return [stream.next()[1] for _ in range(50 * (epoch + 1))][50 * epoch :]

    orders = [order(0, "a"), order(0, "a", 1), order(1, "a"), order(0, "b"), list(range(50))]
    assert len({tuple(entry) for entry in orders}) == 5
    assert order(0, "a") == order(0, "a")


@given(st.integers(1, 20), st.integers(0, 60))
def test_resume_continues(count, cut):
    straight = DocumentStream(count, 7, "s")
    expected = [straight.next() for _ in range(cut + 30)][cut:]
    first = DocumentStream(count, 7, "s")
    for _ in range(cut):
        first.next()
    second = DocumentStream(count, 7, "s")
    second.load_state_dict(first.state_dict())
    assert [second.next() for _ in range(30)] == expected


def test_state_of_another_corpus_is_refused():
    with pytest.raises(CheckpointError, match="has 5 documents; here it has 6"):
        DocumentStream(6, 0, "s").load_state_dict(DocumentStream(5, 0, "s").state_dict())


def test_counter_rng_depends_on_all_its_arguments():
    draws = [counter_rng(*key).integers(1 << 62) for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (-1, "a")]]
    assert len(set(draws)) == 5
    assert counter_rng(3, "x", 4).integers(1 << 62) == counter_rng(3, "x", 4).integers(1 << 62)
