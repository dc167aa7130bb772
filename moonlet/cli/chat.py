"""`moonlet chat RUN`: write on together with a trained model, in the terminal or through a pipe.

Each line is added to the text, and the model continues it. The model keeps the whole text as its state, which does not
grow in the KDA layers and grows by one row a token in the MLA layers.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from moonlet.errors import nearest_name

if TYPE_CHECKING:
    from moonlet.eval.samples import Sampling
    from moonlet.model.k3 import K3
    from moonlet.text.tokenizer import Tokenizer

HELP = """A line is added to the text and continued. A backslash at its end joins the next line; an empty line goes on.
  /stats       size of the state, tokens a second
  /temp 0.5    temperature from now on; 0 takes the most probable token
  /reset       start an empty text
  /quit        leave (as does the end of the input)
Ctrl-C stops an answer."""

COMMANDS = ("/help", "/quit", "/reset", "/stats", "/temp")


def chat(
    run: Annotated[Path, typer.Argument(help="Run directory, or one of its checkpoints.")] = Path("runs/latest"),
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 0.8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation, in tokens.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue what you type, with the newest checkpoint of a run. Reads lines from a pipe as well."""
    from moonlet.eval.samples import Sampling
    from moonlet.train.restore import load_model_for_inference

    model, config, tokenizer = load_model_for_inference(run)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    conversation = Conversation(model, tokenizer, Sampling(temperature, seed), max_tokens, sys.stdout)
    if is_terminal:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        conversation.note(f"{config.name}, {millions:.2f}M parameters. /help lists the commands.")
    try:
        for entry in join_lines(_terminal_lines() if is_terminal else sys.stdin):
            if not conversation.take(entry, stops_on_interrupt=is_terminal):
                break
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Conversation:
    """A text that a person and a model write in turns. Answers go to `out`, everything else to stderr."""

    def __init__(self, model: K3, tokenizer: Tokenizer, sampling: Sampling, max_tokens: int, out: TextIO) -> None:
        from moonlet.eval.samples import END, sampled_never
        from moonlet.text.utf8 import Utf8Stream

        self.model, self.tokenizer, self.sampling, self.max_tokens = model, tokenizer, sampling, max_tokens
        self.out = out
        self.context = model.config.max_position_embeddings
        self._never, self._end = sampled_never(tokenizer), tokenizer.special_id(END)
        self._decoder = Utf8Stream(tokenizer)
        self._rate: float | None = None
        self.reset()

    def reset(self) -> None:
        from moonlet.eval.samples import Continuation

        self.text = Continuation(self.model, self._never)
        self._ends_line = True

    def take(self, entry: str, stops_on_interrupt: bool = False) -> bool:
        """Obey a command or continue a text. False: the conversation is over."""
        command, _, argument = entry.strip().partition(" ")
        match command:
            case "/quit":
                return False
            case "/help":
                self.note(HELP)
            case "/reset":
                self.reset()
                self.note("the text is empty again")
            case "/temp":
                self._set_temperature(argument)
            case "/stats":
                self.note(self.stats())
            case _ if re.fullmatch(r"/\w+", entry.rstrip()):
                hint = nearest_name(command, COMMANDS)
                self.note(f"there is no command '{command}'{hint}; to write it as text, put a space before it")
            case _:
                self._answer(entry, stops_on_interrupt)
        return True

    def stats(self) -> str:
        from moonlet.model.state import KDAState

        layers = self.text.state.layers
        kda = [layer.num_bytes for layer in layers if isinstance(layer, KDAState)]
        mla = [layer.num_bytes for layer in layers if not isinstance(layer, KDAState)]
        length = self.text.state.length
        growth = f", {sum(mla) / length:,.0f} bytes a token" if length and mla else ""
        return (
            f"text: {self.text.num_tokens:,} of {self.context:,} tokens\n"
            f"state: {sum(kda):,} bytes in {len(kda)} KDA layers at any length, "
            f"{sum(mla):,} bytes in {len(mla)} MLA layers{growth}\n"
            f"speed: {'-' if self._rate is None else f'{self._rate:,.1f}'} tokens/s, temperature {self.sampling.temperature:g}"
        )

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _set_temperature(self, argument: str) -> None:
        try:
            value = float(argument)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.note(f"'{argument}' is no temperature: give a number from 0 on, such as /temp 0.5")
            return
        self.sampling = replace(self.sampling, temperature=value)
        self.note(f"temperature {value:g}")

    def _answer(self, entry: str, stops_on_interrupt: bool) -> None:
        ids = self.tokenizer.encode(self._as_next_line(entry))
        room = self.context - self.text.num_tokens - len(ids)
        if room < 1:
            self.note(
                f"this needs {len(ids):,} tokens, the text has {self.text.num_tokens:,}, and the model's context is "
                f"{self.context:,} tokens: shorten it, or /reset"
            )
            return
        self.text.add(ids)
        limit = min(room, self.max_tokens)
        with _deferred_interrupt() if stops_on_interrupt else contextlib.nullcontext([]) as interrupts:
            is_end = self._write(limit, interrupts)
        if is_end:
            self.reset()
            self.note("(end of the document: the next line starts a new one)")
        elif limit == room and not interrupts:
            self.note(f"(the model's context of {self.context:,} tokens is full: /reset)")

    def _as_next_line(self, entry: str) -> str:
        """What `entry` adds to the text: a line of its own. An empty one adds nothing, or starts an empty text."""
        if not entry:
            return "" if self.text.num_tokens else "\n"
        return entry if self._ends_line else "\n" + entry

    def _write(self, limit: int, interrupts: list[int]) -> bool:
        """Print the continuation as it comes, until `limit` tokens, an interrupt or the document's end (True)."""
        token, written, start = -1, "", 0.0
        self._decoder.flush()
        for count in range(limit):
            if interrupts:
                break
            token = self.text.next_token(self.sampling)
            # The first token's time is the prompt's.
            start = start or time.monotonic()
            if count:
                self._rate = count / max(1e-9, time.monotonic() - start)
            if token == self._end:
                break
            written = self._print(self._decoder.push(token)) or written
        written = self._print(self._decoder.flush()) or written
        self._ends_line = written.endswith("\n")
        if not self._ends_line:
            self._print("\n")
        return token == self._end

    def _print(self, text: str) -> str:
        print(text, end="", file=self.out, flush=True)
        return text


def join_lines(lines: Iterable[str]) -> Iterator[str]:
    """Entries: a line that ends with a backslash is joined with the one after it."""
    pending: list[str] = []
    for line in lines:
        pending.append(line.rstrip("\r\n"))
        if pending[-1].endswith("\\"):
            pending[-1] = pending[-1][:-1]
            continue
        yield "\n".join(pending)
        pending = []
    if pending:
        yield "\n".join(pending)


def _terminal_lines() -> Iterator[str]:
    """Lines typed at a prompt, with the editing keys of readline where Python has it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Collects interrupts instead of raising them: a forward pass cut in two would leave layers at different tokens."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
