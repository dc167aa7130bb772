"""Byte-level BPE with the released block of special tokens (k3_model.md section 6).

Text is always ordinary: `encode` works on a copy of the tokenizer that has no special token at all, so a control string
inside a document or a user's message can never become a control id. Control ids come from `special_id` only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# One thread per process is the rule of the house; it also silences the library's warning after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from moonlet.errors import DataError, nearest_name

# The released roles in their released order. They are the last ids of every vocabulary trained here.
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[start_header_id]",
    "[end_header_id]",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<osagent_mode>",
    "[UNK]",
    "[PAD]",
)

# Where the same roles lie in the released vocabulary of 163,840.
RELEASED_SPECIAL_TOKENS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "[start_header_id]": 163590,
    "[end_header_id]": 163591,
    "[EOT]": 163593,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<osagent_mode>": 163649,
    "[UNK]": 163838,
    "[PAD]": 163839,
}

# The released table flags these as not special: a decoder that skips special tokens keeps them.
_KEPT_WHEN_SKIPPING = {"<|open|>", "<|close|>", "<|sep|>"}

# A word with one mark or space before it; single digits; marks with the line end and the indentation that follow them;
# white space. On Python source this gives 5 % more bytes per token than GPT-2's pattern at a vocabulary of 2048.
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?: *(?= ))?)?"
    r"|\s+(?!\S)|\s+"
)
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
_PIECE_CHARACTERS = 1 << 20
# A line end between two printable ASCII characters always separates words, so text may be cut after it.
_SAFE_CUT = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


class Tokenizer:
    """A byte-level BPE tokenizer. `hash` is the sha256 (hex) of its file, which checkpoints and corpora store."""

    def __init__(self, file_bytes: bytes, where: str = "tokenizer") -> None:
        """Read the contents of a `tokenizer.json`.

        Raises:
            DataError: it is not a byte-level BPE tokenizer with the special tokens above.
        """
        self._file_bytes = file_bytes
        self.hash = hashlib.sha256(file_bytes).hexdigest()
        table = _parse(file_bytes, where)
        self._special_ids = {token["content"]: int(token["id"]) for token in table["added_tokens"]}
        missing = [name for name in SPECIAL_TOKENS if name not in self._special_ids]
        if missing:
            raise DataError(f"{where}: the special tokens {missing} are missing; train a tokenizer with `moonlet run`")
        self._plain = _without_specials(table, where)
        self._bytes = _byte_table(table["model"]["vocab"], self._special_ids, where)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Raises DataError where the file is absent or damaged."""
        try:
            return cls(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"cannot read the tokenizer '{path}': {error.strerror}") from None

    def save(self, path: Path | str) -> None:
        """Write the file byte for byte as it was read or trained, so that `hash` stays the same."""
        Path(path).write_bytes(self._file_bytes)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self._bytes)

    def special_id(self, name: str) -> int:
        if name not in self._special_ids:
            raise DataError(f"there is no special token '{name}'{nearest_name(name, self._special_ids)}")
        return self._special_ids[name]

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; control strings in it stay text."""
        return [token for piece in self.encode_pieces(text) for token in piece]

    def encode_pieces(self, text: str, piece_characters: int = _PIECE_CHARACTERS) -> Iterator[list[int]]:
        """`encode` in pieces of about `piece_characters`, for documents whose ids would not fit in memory as a list."""
        for piece in _cut(text, piece_characters):
            yield self._plain.encode(_checked(piece), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        encodings = self._plain.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens appear literally, bytes that are not UTF-8 as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of `ids`, exact also where a token ends inside a character."""
        return b"".join([self._bytes[token] for token in ids])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: 256 bytes, merges learnt from `texts`, the 16 special tokens at the end.

    The same texts give the same file in any order. Texts with too few merges leave reserved tokens before the specials.

    Raises:
        DataError: `vocab_size` leaves no room for the 256 bytes and the special tokens.
    """
    if vocab_size < _MIN_VOCAB:
        raise DataError(f"a byte-level vocabulary needs at least {_MIN_VOCAB} ids, got vocab_size {vocab_size}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    num_ranks = vocab_size - len(SPECIAL_TOKENS)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    reserved = [f"<|reserved_token_{rank}|>" for rank in range(tokenizer.get_vocab_size(), num_ranks)]
    for name in [*reserved, *SPECIAL_TOKENS]:
        tokenizer.add_tokens([_added(name)])
    return Tokenizer(tokenizer.to_str().encode())


def _added(name: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(name, normalized=False, special=name not in _KEPT_WHEN_SKIPPING)


def _parse(file_bytes: bytes, where: str) -> dict[str, Any]:
    try:
        table = json.loads(file_bytes)
        if not (isinstance(table["model"]["vocab"], dict) and table["added_tokens"]):
            raise KeyError("vocab")
        return table
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where} is not a byte-level BPE tokenizer.json, or it is cut short ({reason})") from None


def _without_specials(table: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    """The same merges with no added token, truncation or padding: what ordinary text is encoded with."""
    plain = {**table, "added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{where} does not load as a tokenizer: {error}") from None


def _byte_table(vocab: dict[str, int], special_ids: dict[str, int], where: str) -> list[bytes]:
    """Bytes by id."""
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    size = max([*vocab.values(), *special_ids.values()]) + 1
    table = [b""] * size
    try:
        for token, rank in vocab.items():
            if token not in special_ids:
                table[rank] = bytes([byte_of[character] for character in token])
    except KeyError as error:
        raise DataError(f"{where} is not byte-level: its vocabulary has the character {error}") from None
    for name, rank in special_ids.items():
        table[rank] = name.encode()
    return table


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _cut(text: str, size: int) -> Iterator[str]:
    """Pieces of at least `size` characters, cut only where no word can lie across."""
    start = 0
    while len(text) - start > size and (cut := _SAFE_CUT.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _checked(text: str) -> str:
    """`text`, refused where it holds half a surrogate pair, which no bytes stand for."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        raise DataError(f"text is not valid Unicode at character {error.start}: {error.reason}") from None
