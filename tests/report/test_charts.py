"""Drawings: well-formed, complete, escaped, and no spike is lost to thinning."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from moonlet.report.charts import HeatMap, Plot, Series, heat_map, hover_rows, line_chart, thin
from moonlet.report.scales import Axis

_points = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=0, max_size=900)


@given(values=_points)
def test_thinning_keeps_the_extremes_and_the_order(values: list[float | None]) -> None:
    kept = thin(range(len(values)), values)
    known = [value for value in values if value is not None]
    if known:
        shown = [y for _, y in kept if y is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert len(kept) <= 402


@given(values=_points, width=st.sampled_from([350, 540, 1120]), scale=st.sampled_from(["linear", "log"]))
def test_any_line_chart_is_well_formed(values: list[float | None], width: int, scale: str) -> None:
    series = [Series("a <b>", range(len(values)), values, "s1", "line points")]
    plot = Plot("alt & text", Axis("x"), Axis("y", scale), series, [(0, 10, "one"), (10, 20, "two")], [(1.0, "level")])
    root = ElementTree.fromstring(line_chart(plot, width, 260).replace(" hidden>", ">"))
    assert root.attrib["aria-label"] == "alt & text"
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")
    hover_rows(plot)


def test_gaps_break_the_line() -> None:
    plot = Plot("", Axis("x"), Axis("y"), [Series("a", [0, 1, 2, 3], [1, None, 2, 3])])
    path = re.search(r'class="line" d="([^"]+)"', line_chart(plot, 540, 260))
    assert path is not None and path[1].count("M") == 2


def test_hover_lists_every_series_at_its_points() -> None:
    series = [Series("a", [0, 10], [1, 2], "s1"), Series("b", [10], [5], "s2", "points")]
    rows = hover_rows(Plot("", Axis("steps", lower=0, upper=10), Axis("y"), series))
    assert rows == [(0.0, "0 steps", [("s1", "a", "1")]), (1.0, "10 steps", [("s1", "a", "2"), ("s2", "b", "5")])]


def test_heat_map_draws_the_cells_that_exist() -> None:
    chart = HeatMap("map", ["top", "bottom"], ["x", "y"], [[0.2, None], [0.9, 1.0]], lambda value: ("heat", value))
    root = ElementTree.fromstring(heat_map(chart, 350))
    tips = [cell.attrib["data-tip"] for cell in root.iter("rect")]
    assert tips == ["top, x: 0.20", "bottom, x: 0.90", "bottom, y: 1.00"]
