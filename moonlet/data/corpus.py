"""From sources to a prepared corpus on disk, and the reader of it.

Every text is read once into a spool; duplicates are dropped over all sources, the rest is split by content hash, the
tokenizer is trained on the training part, and each part is written as token shards (`shards.py`) in order of content
hash. So the same documents give the same bytes in whatever order they are read, and no held-out document has a
near-duplicate in the training part.

    tokenizer.json   train/<number of the source>/   heldout/ (with texts.jsonl)   corpus.json (written last)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moonlet.config.run import DataConfig, RunConfig, SourceConfig
from moonlet.data.dedup import Deduplicator
from moonlet.data.documents import Document, ReadReport, make_document, read_source
from moonlet.data.shards import TokenShard, TokenWriter, flush_to_disk, storing
from moonlet.data.split import cut_tail, split_hashes
from moonlet.data.spool import SpooledDocument, TextSpool
from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer, train_tokenizer

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: not known)

_FORMAT = 1
_MARKER, _TOKENIZER, _TEXTS = "corpus.json", "tokenizer.json", "texts.jsonl"
_TOKENIZER_BYTES = 256 << 20  # of a larger corpus a sample this large trains the tokenizer
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class HeldoutDocument:
    """`tokens` int64 [T] ends with [EOS]; `num_bytes` is the UTF-8 size of `text`, without it."""

    id: str
    source: str
    tokens: np.ndarray
    num_bytes: int
    text: str


class Corpus:
    """A prepared corpus, opened read-only; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError where the preparation did not finish or a part is damaged."""
        self.folder = folder
        self.manifest = _read_marker(folder)
        self.tokenizer = Tokenizer.load(folder / _TOKENIZER)
        if self.tokenizer.hash != self.manifest["tokenizer_hash"]:
            raise DataError(f"'{folder / _TOKENIZER}' is not the tokenizer that the corpus was written with")
        self._shards: dict[str, TokenShard] = {}

    @property
    def source_names(self) -> list[str]:
        return list(self.manifest["sources"])

    @property
    def planted(self) -> dict[str, SourceConfig]:
        """Sources whose documents are made while training (`long_context.py`), by name."""
        sources = [SourceConfig.parse(table) for table in self.manifest["origin"]["sources"]]
        return {source.name: source for source in sources if source.kind == "planted"}

    def source(self, name: str) -> TokenShard:
        """Training documents of one source."""
        if name not in self.manifest["sources"]:
            raise DataError(f"the corpus in '{self.folder}' has no source '{name}', only {self.source_names}")
        if name not in self._shards:
            part = self.folder / self.manifest["sources"][name]["folder"]
            self._shards[name] = TokenShard(part, self.tokenizer.vocab_size)
        return self._shards[name]

    @cached_property
    def heldout(self) -> list[HeldoutDocument]:
        """Documents never trained on, in order of content hash."""
        shard = TokenShard(self.folder / "heldout", self.tokenizer.vocab_size)
        with (self.folder / "heldout" / _TEXTS).open(encoding="utf-8") as file:
            entries = [json.loads(line) for line in file]
        return [
            HeldoutDocument(
                shard.ids[index], entry["source"], shard.tokens(index), len(entry["text"].encode()), entry["text"]
            )
            for index, entry in enumerate(entries)
        ]


def prepare_corpus(config: RunConfig, folder: Path, seed: int = 0, progress: Progress | None = None) -> Corpus:
    """Write the corpus of `config.data` to `folder`, or open it where it is already there. Safe to kill and call again.

    Of two processes that prepare the same folder one works and the other waits. `seed` chooses which documents train
    the tokenizer where there are more than it reads.

    Raises:
        DataError: nothing is left to train on, a source is malformed, or the folder holds another corpus.
        StorageError: the disk is full or cannot be written; `folder` is as it was.
    """
    origin = describe_origin(config, seed)
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if (folder / _MARKER).is_file():
                return _open_same(folder, origin)
            work = folder.with_name(folder.name + ".partial")
            shutil.rmtree(work, ignore_errors=True)
            try:
                _Preparation(config, work, seed, progress or _silent).run(origin)
                _move_into_place(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return Corpus(folder)


def describe_origin(config: RunConfig, seed: int) -> dict[str, Any]:
    """What decides the contents of a corpus and of the rows made from it."""
    data = config.data.model_dump(mode="json")
    return {"format": _FORMAT, "vocab_size": config.model.vocab_size, "seed": seed, **data}


class _Preparation:
    """One run of the pipeline inside the work folder."""

    def __init__(self, config: RunConfig, work: Path, seed: int, progress: Progress) -> None:
        self.data: DataConfig = config.data
        self.model = config.model
        self.work, self.seed, self.progress = work, seed, progress
        self.report = ReadReport()
        self.dropped = {"short": 0, "exact_duplicates": 0, "near_duplicates": 0}
        self.names = [source.name for source in config.data.sources if source.kind != "planted"]
        work.mkdir()
        self.spool = TextSpool(work / "spool.bin")

    def run(self, origin: dict[str, Any]) -> None:
        train, heldout = self._split(self._read())
        tokenizer = self._tokenizer(train)
        tokenizer.save(self.work / _TOKENIZER)
        sources = {}
        total, done = sum(document.num_bytes for document in train + heldout), 0
        for number, name in enumerate(self.names):
            part = [document for document in train if document.source == name]
            if not part:
                raise DataError(f"source '{name}' has nothing left to train on; dropped {self.dropped}")
            sources[name] = self._write_part(part, f"train/{number}", tokenizer, done, total)
            done += sources[name]["bytes"]
        held = self._write_part(heldout, "heldout", tokenizer, done, total)
        self._write_texts(heldout)
        self.spool.close()
        (self.work / "spool.bin").unlink()
        marker = {
            "origin": origin,
            "tokenizer_hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "sources": sources,
            "heldout": held,
            "dropped": {**self.dropped, "skipped": len(self.report.skipped)},
            "skipped": self.report.skipped,
        }
        with (self.work / _MARKER).open("w", encoding="utf-8") as file:
            json.dump(marker, file, indent=1)
            flush_to_disk(file)

    def _read(self) -> list[SpooledDocument]:
        """Spool every source; the documents that stay after removing duplicates, in order of content hash."""
        dedup = Deduplicator(self.data.exact_dedup, self.data.near_dedup, self.data.near_threshold)
        for document in self._documents():
            self.spool.add(document)
            dedup.add(document)
            self.progress("reading", self.spool.num_bytes, 0)
        self.spool.seal()
        kept = [self.spool.documents[index] for index in dedup.keep()]
        self.dropped.update(exact_duplicates=dedup.num_exact, near_duplicates=dedup.num_near)
        if not kept:
            short = self.dropped["short"]
            raise DataError(
                f"the corpus is empty: sources {self.names}, {short} documents were shorter than "
                f"data.min_characters = {self.data.min_characters}"
            )
        return kept

    def _documents(self) -> Iterator[Document]:
        if not self.names:
            raise DataError(
                "the corpus is empty: data.sources has only planted sources, and they need text around them"
            )
        for source in self.data.sources:
            if source.kind == "planted":
                continue
            taken = 0
            for document in read_source(source, self.report):
                if len(document.text) < self.data.min_characters:
                    self.dropped["short"] += 1
                    continue
                taken += len(document.text.encode())
                yield document
                if self.data.max_bytes is not None and taken >= self.data.max_bytes:
                    break

    def _split(self, kept: list[SpooledDocument]) -> tuple[list[SpooledDocument], list[SpooledDocument]]:
        if len(kept) == 1:
            return self._split_only(kept[0])
        held = split_hashes([document.content_hash for document in kept], self.data.heldout_fraction)
        pairs = list(zip(kept, held))
        return [document for document, out in pairs if not out], [document for document, out in pairs if out]

    def _split_only(self, document: SpooledDocument) -> tuple[list[SpooledDocument], list[SpooledDocument]]:
        """The only document is cut in two."""
        place = document.id.partition(":")[2]
        parts = cut_tail(self.spool.text(document), self.data.heldout_fraction)
        if not all(parts):
            raise DataError(
                f"the corpus is one document of {document.num_bytes} bytes, too short to hold out a part of it"
            )
        first, last = (
            self.spool.add(make_document(text, f"{place}#{name}", document.source))
            for text, name in zip(parts, ("first", "last"))
        )
        self.spool.seal()
        return [first], [last]

    def _tokenizer(self, train: list[SpooledDocument]) -> Tokenizer:
        if self.data.tokenizer:
            tokenizer = Tokenizer.load(Path(self.data.tokenizer).expanduser())
        else:
            self.progress("training the tokenizer", 0, 0)
            sample = choose_sample(train, _TOKENIZER_BYTES, self.seed)
            tokenizer = train_tokenizer((self.spool.text(document) for document in sample), self.model.vocab_size)
        check_vocabulary(tokenizer, self.model.vocab_size, self.model.pad_token_id)
        return tokenizer

    def _write_part(
        self, documents: list[SpooledDocument], name: str, tokenizer: Tokenizer, done: int, total: int
    ) -> dict[str, Any]:
        writer = TokenWriter(self.work / name, tokenizer.vocab_size)
        end = [tokenizer.special_id("[EOS]")]
        for batch in _batches(documents):
            for document, pieces in zip(batch, self._encode(batch, tokenizer)):
                writer.add(document.id, [*pieces, end])
                done += document.num_bytes
            self.progress("tokenising", done, total)
        writer.close()
        num_bytes = sum(document.num_bytes for document in documents)
        return {"folder": name, "documents": len(documents), "tokens": writer.num_tokens, "bytes": num_bytes}

    def _encode(self, batch: list[SpooledDocument], tokenizer: Tokenizer) -> Iterable[Iterable[list[int]]]:
        if len(batch) == 1:
            return [tokenizer.encode_pieces(self.spool.text(batch[0]))]
        return [[ids] for ids in tokenizer.encode_batch([self.spool.text(document) for document in batch])]

    def _write_texts(self, documents: list[SpooledDocument]) -> None:
        with (self.work / "heldout" / _TEXTS).open("w", encoding="utf-8") as file:
            for document in documents:
                file.write(json.dumps({"source": document.source, "text": self.spool.text(document)}) + "\n")
            flush_to_disk(file)


def choose_sample(documents: list[SpooledDocument], max_bytes: int, seed: int) -> list[SpooledDocument]:
    """All documents, or where they are more than `max_bytes` a part chosen by content hash and seed."""
    if sum(document.num_bytes for document in documents) <= max_bytes:
        return documents
    salt = seed.to_bytes(8, "little", signed=True)
    chosen, taken = [], 0
    for document in sorted(documents, key=lambda entry: hashlib.sha256(salt + entry.content_hash).digest()):
        chosen.append(document)
        taken += document.num_bytes
        if taken >= max_bytes:
            break
    return chosen


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, pad_token_id: int) -> None:
    """Raises DataError where the tokenizer and the model's vocabulary do not fit each other."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is {vocab_size}")
    pad = tokenizer.special_id("[PAD]")
    if pad != pad_token_id:
        raise DataError(f"the tokenizer's [PAD] is {pad}, but model.pad_token_id is {pad_token_id}; set it to {pad}")


def _batches(documents: list[SpooledDocument]) -> Iterator[list[SpooledDocument]]:
    """Groups of about a megabyte; a larger document is alone."""
    batch: list[SpooledDocument] = []
    size = 0
    for document in documents:
        if batch and size + document.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.num_bytes
    if batch:
        yield batch


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no prepared corpus in '{folder}'; run `moonlet run` to prepare one") from None
    except ValueError as error:
        raise DataError(f"'{folder / _MARKER}' is damaged ({error}); delete '{folder}' and prepare it again") from None


def _open_same(folder: Path, origin: dict[str, Any]) -> Corpus:
    corpus = Corpus(folder)
    found = corpus.manifest["origin"]
    changed = sorted(key for key in origin.keys() | found.keys() if origin.get(key) != found.get(key))
    if changed:
        raise DataError(
            f"'{folder}' was prepared with other values of {changed}; use another run directory, or delete that folder"
        )
    return corpus


def _move_into_place(work: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # without its marker it holds nothing that counts
    os.replace(work, folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel frees it however the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(phase: str, done: int, total: int) -> None:
    """No progress wanted."""
