"""The lines that are planted in long documents: what they are built from, and a writer that labels them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer

NUM_NAMES = 64
_MIN_NAMES = 16
_WORD = re.compile(rb" [a-z]{3,12}")


@dataclass(frozen=True)
class Entry:
    """One fact or question, planted at `time` in [0, 1] of the window; those of one time and mark share a line."""

    time: float
    mark: str
    name: int
    content: int | None = None


@dataclass(frozen=True)
class Fact:
    """A planted line: token ids of its name and of its value (None for a mark that is counted).

    `position` is the place of the value's token, or of the name's where there is no value.
    """

    name: int
    value: int | None
    position: int


@dataclass(frozen=True)
class Question:
    """`position` is the token (a name) after which the answer is predicted.

    `distance` is the number of tokens strictly between the farthest piece of evidence and the question's line (as if each
    question had a line of its own). `evidence` are the positions of the facts that decide the answer. `is_first` is False where an
    earlier question has already given the answer away.
    """

    position: int
    answer_position: int
    distance: int
    answer_ids: tuple[int, ...]
    candidate_ids: tuple[int, ...]
    evidence: tuple[int, ...]
    is_first: bool


@dataclass(frozen=True)
class PlantedVocabulary:
    """Token ids that the lines are built from: every name and every digit is one token."""

    names: tuple[int, ...]
    digits: tuple[int, ...]
    openings: dict[str, tuple[int, ...]]  # by the mark of the line
    closing: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PlantedVocabulary:
        """Names are the rarest single-token words, so that the text around them seldom uses them.

        Raises:
            DataError: the tokenizer has too few single-token words.
        """
        return _vocabulary(tokenizer)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> PlantedVocabulary:
    words = [token for token in range(tokenizer.vocab_size) if _WORD.fullmatch(tokenizer.decode_bytes([token]))]
    digits = [tokenizer.encode(str(digit)) for digit in range(10)]
    if len(words) < _MIN_NAMES or any(len(ids) != 1 for ids in digits):
        raise DataError(
            f"planted documents need {_MIN_NAMES} words that are one token, the tokenizer has {len(words)}: "
            "train it on more text or with a larger vocabulary"
        )
    openings = {mark: tuple(tokenizer.encode(f"\n#{mark}")) for mark in "@?>+="}
    closing = tuple(tokenizer.encode("\n"))
    return PlantedVocabulary(tuple(words[-NUM_NAMES:]), tuple(ids[0] for ids in digits), openings, closing)


def line_length(vocabulary: PlantedVocabulary, line: Sequence[Entry]) -> int:
    """Tokens of a line with these entries."""
    pairs = sum(1 + (entry.mark in "?=" or entry.content is not None) for entry in line)
    return len(vocabulary.openings[line[0].mark]) + pairs + len(vocabulary.closing)


class LineWriter:
    """Appends text and lines; answers are worked out from the lines written so far."""

    def __init__(self, vocabulary: PlantedVocabulary) -> None:
        self.vocabulary = vocabulary
        self.ids: list[int] = []
        self.facts: list[Fact] = []
        self.questions: list[Question] = []
        self._values: dict[int, Fact] = {}
        self._links: dict[int, Fact] = {}
        self._marks: dict[int, list[Fact]] = {}
        self._told: dict[int, tuple[int, ...]] = {}  # evidence that an earlier question on the name has used up

    def text(self, tokens: Sequence[int] | np.ndarray) -> None:
        self.ids.extend(int(token) for token in tokens)

    def line(self, entries: Sequence[Entry]) -> None:
        self.ids += self.vocabulary.openings[entries[0].mark]
        for entry in entries:
            self.ids.append(entry.name)
            if entry.mark in "?=":
                self._ask(entry)
                continue
            if entry.content is not None:
                self.ids.append(entry.content)
            self._note(entry.mark, Fact(entry.name, entry.content, len(self.ids) - 1))
        self.ids += self.vocabulary.closing

    def _note(self, mark: str, fact: Fact) -> None:
        self.facts.append(fact)
        if mark == "+":
            self._marks.setdefault(fact.name, []).append(fact)
        else:
            (self._links if mark == ">" else self._values)[fact.name] = fact

    def _ask(self, entry: Entry) -> None:
        answer, evidence = self._count(entry.name) if entry.mark == "=" else self._follow(entry.name)
        position = len(self.ids) - 1
        is_first = self._told.get(entry.name) != evidence
        self._told[entry.name] = evidence
        start = position - len(self.vocabulary.openings[entry.mark])
        distance = start - min(evidence, default=start - 1) - 1
        candidates = self.vocabulary.digits
        self.questions.append(Question(position, position + 1, distance, (answer,), candidates, evidence, is_first))
        self.ids.append(answer)

    def _follow(self, name: int) -> tuple[int, tuple[int, ...]]:
        hops = []
        while link := self._links.get(name):
            hops.append(link.position)
            name = int(link.value or 0)
        fact = self._values[name]
        return int(fact.value or 0), (*hops, fact.position)

    def _count(self, name: int) -> tuple[int, tuple[int, ...]]:
        marks = self._marks.get(name, [])
        return self.vocabulary.digits[len(marks)], tuple(mark.position for mark in marks)
