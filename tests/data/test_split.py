"""Held out by content hash."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from moonlet.data.split import cut_tail, is_heldout, split_hashes


def hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def test_share_and_independence_of_order():
    some = hashes(20_000)
    held = split_hashes(some, 0.05)
    assert 0.045 < sum(held) / len(held) < 0.055
    assert split_hashes(some[::-1], 0.05) == held[::-1]


def test_a_larger_fraction_holds_out_more_of_the_same():
    for content_hash in hashes(500):
        assert is_heldout(content_hash, 0.3) or not is_heldout(content_hash, 0.1)


@given(st.integers(2, 6), st.floats(0.001, 0.999))
def test_both_sides_have_a_document(count, fraction):
    assert 0 < sum(split_hashes(hashes(count), fraction)) < count


@given(st.text(alphabet="ab\n", max_size=60), st.floats(0.01, 0.99))
def test_tail_of_a_single_document(text, fraction):
    first, last = cut_tail(text, fraction)
    assert first + last == text
    if 0 < len(first) < len(text) and "\n" in text[: round(len(text) * (1 - fraction))]:
        assert first.endswith("\n")
