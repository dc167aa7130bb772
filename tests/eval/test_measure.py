"""A run measured as a whole: what is written, what it adds up to, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import trained_run

from moonlet.data.corpus import Corpus, prepare_corpus
from moonlet.errors import CheckpointError, DataError, NoCheckpointError, StorageError
from moonlet.eval.measure import load_subject, measure_run
from moonlet.eval.perplexity import choose_heldout, compressors, heldout_bits_per_byte
from moonlet.report.metrics import read_metrics


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def test_every_piece_is_written_as_returned(copy: Path) -> None:
    pieces = measure_run(copy)
    assert set(pieces) == {"heldout", "recall", "samples", "depth"}
    for stem, found in pieces.items():
        assert json.loads((copy / "eval" / f"{stem}.json").read_text()) == json.loads(json.dumps(found))
    assert list((copy / "eval").glob("*.draft")) == []
    assert pieces["recall"]["distances"] == [20, 60] and pieces["recall"]["probes"] == 12
    assert [sample["prompt"] for sample in pieces["samples"]] == ["about ", "x = 1\n"]
    assert all(sample["parses"] is None for sample in pieces["samples"])  # the model learnt from prose


def test_every_byte_of_the_heldout_files_is_paid_for_once(copy: Path) -> None:
    heldout = measure_run(copy, distances=[])["heldout"]
    corpus = Corpus(copy / "data")
    texts = [document.text.encode() for document in corpus.heldout]
    assert heldout["bytes"] == sum(map(len, texts)) and heldout["documents"] == len(texts)
    assert heldout["tokens"] == sum(len(document.tokens) for document in corpus.heldout)
    for document, text in zip(corpus.heldout, texts):
        assert corpus.tokenizer.decode_bytes(document.tokens[:-1]) == text
    assert heldout["compressors"] == compressors(b"".join(texts))


def test_the_score_after_the_last_stage_is_the_score_of_the_run(copy: Path) -> None:
    heldout = measure_run(copy, distances=[])["heldout"]
    assert [stage["stage"] for stage in heldout["by_stage"]] == ["short", "long"]
    assert heldout["by_stage"][-1]["bits_per_byte"] == pytest.approx(heldout["bits_per_byte"], rel=1e-5)


def test_depth_lines_stand_in_the_metrics_of_each_stage(run: Path) -> None:
    lines = read_metrics(run, "depth")
    assert [line["stage"] for line in lines] == ["short", "long"]
    assert all(len(line["weights"]) == len(line["sites"]) > 0 for line in lines)


def test_measuring_twice_gives_the_same(copy: Path) -> None:
    assert measure_run(copy) == measure_run(copy)


def test_distances_can_be_chosen(copy: Path) -> None:
    assert measure_run(copy, distances=[33])["recall"]["distances"] == [33]
    assert "recall" not in measure_run(copy, distances=[])


def test_a_checkpoint_of_an_earlier_stage_is_measured_at_its_window(copy: Path) -> None:
    first = min((copy / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    subject = load_subject(first)
    assert (subject.step, subject.stage.name, subject.run) == (3, "short", copy)


def test_a_limit_takes_whole_documents(run: Path) -> None:
    subject = load_subject(run)
    everything = choose_heldout(subject.corpus)
    assert everything == subject.corpus.heldout
    assert choose_heldout(subject.corpus, 1) == everything[:1]
    two = sum(len(document.tokens) for document in everything[:2])
    assert choose_heldout(subject.corpus, two) == everything[:2]
    score = heldout_bits_per_byte(subject.model, subject.corpus, seq_len=64, max_tokens=two)
    assert (score.tokens, score.bytes) == (two, sum(document.num_bytes for document in everything[:2]))


def test_an_unfinished_run_is_refused_by_what_is_missing(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="nowhere"):
        measure_run(tmp_path / "nowhere")
    data = shutil.move(copy / "data", tmp_path / "data")
    with pytest.raises(DataError):
        measure_run(copy)
    shutil.move(data, copy / "data")
    for marker in (copy / "checkpoints").glob("*/COMPLETE"):
        marker.unlink()
    with pytest.raises(NoCheckpointError, match="no complete checkpoint"):
        measure_run(copy)


def test_another_corpus_is_refused(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "texts").mkdir(parents=True)
    for number in range(30):
        text = f"quite other words are here, number {number}, and they repeat: here, here, {number * 7}.\n"
        (tmp_path / "other" / "texts" / f"{number}.txt").write_text(text * 4)
    shutil.rmtree(copy / "data")
    prepare_corpus(trained_run.recipe(tmp_path / "other" / "texts"), copy / "data")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        measure_run(copy)


def test_a_place_that_cannot_be_written_is_named(copy: Path) -> None:
    (copy / "eval").write_text("in the way")
    with pytest.raises(StorageError, match="eval"):
        measure_run(copy)
