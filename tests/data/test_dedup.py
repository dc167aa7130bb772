"""Exact and near duplicates, in any order of documents."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.data.dedup import Deduplicator, band_rows
from moonlet.data.documents import Document, make_document

WORDS = [f"word{number}" for number in range(500)]


def text_of(seed: int, length: int = 400) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(length))


def edited(text: str, changes: int, seed: int = 0) -> str:
    words, chooser = text.split(), random.Random(seed)
    for place in chooser.sample(range(len(words)), changes):
        words[place] = "changed"
    return " ".join(words)


def kept(documents: list[Document], **options: object) -> set[str]:
    deduplicator = Deduplicator(**options)  # type: ignore[arg-type]
    for document in documents:
        deduplicator.add(document)
    return {documents[index].id for index in deduplicator.keep()}


def documents_of(*texts: str) -> list[Document]:
    return [make_document(text, str(number), "test") for number, text in enumerate(texts)]


def jaccard(left: str, right: str) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[place : place + 5]) for place in range(len(words) - 4)}

    return len(shingles(left) & shingles(right)) / len(shingles(left) | shingles(right))


def test_exact_ignores_white_space_only():
    texts = documents_of("a b  c\n", "a b c", "a b C")
    assert len(kept(texts, near=False)) == 2
    assert len(kept(texts, exact=False, near=False)) == 3


def test_near_duplicates_go_and_others_stay():
    original = text_of(1)
    close, far = edited(original, 5), edited(original, 60)
    assert jaccard(original, close) > 0.85
    assert jaccard(original, far) < 0.6
    assert len(kept(documents_of(original, close), near=True)) == 1
    assert len(kept(documents_of(original, far), near=True)) == 2
    assert len(kept(documents_of(original, text_of(2)), near=True)) == 2
    assert len(kept(documents_of(original, close), near=False)) == 2


def test_counts():
    deduplicator = Deduplicator()
    for document in documents_of(text_of(1), text_of(1) + "\n", edited(text_of(1), 3), text_of(2)):
        deduplicator.add(document)
    assert len(deduplicator.keep()) == 2
    assert (deduplicator.num_exact, deduplicator.num_near) == (1, 1)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.95])
def test_pairs_just_above_the_threshold_share_a_band(threshold):
    rows = band_rows(threshold)
    assert 128 % rows == 0
    assert 1 - (1 - threshold**rows) ** (128 // rows) >= 0.99


def test_estimate_is_close_to_the_true_similarity():
    deduplicator = Deduplicator()
    errors = []
    for seed in range(40):
        left = text_of(seed)
        right = edited(left, 5 + 2 * seed, seed)
        signatures = [deduplicator._signature(text) for text in (left, right)]
        errors.append(float(np.mean(signatures[0] == signatures[1])) - jaccard(left, right))
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.06  # sqrt(p (1 - p) / 128) is at most 0.044


@given(st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_does_not_matter(chooser):
    texts = [text_of(seed, 60) for seed in range(6)]
    documents = documents_of(*texts, *(edited(text, 1) for text in texts[:3]), *texts[:2])
    expected = kept(documents)
    chooser.shuffle(documents)
    assert kept(documents) == expected
    assert 6 <= len(expected) <= 9


def test_short_texts_are_compared_whole():
    assert len(kept(documents_of("one two", "one three", "one two"))) == 2
    assert len(kept(documents_of("", "...", "漢字"))) == 3
