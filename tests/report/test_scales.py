"""Axes: ticks are round and inside, pixels keep the order of the data."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moonlet.report.scales import Axis, Scale

_values = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20)


@given(values=_values, scale=st.sampled_from(["linear", "log"]), count=st.integers(2, 10))
def test_ticks_lie_inside_and_are_few(values: list[float], scale: str, count: int) -> None:
    axis = Scale(Axis("x", scale), values, 0, 100)
    ticks = axis.ticks(count)
    assert all(-0.5 <= axis(tick) <= 100.5 for tick in ticks)
    assert len(ticks) <= 2 * count + 1
    assert ticks == sorted(set(ticks))


@given(values=_values, scale=st.sampled_from(["linear", "log", "category"]))
def test_pixels_keep_the_order(values: list[float], scale: str) -> None:
    axis = Scale(Axis("x", scale), values, 10, 110)
    pixels = [axis(value) for value in sorted(values)]
    assert pixels == sorted(pixels)
    assert all(10 <= pixel <= 110 and math.isfinite(pixel) for pixel in pixels)


def test_fixed_ends_are_kept() -> None:
    axis = Scale(Axis("x", lower=0, upper=1), [0.3, 0.9], 0, 100)
    assert (axis(0), axis(1)) == (0, 100)
    assert axis.ticks(5) == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_a_constant_has_an_axis() -> None:
    for value in (0.0, 3.0, -2.0):
        assert math.isfinite(Scale(Axis("x"), [value], 0, 100)(value))
    assert math.isfinite(Scale(Axis("x", "log"), [], 0, 100)(1.0))
