"""What every endpoint needs: the engine, the tokenizer, the settings, and which tokens may be drawn where."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from moonlet.errors import MoonletError, RequestError
from moonlet.serve.engine_thread import EngineThread
from moonlet.serve.openai.schema import SamplingFields
from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request, TokenEvent
from moonlet.text.tokenizer import SPECIAL_TOKENS, Tokenizer

_RESERVED = re.compile(rb"<\|reserved_token_\d+\|>")
_CHAT_CONTROLS = ("[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")


@dataclass(frozen=True)
class ServeConfig:
    """Settings of the API.

    Attributes:
        model_name: under which the model is listed and asked for.
        api_key: what clients send as a bearer key; None lets everybody in who reaches the port.
        max_body_bytes: of a request.
        body_timeout_s: for a request's body to arrive.
        answer_timeout_s: from submission; what is there by then is the answer.
        default_max_tokens: of an answer whose request does not say, where the context has room for it.
    """

    model_name: str = "moonlet"
    api_key: str | None = None
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    answer_timeout_s: float = 600.0
    default_max_tokens: int = 4096


class Streaming(Protocol):
    """The one thing that answers need of an `EngineThread`."""

    def stream(self, request: Request) -> AsyncIterator[TokenEvent]: ...


class AnswerFailedError(MoonletError):
    """The engine gave an answer up; the message says why."""


class UnknownModelError(MoonletError):
    """A request asks for a model that is not served here."""


@dataclass
class Service:
    """One per application."""

    thread: EngineThread
    tokenizer: Tokenizer
    config: ServeConfig

    def __post_init__(self) -> None:
        self.started_at = int(time.time())

    @cached_property
    def _controls(self) -> frozenset[int]:
        """Ids that stand for no text, and those that the model has beyond the tokenizer's."""
        special = {self.tokenizer.special_id(name) for name in SPECIAL_TOKENS}
        empty = {token for token in range(self.tokenizer.vocab_size) if self._is_reserved(token)}
        return frozenset(special | empty | set(range(self.tokenizer.vocab_size, self.vocab_size)))

    def _is_reserved(self, token: int) -> bool:
        spelling = self.tokenizer.decode_bytes([token])
        return not spelling or _RESERVED.fullmatch(spelling) is not None

    @property
    def vocab_size(self) -> int:
        return self.thread.engine.model.config.vocab_size

    @cached_property
    def text_stops(self) -> frozenset[int]:
        return frozenset({self.tokenizer.special_id("[EOS]")})

    @cached_property
    def text_banned(self) -> frozenset[int]:
        """Never drawn in a continuation: every control token but [EOS]."""
        return self._controls - self.text_stops

    @cached_property
    def chat_stops(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_id(name) for name in ("[EOS]", "<|end_of_msg|>"))

    @cached_property
    def chat_banned(self) -> frozenset[int]:
        """Never drawn in a message: control tokens that its format has no place for."""
        return self._controls - {self.tokenizer.special_id(name) for name in _CHAT_CONTROLS}

    def check_model(self, name: str | None) -> None:
        if name and name != self.config.model_name:
            raise UnknownModelError(f"there is no model '{name}' here; this server has '{self.config.model_name}'")

    def sampling(self, asked: SamplingFields) -> SamplingParams:
        """Raises RequestError for values out of range."""
        strange = [token for token in asked.logit_bias if not 0 <= token < self.vocab_size]
        if strange:
            raise RequestError(f"logit_bias names token {strange[0]}; the vocabulary has {self.vocab_size}")
        return SamplingParams(
            temperature=asked.temperature,
            top_k=max(asked.top_k, 0),
            top_p=asked.top_p,
            min_p=asked.min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=asked.logit_bias,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        )

    def max_tokens(self, asked: int | None, num_prompt: int) -> int:
        if asked is not None:
            return asked
        return max(1, min(self.config.default_max_tokens, self.thread.engine.max_context - num_prompt))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
