"""One run of the preparation of a corpus, inside a work folder; `corpus.py` says what it writes and moves it into place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from moonlet.config.run import DataConfig, RunConfig
from moonlet.data.dedup import Deduplicator
from moonlet.data.documents import Document, ReadReport, make_document
from moonlet.data.shards import TokenWriter, flush_to_disk
from moonlet.data.sources import read_source
from moonlet.data.split import cut_tail, split_hashes
from moonlet.data.spool import SpooledDocument, TextSpool
from moonlet.errors import DataError
from moonlet.text.tokenizer import Tokenizer, train_tokenizer

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: not known)

MARKER, TOKENIZER, TEXTS = "corpus.json", "tokenizer.json", "texts.jsonl"
_TOKENIZER_BYTES = 256 << 20  # of a larger corpus a sample this large trains the tokenizer
_BATCH_BYTES = 1 << 20


class Preparation:
    """One run of the pipeline inside the work folder."""

    def __init__(self, config: RunConfig, work: Path, seed: int, progress: Progress | None) -> None:
        self.data: DataConfig = config.data
        self.model = config.model
        self.work, self.seed, self.progress = work, seed, progress or _silent
        self.report = ReadReport()
        self.dropped = {"short": 0, "exact_duplicates": 0, "near_duplicates": 0}
        self.names = [source.name for source in config.data.sources if source.kind != "planted"]
        self.written = self.to_write = 0  # bytes of text
        work.mkdir()
        self.spool = TextSpool(work / "spool.bin")

    def run(self, origin: dict[str, Any]) -> None:
        """Write everything; the marker, which also records `origin`, comes last."""
        train, heldout = self._split(self._read())
        tokenizer = self._tokenizer(train)
        tokenizer.save(self.work / TOKENIZER)
        self.to_write = sum(document.num_bytes for document in train + heldout)
        sources = {name: self._write_source(number, name, train, tokenizer) for number, name in enumerate(self.names)}
        held = self._write_part(heldout, "heldout", tokenizer)
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
        with (self.work / MARKER).open("w", encoding="utf-8") as file:
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

    def _write_source(
        self, number: int, name: str, train: list[SpooledDocument], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        part = [document for document in train if document.source == name]
        if not part:
            raise DataError(f"source '{name}' has nothing left to train on; dropped {self.dropped}")
        return self._write_part(part, f"train/{number}", tokenizer)

    def _write_part(self, documents: list[SpooledDocument], name: str, tokenizer: Tokenizer) -> dict[str, Any]:
        writer = TokenWriter(self.work / name, tokenizer.vocab_size)
        end = [tokenizer.special_id("[EOS]")]
        for batch in _batches(documents):
            for document, pieces in zip(batch, self._encode(batch, tokenizer)):
                writer.add(document.id, chain(pieces, [end]))
                self.written += document.num_bytes
            self.progress("tokenising", self.written, self.to_write)
        writer.close()
        num_bytes = sum(document.num_bytes for document in documents)
        return {"folder": name, "documents": len(documents), "tokens": writer.num_tokens, "bytes": num_bytes}

    def _encode(self, batch: list[SpooledDocument], tokenizer: Tokenizer) -> Iterable[Iterable[list[int]]]:
        if len(batch) == 1:
            return [tokenizer.encode_pieces(self.spool.text(batch[0]))]
        return [[ids] for ids in tokenizer.encode_batch([self.spool.text(document) for document in batch])]

    def _write_texts(self, documents: list[SpooledDocument]) -> None:
        with (self.work / "heldout" / TEXTS).open("w", encoding="utf-8") as file:
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


def _silent(phase: str, done: int, total: int) -> None:
    """No progress wanted."""
