"""Steps of a stage: shapes and masks, mixture by tokens, and a resume that repeats and skips nothing (B40, B41)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonlet.config import StageConfig
from moonlet.data.batches import BatchStream, PackedBatch, labels, pack_rows
from moonlet.data.corpus import Corpus
from moonlet.data.rows import Row
from moonlet.errors import CheckpointError, DataError


def stage(seq_len: int = 128, rows: int = 8, **mixture: float) -> StageConfig:
    mixture = mixture or {"email": 0.5, "json": 0.3, "planted": 0.2}
    return StageConfig(name="s", seq_len=seq_len, tokens=1 << 20, batch_tokens=rows * seq_len, mixture=mixture)


def values(row: Row) -> tuple[Any, ...]:
    return row.ids.tolist(), row.seq_lens, row.loss_mask.tolist(), row.pieces, row.answers


def steps(stream: BatchStream, count: int) -> list[list[tuple[Any, ...]]]:
    return [[values(row) for row in stream.next_rows()] for _ in range(count)]


def reloaded(corpus: Corpus, config: StageConfig, stream: BatchStream, seed: int = 0) -> BatchStream:
    """What a new process has after reading the state from a checkpoint."""
    fresh = BatchStream(corpus, config, seed)
    fresh.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    return fresh


def test_rows_of_a_step(corpus):
    rows = BatchStream(corpus, stage(), 0).next_rows()
    assert len(rows) == 8
    pad = corpus.tokenizer.special_id("[PAD]")
    for row in rows:
        assert row.ids.shape == row.loss_mask.shape == (128,)
        assert (row.ids.dtype, row.loss_mask.dtype) == (np.int64, np.bool_)
        assert sum(row.seq_lens) == 128
        assert ((row.ids == pad) == ~row.loss_mask).all()


def test_pieces_say_where_the_tokens_come_from(corpus):
    stream = BatchStream(corpus, stage(512, 4, email=1.0), 0)
    for _ in range(10):
        for row in stream.next_rows():
            start = 0
            for piece, length in zip(row.pieces, row.seq_lens):
                shard = corpus.source(piece.source)
                index = shard.ids.index(piece.document_id)
                expected = shard.tokens(index, piece.start, piece.end)
                assert row.ids[start : start + length].tolist() == expected.tolist()
                start += length


def test_mixture_is_by_tokens(corpus):
    stream = BatchStream(corpus, stage(), 0)
    tokens: Counter[str] = Counter()
    for _ in range(50):
        for row in stream.next_rows():
            tokens[row.pieces[0].source] += len(row.ids)
    total = sum(tokens.values())
    assert {name: round(count / total, 1) for name, count in tokens.items()} == {
        "email": 0.5,
        "json": 0.3,
        "planted": 0.2,
    }


def test_the_seed_decides(corpus):
    assert steps(BatchStream(corpus, stage(), 5), 3) == steps(BatchStream(corpus, stage(), 5), 3)
    assert steps(BatchStream(corpus, stage(), 5), 3) != steps(BatchStream(corpus, stage(), 6), 3)


@given(st.lists(st.integers(0, 12), min_size=5, max_size=5))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_five_interruptions_change_nothing(corpus, cuts):
    """B41: the buffer of the packer and the position in the mixture survive any interruption."""
    config = stage()
    straight = BatchStream(corpus, config, 0)
    expected, consumed = [], []
    for _ in range(20):
        expected += steps(straight, 1)
        consumed.append(straight.consumed_ids)
    stream, found, found_ids = BatchStream(corpus, config, 0), [], []
    for step in range(20):
        for _ in range(cuts.count(step)):
            stream = reloaded(corpus, config, stream)
        found += steps(stream, 1)
        found_ids.append(stream.consumed_ids)
    assert found == expected
    assert found_ids == consumed


def test_work_after_the_saved_state_is_forgotten(corpus):
    """A checkpoint at step 4, two more steps, then a crash: the resume gives steps 5 and 6 again."""
    stream = BatchStream(corpus, stage(), 0)
    steps(stream, 4)
    saved = json.dumps(stream.state_dict())
    lost = steps(stream, 2)
    stream.load_state_dict(json.loads(saved))
    assert steps(stream, 2) == lost


def test_document_order_goes_on_across_stages(corpus):
    """Three stages of growing rows, one of them without a source: each token once an epoch, over all of them."""
    configs = [stage(64, 8, email=0.6, json=0.4), stage(256, 4, email=1.0), stage(512, 2, email=0.5, json=0.5)]
    seen: Counter[tuple[str, str, int, int]] = Counter()
    state = None
    for config in configs:
        stream = BatchStream(corpus, config, 0, resume_from=state)
        for _ in range(12):
            for row in stream.next_rows():
                for piece in row.pieces:
                    places = range(piece.start, piece.end)
                    seen.update((piece.source, piece.document_id, piece.epoch, place) for place in places)
        state = json.loads(json.dumps(stream.state_dict()))
    assert set(seen.values()) == {1}
    for name in ("email", "json"):
        epochs = {epoch for source, _, epoch, _ in seen if source == name}
        for epoch in range(max(epochs) - 1):
            complete = sum(1 for source, _, number, _ in seen if (source, number) == (name, epoch))
            assert complete == corpus.source(name).num_tokens


def test_stage_change_then_resume(corpus):
    first, second = stage(64, 8), stage(256, 4)
    stream = BatchStream(corpus, first, 0)
    steps(stream, 5)
    state = stream.state_dict()
    straight = BatchStream(corpus, second, 0, resume_from=state)
    steps(straight, 3)
    resumed = reloaded(corpus, second, straight)
    assert steps(resumed, 4) == steps(straight, 4)


def test_state_is_small_and_plain(corpus):
    stream = BatchStream(corpus, stage(), 0)
    steps(stream, 10)
    assert len(json.dumps(stream.state_dict())) < 4096


def test_state_of_another_corpus_or_a_damaged_one_is_refused(corpus):
    state = BatchStream(corpus, stage(), 0).state_dict()
    state["sources"]["email"]["stream"]["documents"] += 1
    with pytest.raises(CheckpointError, match="resume with the corpus of that run"):
        BatchStream(corpus, stage(), 0, resume_from=state)
    with pytest.raises(CheckpointError, match="damaged"):
        BatchStream(corpus, stage(), 0, resume_from={"sources": {}})


def test_unknown_source(corpus):
    with pytest.raises(DataError, match="'other'"):
        BatchStream(corpus, stage(64, 1, other=1.0), 0)


def test_pack_rows_and_labels():
    rows = [
        Row(np.array([5, 6, 7, 8, 0, 0]), (3, 1, 2), np.array([1, 1, 1, 1, 0, 0], dtype=bool), ()),
        Row(np.array([1, 2, 3, 4, 5, 6]), (6,), np.array([1, 1, 0, 1, 1, 1], dtype=bool), ()),
    ]
    batch = pack_rows(rows)
    assert batch.seq_lens == (3, 1, 2, 6)
    assert batch.ids.tolist() == [5, 6, 7, 8, 0, 0, 1, 2, 3, 4, 5, 6]
    assert labels(batch).tolist() == [6, 7, -100, -100, -100, -100, 2, -100, 4, 5, 6, -100]


def test_labels_never_cross_a_document(corpus):
    stream = BatchStream(corpus, stage(512, 4), 0)
    for _ in range(5):
        batch = pack_rows(stream.next_rows())
        targets, start = labels(batch), 0
        for length in batch.seq_lens:
            inside = batch.ids[start + 1 : start + length]
            trained = batch.loss_mask[start + 1 : start + length]
            expected = torch.where(trained, inside, torch.tensor(-100))
            assert torch.equal(targets[start : start + length - 1], expected)
            assert targets[start + length - 1] == -100
            start += length


def test_borders_travel_as_seq_lens_only(corpus):
    """B08, the data part: a document's labels do not depend on its neighbour in the row."""
    stream = BatchStream(corpus, stage(512, 1, json=1.0), 0)
    batch = next(batch for batch in (pack_rows(stream.next_rows()) for _ in range(200)) if len(batch.seq_lens) > 2)
    border = batch.seq_lens[0]
    changed = batch.ids.clone()
    changed[border - 1] = 3
    other = PackedBatch(changed, batch.seq_lens, batch.loss_mask)
    assert torch.equal(labels(batch)[border:], labels(other)[border:])
    assert labels(batch)[border - 1] == labels(other)[border - 1] == -100


def test_lengths_must_agree():
    ids, mask = torch.arange(4), torch.ones(4, dtype=torch.bool)
    for wrong in [(ids, (3,), mask), (ids, (4,), mask[:3]), (ids[None], (4,), mask[None])]:
        with pytest.raises(ValueError, match="same length"):
            PackedBatch(*wrong)
