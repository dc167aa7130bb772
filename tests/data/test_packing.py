"""No token is skipped or repeated, rows are nearly full, and batches mix documents."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.data.packing import Packer, Span
from moonlet.data.stream import DocumentStream, counter_rng

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=30)


def packer_of(lengths: list[int], seed: int = 0, read_ahead: int = 8) -> Packer:
    return Packer(DocumentStream(len(lengths), seed, "s"), lengths.__getitem__, read_ahead)


def taken(rows: list[list[Span]]) -> Counter[tuple[int, int, int]]:
    """How often each token (epoch, document, place) is in the rows."""
    spans = [span for row in rows for span in row]
    return Counter((span.epoch, span.index, place) for span in spans for place in range(span.start, span.end))


def as_tuples(row: list[Span]) -> list[tuple[int, int, int, int]]:
    return [(span.epoch, span.index, span.start, span.end) for span in row]


@given(LENGTHS, st.integers(0, 5), st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_each_token_once_an_epoch(lengths, seed, seq_lens):
    """What was read is either in a row or still in the buffer, once; also when the row length changes on the way."""
    packer = packer_of(lengths, seed)
    rows = [packer.next_row(seq_len) for seq_len in seq_lens]
    seen = taken(rows) + taken([packer.spans])
    assert set(seen.values()) == {1}
    read = packer.stream.epoch * len(lengths) + packer.stream.position
    stream, expected = DocumentStream(len(lengths), seed, "s"), set()
    for _ in range(read):
        epoch, index = stream.next()
        expected |= {(epoch, index, place) for place in range(lengths[index])}
    assert set(seen) == expected


@given(LENGTHS, st.sampled_from([16, 50, 64]))
@settings(max_examples=60, deadline=None)
def test_rows_fit_and_pieces_are_only_cut_where_they_must(lengths, seq_len):
    packer = packer_of(lengths)
    for _ in range(30):
        row = packer.next_row(seq_len)
        assert 0 < sum(len(span) for span in row) <= seq_len
        for span in row:
            is_whole = len(span) == lengths[span.index]
            is_full = len(span) == seq_len and span.start % seq_len == 0
            is_remainder = span.end == lengths[span.index] and len(span) == lengths[span.index] % seq_len
            assert is_whole or is_full or is_remainder


@given(LENGTHS, st.integers(0, 30), st.lists(st.sampled_from([16, 32, 64]), min_size=31, max_size=40))
@settings(max_examples=60, deadline=None)
def test_resume_continues_with_the_same_rows(lengths, cut, seq_lens):
    straight = packer_of(lengths)
    expected = [as_tuples(straight.next_row(seq_len)) for seq_len in seq_lens]
    first = packer_of(lengths)
    for seq_len in seq_lens[:cut]:
        first.next_row(seq_len)
    second = packer_of(lengths)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [as_tuples(second.next_row(seq_len)) for seq_len in seq_lens[cut:]] == expected[cut:]


def source_like_lengths(count: int) -> list[int]:
    """Lengths with the spread of source files: median 3,000 tokens, a few fifty times as long."""
    return [int(length) for length in counter_rng(0, "lengths").lognormal(8.0, 1.4, count).clip(60, 200_000)]


def test_padding_is_small_at_every_row_length():
    lengths = source_like_lengths(120)
    for seq_len in (256, 1024, 4096, 16384):
        packer = packer_of(lengths, read_ahead=64)
        num_rows = sum(lengths) // seq_len
        used = sum(len(span) for _ in range(num_rows) for span in packer.next_row(seq_len))
        assert 1 - used / (num_rows * seq_len) < 0.01


def test_short_documents_fill_long_rows():
    """The buffer grows until it offers enough tokens, however short the documents are."""
    packer = packer_of([20, 30, 41] * 200, read_ahead=4)
    rows = [packer.next_row(1024) for _ in range(20)]
    assert sum(len(span) for row in rows for span in row) > 0.99 * 20 * 1024


def test_one_long_document_does_not_fill_a_batch():
    packer = packer_of([100_000] + [5_000] * 63, read_ahead=64)
    documents = Counter(span.index for _ in range(160) for span in packer.next_row(256))
    assert len(documents) > 30
    assert 20 < documents[0] < 70  # its share of the buffer's tokens is a quarter


def test_small_corpus_is_not_read_far_ahead():
    """With fewer documents than the buffer holds, one epoch is nearly used up before the next begins."""
    packer = packer_of([500] * 5, read_ahead=64)
    first_of_epoch: dict[int, int] = {}
    per_epoch: dict[int, int] = defaultdict(int)
    for row in range(60):
        for span in packer.next_row(100):
            first_of_epoch.setdefault(span.epoch, row)
            per_epoch[span.epoch] += len(span)
    assert first_of_epoch[1] > 5
    assert max(span.epoch for span in packer.spans) - min(span.epoch for span in packer.spans) <= 1
