"""Axes: data to pixels, and round numbers for the ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    label: str
    scale: Literal["linear", "log", "category"] = "linear"
    format: Callable[[float], str] = lambda value: f"{value:g}"
    lower: float | None = None  # fixed ends of the axis; None: from the data
    upper: float | None = None


class Scale:
    """Data to pixels along one axis, with its ticks."""

    def __init__(self, axis: Axis, values: list[float], start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        self.is_log = axis.scale == "log"
        if axis.scale == "category":
            self.categories = sorted(set(values))
            self.low, self.high = -0.5, max(0.5, len(self.categories) - 0.5)
        else:
            self.low, self.high = _limits(axis, values)

    def __call__(self, value: float) -> float:
        """Pixel of `value`."""
        return self.start + self.fraction(value) * (self.end - self.start)

    def fraction(self, value: float) -> float:
        if self.axis.scale == "category":
            value = self.categories.index(value)
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, 1e-30)), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def ticks(self, count: int) -> list[float]:
        if self.axis.scale == "category":
            return list(self.categories)
        return _log_ticks(self.low, self.high, count) if self.is_log else _linear_ticks(self.low, self.high, count)


def _limits(axis: Axis, values: list[float]) -> tuple[float, float]:
    usable = [value for value in values if value > 0] if axis.scale == "log" else values
    low = axis.lower if axis.lower is not None else min(usable, default=0.0 if axis.scale == "linear" else 0.1)
    high = axis.upper if axis.upper is not None else max(usable, default=1.0)
    if axis.scale == "log":
        low, high = max(low, 1e-12), max(high, low * 1.1)
        room = (high / low) ** 0.04
        return low / (1 if axis.lower is not None else room), high * (1 if axis.upper is not None else room)
    if high <= low:
        high = low + (abs(low) or 1.0)
    room = 0.05 * (high - low)
    return low - (0 if axis.lower is not None else room), high + (0 if axis.upper is not None else room)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / max(1, count)
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    """The coarsest set of round numbers that still has enough ticks."""
    found: list[float] = []
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 6, 8), (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) >= min(3, count):
            break
    return found[:: math.ceil(len(found) / count)] if len(found) > 2 * count else found
