"""Long documents whose answers lie scattered over the whole window, with the places of evidence and questions.

Short lines are planted in real text. The name stands right before the value in a fact and right before the answer in a
question, so that one look back for the same name answers it, whatever the distance:

    single    #@ name7 ... #? name7        one fact, asked at the end
    several   many facts, each asked at a near and at a far distance, the oldest one at the end only
    latest    names get a second value; the last one before the question counts
    chain     #> name other ... #@ other7 ... #? name7        one more hop; either line may come first
    count     #+ name, anywhere and up to nine times ... #= name5

The value is one of the ten digits, so chance is 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer

Kind = Literal["single", "several", "latest", "chain", "count"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NUM_NAMES = 64
_MIN_NAMES = 16
_WORD = re.compile(rb" [a-z]{3,12}")
_FACT_WINDOW = 0.7  # facts lie in this first part of the window, so that far questions find room after them


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

    `distance` is the number of tokens strictly between the farthest piece of evidence and the first token of the
    question's line. `evidence` are the positions of the facts that decide the answer. `is_first` is False where an
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
class PlantedDocument:
    """`ids` int64 [T] with the labels of what was planted in it."""

    ids: np.ndarray
    kind: Kind
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]


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


@dataclass(frozen=True)
class _Line:
    """One line to plant at `time` in [0, 1] of the window: its mark, its name and, where it has one, its content."""

    time: float
    mark: str
    name: int
    content: int | None = None


def planted_document(
    rng: np.random.Generator,
    filler_tokens: Sequence[int] | np.ndarray,
    tokenizer: Tokenizer,
    seq_len: int,
    kind: Kind,
    num_facts: int,
) -> PlantedDocument:
    """A document of exactly `seq_len` tokens: lines of `kind` in the first tokens of `filler_tokens`.

    `num_facts` counts planted lines other than questions (for `single` it is one whatever is asked for).

    Raises:
        DataError: `seq_len` has no room for so many facts and their questions, or there is too little filler.
    """
    vocabulary = PlantedVocabulary.of(tokenizer)
    lines = sorted(_script(rng, vocabulary, kind, num_facts), key=lambda line: line.time)
    num_planted = sum(_line_length(vocabulary, line) for line in lines)
    num_filler = seq_len - num_planted
    if num_filler < 0 or num_filler > len(filler_tokens):
        raise DataError(
            f"a planted document of {seq_len} tokens with {num_facts} facts has {num_planted} planted tokens, "
            f"and there are {len(filler_tokens)} tokens of text for the rest"
        )
    writer = _Writer(vocabulary)
    used = 0
    for line in lines:
        until = round(line.time * num_filler)
        writer.text(filler_tokens[used:until])
        used = until
        writer.line(line)
    writer.text(filler_tokens[used:num_filler])
    return PlantedDocument(np.asarray(writer.ids, dtype=np.int64), kind, tuple(writer.facts), tuple(writer.questions))


def facts_that_fit(tokenizer: Tokenizer, seq_len: int, wanted: int) -> int:
    """At most `wanted`: as many facts, with two questions each, as fill at most 60 % of `seq_len` tokens."""
    vocabulary = PlantedVocabulary.of(tokenizer)
    per_fact = 3 * _line_length(vocabulary, _Line(0, "@", 0, 0))
    return max(1, min(wanted, len(vocabulary.names), int(0.6 * seq_len) // per_fact))


def _line_length(vocabulary: PlantedVocabulary, line: _Line) -> int:
    has_second = line.mark in "?=" or line.content is not None
    return len(vocabulary.openings[line.mark]) + 1 + has_second + len(vocabulary.closing)


class _Writer:
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

    def line(self, line: _Line) -> None:
        start = len(self.ids)
        self.ids += [*self.vocabulary.openings[line.mark], line.name]
        if line.mark in "?=":
            self._ask(line, start)
        elif line.content is not None:
            self.ids.append(line.content)
        if line.mark not in "?=":
            self._note(line, Fact(line.name, line.content, len(self.ids) - 1))
        self.ids += self.vocabulary.closing

    def _note(self, line: _Line, fact: Fact) -> None:
        self.facts.append(fact)
        if line.mark == "+":
            self._marks.setdefault(line.name, []).append(fact)
        else:
            (self._links if line.mark == ">" else self._values)[line.name] = fact

    def _ask(self, line: _Line, start: int) -> None:
        answer, evidence = self._count(line.name) if line.mark == "=" else self._follow(line.name)
        position = len(self.ids) - 1
        is_first = self._told.get(line.name) != evidence
        self._told[line.name] = evidence
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


def _script(rng: np.random.Generator, vocabulary: PlantedVocabulary, kind: Kind, num_facts: int) -> list[_Line]:
    """The lines of a document; the last one, at time 1, is a question."""
    names = [int(name) for name in rng.permutation(np.asarray(vocabulary.names))]
    if num_facts < 1 or num_facts > len(names):
        raise DataError(f"a planted document can have 1 to {len(names)} facts, not {num_facts}")
    match kind:
        case "single":
            return _single(rng, vocabulary, names[0])
        case "several":
            return _several(rng, vocabulary, names[:num_facts])
        case "latest":
            return _latest(rng, vocabulary, names[: max(1, num_facts // 2)])
        case "chain":
            return _chain(rng, vocabulary, names[: max(2, num_facts - num_facts % 2)])
        case "count":
            return _count(rng, names, num_facts)
    raise DataError(f"there is no kind of planted document '{kind}', only {list(KINDS)}")


def _digit(rng: np.random.Generator, vocabulary: PlantedVocabulary) -> int:
    return vocabulary.digits[int(rng.integers(10))]


def _after(rng: np.random.Generator, time: float) -> float:
    """A later time, near ones more often."""
    return time + (1 - time) * float(rng.random()) ** 3


def _single(rng: np.random.Generator, vocabulary: PlantedVocabulary, name: int) -> list[_Line]:
    fact = _Line(float(rng.random()) * _FACT_WINDOW, "@", name, _digit(rng, vocabulary))
    return [fact, _Line(1.0, "?", name)]


def _several(rng: np.random.Generator, vocabulary: PlantedVocabulary, names: list[int]) -> list[_Line]:
    times = sorted(float(time) for time in rng.random(len(names)) * _FACT_WINDOW)
    lines = [_Line(time, "@", name, _digit(rng, vocabulary)) for time, name in zip(times, names)]
    for time, name in list(zip(times, names))[1:]:
        lines += [_Line(_after(rng, time), "?", name), _Line(float(rng.uniform(time, 1)), "?", name)]
    return [*lines, _Line(1.0, "?", names[0])]


def _latest(rng: np.random.Generator, vocabulary: PlantedVocabulary, names: list[int]) -> list[_Line]:
    lines = []
    for name in names:
        first, second = sorted(float(time) for time in rng.random(2) * _FACT_WINDOW)
        lines += [_Line(time, "@", name, _digit(rng, vocabulary)) for time in (first, second)]
        lines += [_Line(float(rng.uniform(first, second)), "?", name), _Line(_after(rng, second), "?", name)]
    return [*lines, _Line(1.0, "?", names[0])]


def _chain(rng: np.random.Generator, vocabulary: PlantedVocabulary, names: list[int]) -> list[_Line]:
    lines = []
    for name, other in zip(names[::2], names[1::2]):
        link, fact = (float(time) for time in rng.random(2) * _FACT_WINDOW)
        lines += [_Line(link, ">", name, other), _Line(fact, "@", other, _digit(rng, vocabulary))]
        lines.append(_Line(_after(rng, fact), "?", other))
        if name != names[0]:
            lines.append(_Line(float(rng.uniform(max(link, fact), 1)), "?", name))
    return [*lines, _Line(1.0, "?", names[0])]


def _count(rng: np.random.Generator, names: list[int], num_facts: int) -> list[_Line]:
    """Up to nine marks for the name that is asked, the rest for others."""
    asked = int(rng.integers(min(9, num_facts) + 1))
    marked = [names[0]] * asked + [names[1 + int(rng.integers(3))] for _ in range(num_facts - asked)]
    lines = [_Line(float(rng.random()) * _FACT_WINDOW, "+", name) for name in marked]
    return [*lines, _Line(1.0, "=", names[0])]


def recall_probe(
    rng: np.random.Generator,
    filler: Sequence[int] | np.ndarray,
    tokenizer: Tokenizer,
    distance: int,
    total_len: int,
    num_distractors: int = 3,
) -> PlantedDocument:
    """A document of `total_len` tokens that ends with the name in a question: the next token is the answer.

    Exactly `distance` tokens lie between the value and the question's line; distractor facts on other names are spread
    over the rest where there is room. `answer_position` is `total_len`, one behind the last token.

    Raises:
        DataError: `distance` or `total_len` leaves no room for the fact, or there is too little filler.
    """
    vocabulary = PlantedVocabulary.of(tokenizer)
    opening, closing = vocabulary.openings["@"], vocabulary.closing
    names = [int(name) for name in rng.permutation(np.asarray(vocabulary.names))[: num_distractors + 1]]
    line_length = _line_length(vocabulary, _Line(0, "@", 0, 0))
    before = total_len - len(vocabulary.openings["?"]) - 1 - distance - (line_length - len(closing))
    between = distance - len(closing)
    if before < 0 or between < 0:
        raise DataError(f"a recall probe of {total_len} tokens has no room for a distance of {distance}")
    if len(filler) < before + between:
        raise DataError(f"a recall probe of {total_len} tokens needs {before + between} tokens of text")
    writer = _Writer(vocabulary)
    distractors = [_Line(0.0, "@", name, _digit(rng, vocabulary)) for name in names[1:]]
    split = int(rng.binomial(len(distractors), before / max(1, before + between)))
    used = _spread(rng, writer, distractors[:split], filler, before)
    writer.line(_Line(0.0, "@", names[0], _digit(rng, vocabulary)))
    _spread(rng, writer, distractors[split:], filler[used:], between)
    writer.line(_Line(1.0, "?", names[0]))
    ids = np.asarray(writer.ids[:total_len], dtype=np.int64)
    assert len(opening) == len(vocabulary.openings["?"])
    return PlantedDocument(ids, "single", tuple(writer.facts), tuple(writer.questions))


def _spread(
    rng: np.random.Generator, writer: _Writer, lines: list[_Line], filler: Sequence[int] | np.ndarray, room: int
) -> int:
    """Fill exactly `room` tokens with the lines that fit and text between them; returns the text tokens used."""
    length = _line_length(writer.vocabulary, _Line(0, "@", 0, 0))
    lines = lines[: room // length]
    num_filler = room - length * len(lines)
    cuts = sorted(int(cut) for cut in rng.integers(num_filler + 1, size=len(lines)))
    start = 0
    for line, cut in zip(lines, cuts):
        writer.text(filler[start:cut])
        writer.line(line)
        start = cut
    writer.text(filler[start:num_filler])
    return num_filler
