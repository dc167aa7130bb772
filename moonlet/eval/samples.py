"""Text from a model: one token after another, with a state that does not grow in the KDA layers.

Every random choice depends on (seed, position in the text) alone, so a continuation is the same however it was cut into
calls. Control tokens are never sampled, except [EOS], which ends a text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.errors import NonFiniteError
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState
from moonlet.serve.sampler import uniform
from moonlet.text.tokenizer import SPECIAL_TOKENS, Tokenizer

PREFILL_TOKENS = 512  # a prompt is read in pieces of this size: memory does not grow with its length
END = "[EOS]"

_RESERVED = re.compile(rb"<\|reserved_token_\d+\|>")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the most probable one; `seed` names the stream of random numbers."""

    temperature: float
    seed: int


class Continuation:
    """A text in progress: the decode state, and the tokens that the model has yet to read.

    Attributes:
        state: what the tokens read so far left behind; updated in place.
        banned_ids: never sampled.
    """

    def __init__(self, model: K3, banned_ids: Collection[int] = ()) -> None:
        self.model = model.eval()
        self.state: DecodeState = model.new_state(1)
        self.banned_ids = sorted(banned_ids)
        self._unread: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far, read or not."""
        return self.state.length + len(self._unread)

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens; they are read when the next token is asked for."""
        self._unread.extend(ids)

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Read what is unread and return the logits [V] of the token that follows, banned ones at -inf.

        Raises:
            ValueError: there is nothing to read; the state alone holds no logits.
            NonFiniteError: the weights give NaN or infinite logits.
        """
        if not self._unread:
            raise ValueError("a continuation needs a token to continue from: add one first")
        unread = torch.tensor([self._unread], device=self.model.output_weight.device)
        for piece_BT in unread.split(PREFILL_TOKENS, dim=1):
            hidden_BTD = self.model.hidden(piece_BT, state=self.state)
        self._unread = []
        logits_V = (self.model.output_weight @ hidden_BTD[0, -1]).float()
        if not bool(logits_V.isfinite().all()):
            raise NonFiniteError("the model's logits are not finite: this checkpoint cannot be sampled from")
        logits_V[self.banned_ids] = -torch.inf
        return logits_V

    def next_token(self, sampling: Sampling) -> int:
        """Draw the next token and append it to the text."""
        position = self.num_tokens
        token = choose_token(self.next_logits(), sampling, position)
        self._unread = [token]
        return token


def generate(
    model: K3,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yields at most `max_tokens` ids that continue the prompt; ends before a token of `stop_ids` or [EOS]."""
    text = Continuation(model, sampled_never(tokenizer))
    text.add(prompt_ids)
    stops = {*stop_ids, tokenizer.special_id(END)}
    for _ in range(max_tokens):
        token = text.next_token(sampling)
        if token in stops:
            return
        yield token


def sampled_never(tokenizer: Tokenizer) -> set[int]:
    """Control tokens but for [EOS]."""
    return control_ids(tokenizer) - {tokenizer.special_id(END)}


def control_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids that stand for no text: the special tokens and the reserved ones."""
    special = {tokenizer.special_id(name) for name in SPECIAL_TOKENS}
    return special | {token for token in range(tokenizer.vocab_size) if _is_reserved(tokenizer, token)}


def _is_reserved(tokenizer: Tokenizer, token: int) -> bool:
    spelling = tokenizer.decode_bytes([token])
    return not spelling or _RESERVED.fullmatch(spelling) is not None


def choose_token(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """Draw from softmax(logits / temperature) with the random number of (seed, position), in float64."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature  # at most 0, however small the temperature
    edges_V = torch.softmax(scaled_V, dim=-1).cumsum(0)
    # Scaled by the last edge, which rounding leaves beside 1: the point lies below it, in a token of some probability.
    point = uniform(sampling.seed, position) * edges_V[-1]
    return int(torch.searchsorted(edges_V, point, right=True))


@dataclass(frozen=True)
class Sample:
    """`parses`: whether prompt and text are valid Python; None where the model did not learn from Python."""

    prompt: str
    text: str
    parses: bool | None


def draw_sample(
    model: K3, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, sampling: Sampling, is_python: bool
) -> Sample:
    """Continue `prompt` by at most `max_tokens` tokens; an empty prompt stands for an empty first line."""
    prompt_ids = tokenizer.encode(prompt or "\n")
    ids = list(generate(model, tokenizer, prompt_ids, sampling, max_tokens=max_tokens))
    text = tokenizer.decode(ids)
    whole = prompt + text
    if len(ids) == max_tokens:
        # The length limit cut the last line in two; that says nothing about the model.
        whole = whole[: whole.rfind("\n") + 1]
    return Sample(prompt, text, parses_as_python(whole) if is_python else None)


def parses_as_python(source: str) -> bool:
    """Whether `ast.parse` accepts a source that holds something."""
    if not source.strip():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
