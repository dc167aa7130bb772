"""Charts as inline SVG, drawn by hand: text, colours and light or dark come from the page's style sheet.

A chart is described once and drawn at any size, so that a page can carry one drawing for a laptop and one for a phone.
Lengths are in CSS pixels. Classes s1, s2, ... are the series colours; `ramp` colours run from shallow to deep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from moonlet.report.scales import Axis, Scale

Number = float | int
_CHARACTER_WIDTH = 6.4  # of a 12 px label
_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line: points with y None are gaps. `low`/`high` add intervals. `color` is a class (s1..) or a CSS colour."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number | None]
    color: str = "s1"
    style: Literal["line", "faint", "points", "line points"] = "line"
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None


@dataclass(frozen=True)
class Plot:
    """A line chart. `bands` are named spans of x (the first word of a name where little fits), `levels` lines across."""

    alt: str
    x_axis: Axis
    y_axis: Axis
    series: list[Series]
    bands: list[tuple[float, float, str]] = field(default_factory=list)
    levels: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class HeatMap:
    """A matrix of cells. `shade` gives a class (heat, hot, cold) and an opacity for a value; None cells stay empty."""

    alt: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    shade: Callable[[float], tuple[str, float]]
    format: Callable[[float], str] = lambda value: f"{value:.2f}"
    column_label: str = ""
    show_values: bool = True


def thin(x: Sequence[Number], y: Sequence[Number | None], limit: int = _MAX_POINTS) -> list[tuple[float, float | None]]:
    """At most about `limit` points: the lowest and the highest of each bucket, so that no spike is lost."""
    points = [(float(a), None if b is None else float(b)) for a, b in zip(x, y)]
    if len(points) <= limit:
        return points
    size = math.ceil(2 * len(points) / limit)
    kept = []
    for start in range(0, len(points), size):
        bucket = [point for point in points[start : start + size] if point[1] is not None]
        if bucket:
            kept += sorted({min(bucket, key=lambda p: p[1] or 0), max(bucket, key=lambda p: p[1] or 0)})
    return kept


def line_chart(plot: Plot, width: int, height: int) -> str:
    """The SVG element of a line chart."""
    xs = [float(value) for series in plot.series for value in series.x]
    xs += [edge for start, end, _ in plot.bands for edge in (start, end)]
    top, bottom = 38 if plot.bands else 22, height - 40
    y_scale = Scale(plot.y_axis, _y_values(plot), bottom, top)
    y_ticks = y_scale.ticks(max(3, height // 60))
    left = 16 + _CHARACTER_WIDTH * max((len(plot.y_axis.format(tick)) for tick in y_ticks), default=1)
    x_scale = Scale(plot.x_axis, xs, left, width - 14)
    parts = [_band(x_scale, y_scale, band, index) for index, band in enumerate(plot.bands)]
    parts += [_y_tick(x_scale, y_scale, tick) for tick in y_ticks]
    parts += _x_ticks(x_scale, height, width)
    parts += [_level(x_scale, y_scale, level) for level in plot.levels]
    parts += [_series(x_scale, y_scale, series) for series in plot.series]
    parts.append(_text(left, 12, plot.y_axis.label, "axis"))
    parts.append(_text(width - 14, height - 4, plot.x_axis.label, "axis end"))
    parts.append(f'<line class="cursor" y1="{top}" y2="{bottom}" hidden></line>')
    area = f'data-left="{left:.1f}" data-right="{width - 14}"'
    return _svg(plot.alt, width, height, parts, f'class="plot" {area}')


def hover_rows(plot: Plot) -> list[tuple[float, str, list[tuple[str, str, str]]]]:
    """For each x drawn: its place along the axis (0 to 1), its label, and (color, name, value) of each series there."""
    xs = [float(value) for series in plot.series for value in series.x]
    scale = Scale(plot.x_axis, xs + [edge for a, b, _ in plot.bands for edge in (a, b)], 0, 1)
    rows: dict[float, list[tuple[str, str, str]]] = {}
    for series in plot.series:
        if series.style != "faint":
            for x, y in thin(series.x, series.y, 200):
                if y is not None:
                    rows.setdefault(x, []).append((series.color, series.name, plot.y_axis.format(y)))
    label = plot.x_axis.label
    return [(round(scale(x), 4), f"{plot.x_axis.format(x)} {label}", rows[x]) for x in sorted(rows)]


def heat_map(chart: HeatMap, width: int) -> str:
    """The SVG element of a heat map; its height follows from its rows."""
    left = 10 + _CHARACTER_WIDTH * max(len(name) for name in chart.rows)
    cell_width = (width - left - 2) / len(chart.columns)
    cell_height = max(4.0, min(26.0, 640 / len(chart.rows)))
    bottom = 24 + cell_height * len(chart.rows)
    parts = []
    for row, (name, values) in enumerate(zip(chart.rows, chart.values)):
        y = 20 + row * cell_height
        if cell_height >= 11 or row % math.ceil(12 / cell_height) == 0:
            parts.append(_text(left - 6, y + cell_height / 2 + 4, name, "end"))
        for column, value in enumerate(values):
            if value is not None:
                box = (left + column * cell_width, y, cell_width, cell_height)
                parts.append(_cell(chart, box, name, chart.columns[column], value))
    step = math.ceil((max(len(name) for name in chart.columns) + 1) * _CHARACTER_WIDTH / cell_width)
    for column in range(0, len(chart.columns), step):
        parts.append(_text(left + (column + 0.5) * cell_width, 13, chart.columns[column], "middle"))
    if chart.column_label:
        parts.append(_text(width - 2, bottom + 12, chart.column_label, "axis end"))
    return _svg(chart.alt, width, round(bottom + (18 if chart.column_label else 2)), parts, 'class="heat-map"')


def _cell(chart: HeatMap, box: tuple[float, float, float, float], row: str, column: str, value: float) -> str:
    x, y, width, height = box  # pixels
    color, opacity = chart.shade(value)
    gap = 1 if width > 4 else 0
    tip = escape(f"{row}, {column}: {chart.format(value)}", quote=True)
    size = f'width="{max(0.5, width - gap):.1f}" height="{height - gap:.1f}" rx="{2 * gap}"'
    opacity = max(0.0, min(1.0, opacity))
    cell = f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" {size} fill-opacity="{opacity:.2f}" data-tip="{tip}"></rect>'
    label = chart.format(value)
    if chart.show_values and width > _CHARACTER_WIDTH * len(label) + 3 and height >= 14:
        contrast = "on" if opacity > 0.72 else "off"
        cell += _text(x + (width - gap) / 2, y + height / 2 + 3.5, label, f"middle value {contrast}")
    return cell


def _svg(alt: str, width: int, height: int, parts: list[str], attributes: str) -> str:
    label = escape(alt, quote=True)
    return f'<svg {attributes} viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(text)}</text>' if text else ""


def _y_values(plot: Plot) -> list[float]:
    values = [float(y) for series in plot.series for y in series.y if y is not None]
    values += [float(v) for series in plot.series for bound in (series.low, series.high) if bound for v in bound]
    return values + [level for level, _ in plot.levels]


def _band(x_scale: Scale, y_scale: Scale, band: tuple[float, float, str], index: int) -> str:
    start, end, top, bottom = x_scale(band[0]), x_scale(band[1]), y_scale.end, y_scale.start
    place = f'x="{start:.1f}" y="{top}" width="{end - start:.1f}" height="{bottom - top}"'
    parts = f'<rect class="band{index % 2}" {place}></rect>'
    if index:
        parts += f'<line class="border" x1="{start:.1f}" x2="{start:.1f}" y1="{top - 14}" y2="{bottom}"></line>'
    fitting = [name for name in (band[2], band[2].split(" ")[0]) if len(name) * _CHARACTER_WIDTH < end - start]
    if fitting:
        parts += _text((start + end) / 2, top - 6, fitting[0], "middle band")
    return parts


def _y_tick(x_scale: Scale, y_scale: Scale, tick: float) -> str:
    y = y_scale(tick)
    line = f'<line class="grid" x1="{x_scale.start:.1f}" x2="{x_scale.end:.1f}" y1="{y:.1f}" y2="{y:.1f}"></line>'
    return line + _text(x_scale.start - 6, y + 4, y_scale.axis.format(tick), "end")


def _x_ticks(x_scale: Scale, height: int, width: int) -> list[str]:
    ticks = x_scale.ticks(max(3, width // 110))
    labels = [x_scale.axis.format(tick) for tick in ticks]
    widest = max((len(label) for label in labels), default=1) * _CHARACTER_WIDTH + 8
    room = (x_scale.end - x_scale.start) / max(1, len(ticks))
    step = max(1, math.ceil(widest / max(room, 1)))
    return [_text(x_scale(tick), height - 24, label, "middle") for tick, label in list(zip(ticks, labels))[::step]]


def _level(x_scale: Scale, y_scale: Scale, level: tuple[float, str]) -> str:
    y = y_scale(level[0])
    line = f'<line class="level" x1="{x_scale.start:.1f}" x2="{x_scale.end:.1f}" y1="{y:.1f}" y2="{y:.1f}"></line>'
    return line + _text(x_scale.end - 2, y - 5, level[1], "end")


def _series(x_scale: Scale, y_scale: Scale, series: Series) -> str:
    points = [(x_scale(x), None if y is None else y_scale(y)) for x, y in thin(series.x, series.y)]
    parts = []
    if series.low and series.high:
        for x, low, high in zip(series.x, series.low, series.high):
            parts.append(_whisker(x_scale(x), y_scale(low), y_scale(high)))
    if series.style != "points":
        parts.append(f'<path class="line" d="{_path(points)}"></path>')
    if "points" in series.style:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"></circle>' for x, y in points if y is not None]
    is_class = series.color.startswith("s")
    paint = f'class="series {series.color} {series.style}"' if is_class else f'class="series {series.style}"'
    style = "" if is_class else f' style="--c:{series.color}"'
    return f'<g {paint}{style} data-name="{escape(series.name, quote=True)}">{"".join(parts)}</g>'


def _whisker(x: float, low: float, high: float) -> str:
    ends = "".join(f"M{x - 4:.1f} {y:.1f}h8" for y in (low, high))
    return f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"></path>'


def _path(points: list[tuple[float, float | None]]) -> str:
    steps, pen_down = [], False
    for x, y in points:
        if y is None:
            pen_down = False
            continue
        steps.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
    return "".join(steps)
