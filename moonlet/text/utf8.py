"""Text out of tokens, one at a time."""

from __future__ import annotations

import codecs

from moonlet.text.tokenizer import Tokenizer


class Utf8Stream:
    """Tokens in, text out, as soon as whole characters are there: a character split over tokens is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """What is held back, as U+FFFD; the stream starts again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
