"""Preparation: the same bytes from the same documents, and what comes back from them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from moonlet.data.corpus import Corpus, HeldoutDocument, prepare_corpus
from moonlet.data.preparation import choose_sample
from moonlet.data.spool import SpooledDocument
from moonlet.errors import DataError
from moonlet.text.tokenizer import train_tokenizer


def training_texts(corpus: Corpus) -> list[str]:
    tokenizer = corpus.tokenizer
    shards = [corpus.source(name) for name in corpus.source_names]
    return [tokenizer.decode(shard.tokens(index)[:-1]) for shard in shards for index in range(len(shard))]


def test_every_document_comes_back_exactly(corpus, text_folder):
    files = {path.read_text(encoding="utf-8") for path in text_folder.rglob("*.py")}
    held = {document.text for document in corpus.heldout}
    trained = training_texts(corpus)
    assert held | set(trained) == files
    assert len(held) + len(trained) == len(files)


def test_documents_end_with_eos_and_have_it_nowhere_else(corpus):
    eos = corpus.tokenizer.special_id("[EOS]")
    for tokens in [corpus.source("email").tokens(0), *(document.tokens for document in corpus.heldout)]:
        assert tokens.dtype == np.int64
        assert np.flatnonzero(tokens == eos).tolist() == [len(tokens) - 1]


def test_heldout_documents_carry_text_and_bytes(corpus):
    assert corpus.heldout
    for document in corpus.heldout:
        assert isinstance(document, HeldoutDocument)
        assert document.source in ("email", "json")
        assert document.num_bytes == len(document.text.encode())
        assert corpus.tokenizer.decode(document.tokens[:-1]) == document.text


def test_manifest_counts(corpus, text_folder):
    entries = [*corpus.manifest["sources"].values(), corpus.manifest["heldout"]]
    assert sum(entry["documents"] for entry in entries) == 13
    assert sum(entry["bytes"] for entry in entries) == sum(path.stat().st_size for path in text_folder.rglob("*.py"))
    assert corpus.manifest["sources"]["json"]["tokens"] == corpus.source("json").num_tokens
    assert list(corpus.planted) == ["planted"]


def test_same_bytes_whatever_the_files_are_called(new_recipe, new_source, text_folder, tmp_path, digest):
    """Other names give another reading order; contents alone decide split, order and tokenizer."""
    (tmp_path / "renamed").mkdir()
    for number, path in enumerate(sorted(text_folder.rglob("*.py"), reverse=True)):
        shutil.copyfile(path, tmp_path / "renamed" / f"{number:03}.py")
    digests = []
    for name, origin in (("a", text_folder), ("b", tmp_path / "renamed")):
        prepare_corpus(new_recipe([new_source("text", origin)], heldout_fraction=0.2), tmp_path / name)
        digests.append({file: value for file, value in digest(tmp_path / name).items() if "ids.jsonl" not in file})
    assert digests[0] == digests[1]


def test_no_near_duplicate_of_a_heldout_document_is_trained_on(new_recipe, new_source, text_folder, tmp_path):
    more = "\n# one more line\n"
    shutil.copytree(text_folder, tmp_path / "texts")
    for path in list((tmp_path / "texts").rglob("*.py")):
        path.with_suffix(".edited.py").write_text(path.read_text() + more)
    config = new_recipe([new_source("text", tmp_path / "texts")], heldout_fraction=0.5)
    corpus = prepare_corpus(config, tmp_path / "data")
    assert corpus.manifest["dropped"]["near_duplicates"] == 13
    held = {document.text.removesuffix(more) for document in corpus.heldout}
    assert held
    assert not held & {text.removesuffix(more) for text in training_texts(corpus)}


def test_second_call_opens_what_is_there(config, tmp_path):
    prepare_corpus(config, tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    phases = []
    prepare_corpus(config, tmp_path / "data", progress=lambda phase, done, total: phases.append(phase))
    assert not phases
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before


def test_another_configuration_is_refused(config, new_recipe, new_source, text_folder, tmp_path):
    prepare_corpus(config, tmp_path / "data")
    other = new_recipe([new_source("text", text_folder)], heldout_fraction=0.3)
    with pytest.raises(DataError, match=r"heldout_fraction.*another run directory"):
        prepare_corpus(other, tmp_path / "data")


def test_progress_names_its_phases_and_ends_complete(config, tmp_path):
    seen: list[tuple[str, int, int]] = []
    prepare_corpus(config, tmp_path / "data", progress=lambda *values: seen.append(values))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["reading", "training the tokenizer", "tokenising"]
    assert seen[-1][1] == seen[-1][2] > 0


def test_existing_tokenizer_is_taken(new_recipe, new_source, text_folder, tmp_path):
    train_tokenizer(["some other text"] * 3, 512).save(tmp_path / "own.json")
    config = new_recipe([new_source("text", text_folder)], tokenizer=str(tmp_path / "own.json"))
    corpus = prepare_corpus(config, tmp_path / "data")
    assert (corpus.folder / "tokenizer.json").read_bytes() == (tmp_path / "own.json").read_bytes()


@pytest.mark.parametrize(("size", "message"), [(600, "vocab_size is 512"), (500, "pad_token_id is 511.*set it to 499")])
def test_tokenizer_must_fit_the_model(new_recipe, new_source, text_folder, tmp_path, size, message):
    train_tokenizer(["text"], size).save(tmp_path / "own.json")
    config = new_recipe([new_source("text", text_folder)], tokenizer=str(tmp_path / "own.json"))
    with pytest.raises(DataError, match=message):
        prepare_corpus(config, tmp_path / "data")


def test_only_short_documents(new_recipe, new_source, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    config = new_recipe([new_source("text", tmp_path / "short.txt")])
    with pytest.raises(DataError, match=r"corpus is empty.*1 documents were shorter.*min_characters = 200"):
        prepare_corpus(config, tmp_path / "data")
    assert not list(tmp_path.glob("*.partial"))


def test_only_planted_sources(new_recipe, new_source, tmp_path):
    with pytest.raises(DataError, match="only planted sources"):
        prepare_corpus(new_recipe([new_source("planted")]), tmp_path / "data")


def test_a_source_that_is_a_copy_of_another(new_recipe, new_source, text_folder, tmp_path):
    sources = [new_source("text", text_folder, name=name) for name in ("one", "two")]
    with pytest.raises(DataError, match=r"source 'two' has nothing left.*'exact_duplicates': 13"):
        prepare_corpus(new_recipe(sources), tmp_path / "data")


def test_skipped_files_are_in_the_manifest(new_recipe, new_source, text_folder, tmp_path):
    shutil.copytree(text_folder, tmp_path / "texts")
    (tmp_path / "texts" / "latin1.py").write_bytes("# é\n".encode("latin-1") * 100)
    corpus = prepare_corpus(new_recipe([new_source("text", tmp_path / "texts")]), tmp_path / "data")
    assert corpus.manifest["skipped"] == ["latin1.py"]
    assert corpus.manifest["dropped"]["skipped"] == 1


def test_max_bytes_stops_reading(new_recipe, new_source, text_folder, tmp_path):
    corpus = prepare_corpus(new_recipe([new_source("text", text_folder)], max_bytes=20_000), tmp_path / "data")
    entries = [*corpus.manifest["sources"].values(), corpus.manifest["heldout"]]
    assert 20_000 <= sum(entry["bytes"] for entry in entries) < 60_000


def test_one_document_holds_out_its_tail(new_recipe, new_source, text_folder, tmp_path):
    path = text_folder / "email" / "header.py"
    corpus = prepare_corpus(new_recipe([new_source("text", path)], heldout_fraction=0.1), tmp_path / "data")
    (last,) = corpus.heldout
    (first,) = training_texts(corpus)
    assert first + last.text == path.read_text()
    assert 0.05 < last.num_bytes / path.stat().st_size < 0.15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train/0/tokens.bin", "cut short"),
        ("train/0/documents.npy", "damaged"),
        ("tokenizer.json", "tokenizer"),
        ("corpus.json", "damaged"),
    ],
)
def test_damaged_part_is_named(config, tmp_path, name, message):
    prepare_corpus(config, tmp_path / "data")
    file: Path = tmp_path / "data" / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DataError, match=message):
        Corpus(tmp_path / "data").source("text")


def test_absent_corpus_and_source(corpus, tmp_path):
    with pytest.raises(DataError, match="no prepared corpus"):
        Corpus(tmp_path)
    with pytest.raises(DataError, match="no source 'other'"):
        corpus.source("other")


def test_window_goes_round(corpus):
    shard = corpus.source("json")
    everything = np.concatenate([shard.tokens(index) for index in range(len(shard))])
    assert shard.window(3, 10).tolist() == everything[3:13].tolist()
    assert shard.window(len(everything) - 2, 5).tolist() == [*everything[-2:], *everything[:3]]


def test_sample_for_the_tokenizer_depends_on_content_and_seed_only():
    hashes = [hashlib.sha256(str(number).encode()).digest() for number in range(100)]
    documents = [SpooledDocument(str(number), "s", value, 0, 10) for number, value in enumerate(hashes)]
    assert choose_sample(documents, 1000, 0) == documents
    chosen = choose_sample(documents, 200, 3)
    assert len(chosen) == 20
    assert choose_sample(documents[::-1], 200, 3) == chosen
    assert choose_sample(documents, 200, 4) != chosen
