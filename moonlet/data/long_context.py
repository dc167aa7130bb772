"""Long documents whose answers lie scattered over the whole window, with the places of evidence and questions.

Short lines are planted in real text. A line holds one or several entries of one sort. In a fact the name stands right
before the value, in a question right before the answer, so that one look back for the same name answers it, whatever
the distance:

    single    #@ name7 ... #? name7                  one fact, asked at the end
    several   #@ name7 other3 ... #? other3 name7    facts asked at near and far distances, the oldest at the end only
    latest    names get a second value; the last one before the question counts
    chain     #> name other ... #@ other7 ... #? name7        one more hop; either line may come first
    count     #+ name, anywhere and up to nine times ... #= name5

The value is one of the ten digits, so chance is 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import numpy as np

from moonlet.data.planted_lines import Entry, Fact, LineWriter, PlantedVocabulary, Question, line_length
from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer

Kind = Literal["single", "several", "latest", "chain", "count"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FACT_WINDOW = 0.7  # facts lie in this first part of the window, so that far questions find room after them
_PLANTED_SHARE = 0.6  # of a document's tokens at most; the rest is text
_ENTRIES_PER_LINE = 3  # on average
_TOKENS_PER_QUESTION = 32  # a question for each so many tokens, or four for each fact where those are more


@dataclass(frozen=True)
class PlantedDocument:
    """`ids` int64 [T] with the labels of what was planted in it."""

    ids: np.ndarray
    kind: Kind
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]


def planted_document(
    rng: np.random.Generator,
    filler_tokens: Sequence[int] | np.ndarray,
    tokenizer: Tokenizer,
    seq_len: int,
    kind: Kind,
    num_facts: int,
) -> PlantedDocument:
    """A document of exactly `seq_len` tokens: lines of `kind` in the first tokens of `filler_tokens`.

    `num_facts` counts entries other than questions (for `single` it is one whatever is asked for). There are several
    questions for each fact, as far as `seq_len` has room.

    Raises:
        DataError: `seq_len` has no room for so many facts and their questions, or there is too little filler.
    """
    vocabulary = PlantedVocabulary.of(tokenizer)
    entries = sorted(_script(rng, vocabulary, kind, num_facts, seq_len), key=lambda entry: entry.time)
    lines = [list(group) for _, group in groupby(entries, key=lambda entry: (entry.time, entry.mark))]
    num_planted = sum(line_length(vocabulary, line) for line in lines)
    num_filler = seq_len - num_planted
    if num_filler < 0 or num_filler > len(filler_tokens):
        raise DataError(
            f"a planted document of {seq_len} tokens with {num_facts} facts has {num_planted} planted tokens, "
            f"and there are {len(filler_tokens)} tokens of text for the rest"
        )
    writer = LineWriter(vocabulary)
    used = 0
    for line in lines:
        until = round(line[0].time * num_filler)
        writer.text(filler_tokens[used:until])
        used = until
        writer.line(line)
    writer.text(filler_tokens[used:num_filler])
    return PlantedDocument(np.asarray(writer.ids, dtype=np.int64), kind, tuple(writer.facts), tuple(writer.questions))


def facts_that_fit(tokenizer: Tokenizer, seq_len: int, wanted: int) -> int:
    """At most `wanted`: as many facts as leave a document of `seq_len` tokens room for a question on each."""
    vocabulary = PlantedVocabulary.of(tokenizer)
    return max(1, min(wanted, len(vocabulary.names), _entries_that_fit(vocabulary, seq_len) // 2))


def _entries_that_fit(vocabulary: PlantedVocabulary, seq_len: int) -> int:
    overhead = len(vocabulary.openings["@"]) + len(vocabulary.closing)
    return int(_PLANTED_SHARE * seq_len / (2 + overhead / _ENTRIES_PER_LINE))


def _script(
    rng: np.random.Generator, vocabulary: PlantedVocabulary, kind: Kind, num_facts: int, seq_len: int
) -> list[Entry]:
    """The entries of a document; the last one, at time 1, is a question."""
    names = [int(name) for name in rng.permutation(np.asarray(vocabulary.names))]
    if num_facts < 1 or num_facts > len(names):
        raise DataError(f"a planted document can have 1 to {len(names)} facts, not {num_facts}")
    wanted = max(4 * num_facts, seq_len // _TOKENS_PER_QUESTION)
    num_questions = max(1, min(wanted, _entries_that_fit(vocabulary, seq_len) - num_facts))
    match kind:
        case "single":
            facts = _facts(rng, vocabulary, names[:1])
            return [*facts, Entry(1.0, "?", names[0])]
        case "several":
            facts = _facts(rng, vocabulary, names[:num_facts])
        case "latest":
            facts = _facts(rng, vocabulary, names[: max(1, num_facts // 2)] * 2)
        case "chain":
            facts = _chains(rng, vocabulary, names[: max(2, num_facts - num_facts % 2)])
        case "count":
            return _counts(rng, names, num_facts)
        case _:
            raise DataError(f"there is no kind of planted document '{kind}', only {list(KINDS)}")
    return [*facts, *_questions(rng, facts, num_questions)]


def _slots(rng: np.random.Generator, num_entries: int, start: float, end: float) -> np.ndarray:
    """Times of lines, sorted, for so many entries."""
    return np.sort(rng.uniform(start, end, math.ceil(num_entries / _ENTRIES_PER_LINE)))


def _facts(rng: np.random.Generator, vocabulary: PlantedVocabulary, names: list[int]) -> list[Entry]:
    times = rng.choice(_slots(rng, len(names), 0, _FACT_WINDOW), len(names))
    digits = rng.choice(np.asarray(vocabulary.digits), len(names))
    return [Entry(float(time), "@", name, int(digit)) for time, name, digit in zip(times, names, digits)]


def _chains(rng: np.random.Generator, vocabulary: PlantedVocabulary, names: list[int]) -> list[Entry]:
    facts = _facts(rng, vocabulary, names[1::2])
    times = rng.choice(_slots(rng, len(facts), 0, _FACT_WINDOW), len(facts))
    links = [Entry(float(time), ">", name, fact.name) for time, name, fact in zip(times, names[::2], facts)]
    return facts + links


def _questions(rng: np.random.Generator, facts: list[Entry], num_questions: int) -> list[Entry]:
    """Each name at least once where there are enough questions, some often; the oldest at the very end only."""
    known = _known_times(facts)
    oldest = min(known, key=lambda name: (known[name], name))
    others = [name for name in known if name != oldest] or [oldest]
    eagerness = rng.random(len(others)) ** 2 + 0.02
    more = rng.choice(others, num_questions, p=eagerness / eagerness.sum())
    times = [*_slots(rng, num_questions, known[oldest], 1), 1.0]
    asked = []
    for name in [*others, *(int(name) for name in more)][: num_questions - 1]:
        later = [time for time in times if time > known[name]]
        nearness = int(rng.integers(1, 4))  # a third of the questions at any distance, the others rather near
        asked.append(Entry(float(later[int(len(later) * rng.random() ** nearness)]), "?", name))
    return [*asked, Entry(1.0, "?", oldest)]


def _known_times(facts: list[Entry]) -> dict[int, float]:
    """From when on each name can be asked: its first value, and behind a link also the value that it leads to."""
    values: dict[int, float] = {}
    for fact in facts:
        if fact.mark == "@":
            values[fact.name] = min(fact.time, values.get(fact.name, 1.0))
    links = {fact.name: max(fact.time, values[fact.content or 0]) for fact in facts if fact.mark == ">"}
    return {**values, **links}


def _counts(rng: np.random.Generator, names: list[int], num_facts: int) -> list[Entry]:
    """Up to nine marks for the name that is asked, the rest for three others."""
    asked = int(rng.integers(min(9, num_facts) + 1))
    marked = [names[0]] * asked + [int(rng.choice(names[1:4])) for _ in range(num_facts - asked)]
    times = rng.choice(_slots(rng, num_facts, 0, _FACT_WINDOW), num_facts)
    marks = [Entry(float(time), "+", name) for time, name in zip(times, marked)]
    return [*marks, Entry(1.0, "=", names[0])]
