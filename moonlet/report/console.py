"""What a run says on the terminal: one line a step, one line a phase, fields always in the same order.

    step 120/850 |  14.1% | stage short | loss 3.1234 | lr 3.00e-02 | gnorm 0.531 | tok/s 12,345 | eta 3:21
    tokenise 1,200/4,400 docs |  27.3% | 812 docs/s | eta 0:04

On a terminal a phase keeps rewriting its line; elsewhere (a file, CI) it prints one every few seconds and at its end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

_QUIET_SECONDS = 5.0  # between two lines of a phase where lines cannot be rewritten
_REWRITE_SECONDS = 0.2
_RATE_MEMORY = 0.7  # weight of the past in the smoothed rate

Clock = Callable[[], float]


def format_duration(seconds: float | None) -> str:
    """`3:21`, `1:02:03`, or `-` where nothing is known."""
    if seconds is None or not 0 <= seconds < float("inf"):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_rate(rate: float | None) -> str:
    """`812`, `12,345`, `0.42`, or `-`."""
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class ConsoleLog:
    """The sink for a person. `total_tokens` (of all stages) gives the ETA; without it the ETA goes by steps."""

    def __init__(
        self,
        total_steps: int,
        total_tokens: int | None = None,
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._total_tokens = total_tokens
        self._stream = stream or sys.stdout
        self._clock = clock
        self._rate: float | None = None  # tokens a second, smoothed
        self._first: tuple[int, float] | None = None  # step and time of the first line

    def metrics(self, step: int, /, **values: Any) -> None:
        kind = values.get("kind", "train")
        if kind == "train":
            self._print(self._train_line(step, values))
        elif kind == "heldout":
            fields = [f"heldout {step}/{self._total_steps}", f"stage {values.get('stage', '-')}"]
            fields += [
                _number("bits/byte", values.get("bits_per_byte"), ".4f"),
                _number("loss", values.get("loss"), ".4f"),
            ]
            self._print(" | ".join(fields))

    def event(self, event: str, /, **values: Any) -> None:
        details = " ".join(f"{name}={value}" for name, value in values.items())
        self._print(f"{event}: {details}" if details else event)

    def close(self) -> None:
        self._stream.flush()

    def _train_line(self, step: int, values: dict[str, Any]) -> str:
        rate = values.get("tokens_per_s")
        if rate:
            self._rate = rate if self._rate is None else _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * rate
        fields = [
            f"step {step}/{self._total_steps}",
            f"{100 * step / max(1, self._total_steps):5.1f}%",
            f"stage {values.get('stage', '-')}",
            _number("loss", values.get("loss"), ".4f"),
            _number("lr", values.get("lr"), ".2e"),
            _number("gnorm", values.get("grad_norm"), ".3f"),
            f"tok/s {format_rate(rate)}",
            f"eta {format_duration(self._remaining_seconds(step, values.get('tokens')))}",
        ]
        return " | ".join(fields)

    def _remaining_seconds(self, step: int, tokens: int | None) -> float | None:
        if self._total_tokens is not None and tokens is not None and self._rate:
            return max(0, self._total_tokens - tokens) / self._rate
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return None
        first_step, first_time = self._first
        if step <= first_step:
            return None
        return (self._total_steps - step) * (now - first_time) / (step - first_step)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Phase:
    """Progress of something that is not a training step: `with Phase("tokenise", total, "docs") as phase: phase(done)`.

    `total=None` means that the end is not known: count and rate only. Calling it is cheap; it prints now and then.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._stream = stream or sys.stdout
        self._clock = clock
        self._rewrites = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start = self._printed_at = clock()
        self._done = 0

    def __call__(self, done: int, total: int | None = None) -> None:
        """`done` units are finished so far; `total` may become known, or change, on the way."""
        self._done = done
        self._total = total if total is not None else self._total
        now = self._clock()
        if now - self._printed_at >= (_REWRITE_SECONDS if self._rewrites else _QUIET_SECONDS):
            self._printed_at = now
            self._write(self._line(now), end="" if self._rewrites else "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = self._clock()
        if kind is None:
            self._write(self._last_line(now), end="\n")
        elif self._rewrites:
            self._write(self._line(now), end="\n")

    def _line(self, now: float) -> str:
        rate = self._done / (now - self._start) if now > self._start else None
        unit = f" {self._unit}" if self._unit else ""
        speed = f"{format_rate(rate)}{unit}/s"
        if not self._total:
            return f"{self._name} {self._done:,}{unit} | {speed}"
        eta = (self._total - self._done) / rate if rate else None
        share = f"{100 * self._done / self._total:5.1f}%"
        return f"{self._name} {self._done:,}/{self._total:,}{unit} | {share} | {speed} | eta {format_duration(eta)}"

    def _last_line(self, now: float) -> str:
        count = f" {self._done:,}{' ' + self._unit if self._unit else ''}" if self._done else ""
        return f"{self._name}{count} | done in {now - self._start:.1f} s"

    def _write(self, line: str, end: str) -> None:
        text = f"\r\x1b[2K{line}{end}" if self._rewrites else f"{line}{end}"
        self._stream.write(text)
        self._stream.flush()


def _number(name: str, value: float | None, spec: str) -> str:
    return f"{name} {'-' if value is None else format(value, spec)}"
