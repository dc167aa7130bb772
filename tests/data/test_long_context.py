"""Planted documents: every answer can be found by reading, and every label points at it."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.data.corpus import Corpus
from moonlet.data.long_context import KINDS, PlantedDocument, planted_document
from moonlet.data.planted_lines import PlantedVocabulary
from moonlet.data.rows import PlantedRows
from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer, train_tokenizer

LINE = re.compile(r"\n#([@?>+=])((?: [a-z]+\d?)+)(?=\n|$)")
ENTRY = re.compile(r" ([a-z]+)(\d?)")


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return corpus.tokenizer


@pytest.fixture(scope="module")
def filler(corpus: Corpus) -> np.ndarray:
    return corpus.source("email").window(0, 8192)


def read_answers(text: str) -> list[str]:
    """Answer every question by reading the lines before it, without a look at the labels."""
    values: dict[str, str] = {}
    links: dict[str, str] = {}
    marks: Counter[str] = Counter()
    answers = []
    for mark, line in LINE.findall(text):
        entries = ENTRY.findall(line)
        if mark == ">":
            names = [name for name, _ in entries]
            links.update(zip(names[::2], names[1::2]))
            continue
        for name, digit in entries:
            match mark:
                case "@":
                    values[name] = digit
                case "+":
                    marks[name] += 1
                case "=":
                    answers.append(str(marks[name]))
                case "?":
                    while name in links:
                        name = links[name]
                    answers.append(values[name])
    return answers


def check_labels(document: PlantedDocument, tokenizer: Tokenizer) -> None:
    ids, vocabulary = document.ids, PlantedVocabulary.of(tokenizer)
    for fact in document.facts:
        assert ids[fact.position] == (fact.name if fact.value is None else fact.value)
        if fact.value is not None:
            assert ids[fact.position - 1] == fact.name
    positions = {fact.position for fact in document.facts}
    for question in document.questions:
        assert question.answer_position == question.position + 1
        assert ids[question.position] in vocabulary.names
        assert question.candidate_ids == vocabulary.digits
        assert set(question.evidence) <= positions
        start = question.position - len(vocabulary.openings["?"])
        if question.evidence:
            assert question.distance == start - min(question.evidence) - 1 >= 0


@given(st.sampled_from(KINDS), st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_answers_can_be_read_from_the_text(tokenizer, filler, kind, seed, num_facts):
    rng = np.random.default_rng(seed)
    document = planted_document(rng, filler, tokenizer, 512, kind, num_facts)
    assert document.ids.shape == (512,)
    check_labels(document, tokenizer)
    digits = {token: str(digit) for digit, token in enumerate(PlantedVocabulary.of(tokenizer).digits)}
    labelled = [digits[question.answer_ids[0]] for question in document.questions]
    assert labelled == read_answers(tokenizer.decode(document.ids))
    for question in document.questions:
        assert document.ids[question.answer_position] == question.answer_ids[0]


def test_the_last_question_ends_the_document(tokenizer, filler):
    for kind in KINDS:
        document = planted_document(np.random.default_rng(1), filler, tokenizer, 512, kind, 6)
        closing = len(PlantedVocabulary.of(tokenizer).closing)
        assert document.questions[-1].answer_position == 512 - closing - 1


def test_evidence_is_scattered_over_the_window(tokenizer, filler):
    places, distances = [], []
    for seed in range(200):
        document = planted_document(np.random.default_rng(seed), filler, tokenizer, 1024, "several", 8)
        places += [fact.position for fact in document.facts]
        distances += [question.distance for question in document.questions]
    assert np.histogram(places, bins=5, range=(0, 740))[0].min() > 100
    counts = np.histogram(distances, bins=[0, 8, 32, 128, 512, 1024])[0]
    assert counts.min() > 40


def test_kinds_need_what_they_say(tokenizer, filler):
    def evidence(kind: str, num_facts: int) -> list[int]:
        document = planted_document(np.random.default_rng(2), filler, tokenizer, 512, kind, num_facts)
        return [len(question.evidence) for question in document.questions]

    assert evidence("single", 5) == [1]
    assert evidence("several", 5) == [1] * 20
    assert set(evidence("chain", 6)) == {1, 2}
    assert max(evidence("count", 12)) > 1


def test_latest_value_counts(tokenizer, filler):
    document = planted_document(np.random.default_rng(5), filler, tokenizer, 512, "latest", 8)
    by_name = Counter(fact.name for fact in document.facts)
    assert set(by_name.values()) == {2}
    for question in document.questions:
        name = int(document.ids[question.position])
        before = [fact for fact in document.facts if fact.name == name and fact.position < question.position]
        assert question.evidence == (before[-1].position,)


def test_first_questions_are_told_apart(tokenizer, filler):
    document = planted_document(np.random.default_rng(3), filler, tokenizer, 512, "several", 6)
    asked = set()
    for question in document.questions:
        name = int(document.ids[question.position])
        assert question.is_first == (name not in asked)
        asked.add(name)


def test_chance_is_a_tenth(tokenizer, filler):
    answers = Counter()
    for seed in range(400):
        document = planted_document(np.random.default_rng(seed), filler, tokenizer, 256, "several", 4)
        answers.update(question.answer_ids[0] for question in document.questions if question.is_first)
    assert len(answers) == 10
    assert max(answers.values()) < 0.14 * sum(answers.values())


def test_document_without_room(tokenizer, filler):
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="planted tokens"):
        planted_document(rng, filler, tokenizer, 32, "several", 16)
    with pytest.raises(DataError, match="text for the rest"):
        planted_document(rng, filler[:10], tokenizer, 512, "single", 1)
    with pytest.raises(DataError, match="not 0"):
        planted_document(rng, filler, tokenizer, 512, "several", 0)
    with pytest.raises(DataError, match="no kind"):
        planted_document(rng, filler, tokenizer, 512, "other", 4)  # type: ignore[arg-type]


def test_every_name_and_digit_is_one_token(tokenizer):
    vocabulary = PlantedVocabulary.of(tokenizer)
    assert len(set(vocabulary.names)) == len(vocabulary.names) >= 16
    for name in vocabulary.names[:5]:
        text = tokenizer.decode([name])
        expected = [*vocabulary.openings["@"], name, vocabulary.digits[7], *vocabulary.closing]
        assert tokenizer.encode(f"\n#@{text}7\n") == expected


def test_tokenizer_without_words_is_refused():
    with pytest.raises(DataError, match="larger vocabulary"):
        PlantedVocabulary.of(train_tokenizer(["abc"], 300))


def test_rows_of_a_stage(corpus):
    rows = PlantedRows(corpus.planted["planted"], corpus, 0)
    for seq_len in (16, 64, 256, 1024):
        row = rows.next_row(seq_len)
        assert row.ids.shape == (seq_len,)
        assert row.answers
        digits = PlantedVocabulary.of(corpus.tokenizer).digits
        assert all(row.ids[answer] in digits for answer in row.answers)
