"""The figures of the report: results (`collect.py`) in, described and drawn charts (`charts.py`) out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moonlet.report.charts import HeatMap, Plot, Series, heat_map, hover_rows, line_chart
from moonlet.report.scales import Axis

HALF_WIDTH, FULL_WIDTH, PHONE_WIDTH = 540, 1120, 350
_MAX_COLUMNS = 64  # of an expert heat map; more experts are averaged in neighbouring groups
_DEPTH_SNAPSHOTS = 3  # steps at which the gradient by depth is shown

Table = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One card of the report: a drawing for wide screens and one for phones, or several views to switch between."""

    title: str
    caption: str
    views: list[tuple[str, str, str]]  # (name of the view, wide SVG, narrow SVG)
    legend: list[tuple[str, str]] = field(default_factory=list)  # (color, name)
    hover: list[Any] = field(default_factory=list)
    is_full_width: bool = False


def build_figures(results: Table) -> list[Figure]:
    """Every figure that the results have data for, in reading order."""
    builders: list[Callable[[Table], Figure | None]] = [
        _loss,
        _recall,
        _learning_rate,
        _throughput,
        _gradient_norm,
        _gradient_by_depth,
        _max_violation,
        _expert_load,
        _depth_attention,
        _qk_logits,
    ]
    return [figure for build in builders if (figure := build(results)) is not None]


def short_number(value: float) -> str:
    """`1.2M`, `340k`, `25`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _tokens_axis(results: Table) -> Axis:
    return Axis("tokens", format=short_number, lower=0, upper=max(results["run"]["tokens"], 1))


def _line_figure(title: str, caption: str, plot: Plot, is_full_width: bool = False, height: int = 260) -> Figure:
    width = FULL_WIDTH if is_full_width else HALF_WIDTH
    named = [(series.color, series.name) for series in plot.series if series.style != "faint"]
    view = ("", line_chart(plot, width, height), line_chart(plot, PHONE_WIDTH, 250))
    return Figure(title, caption, [view], named if len(named) > 1 else [], hover_rows(plot), is_full_width)


def _bands(results: Table) -> list[tuple[float, float, str]]:
    """Spans of tokens of the stages that were reached."""
    spans = []
    for stage in results["stages"]:
        if stage["last_tokens"] is not None and stage["last_tokens"] > stage["first_tokens"]:
            spans.append((stage["first_tokens"], stage["last_tokens"], _stage_label(stage)))
    return spans


def _stage_label(stage: Table) -> str:
    """`short · 256`; a stage that is named by its window, such as `4k`, needs no more than its name."""
    window = stage.get("seq_len")
    return stage["name"] if not window or stage["name"][0].isdigit() else f"{stage['name']} · {window:,}"


def _pick_scale(values: list[float], ratio: float = 4.0) -> Any:
    """Logarithmic where positive values span more than `ratio`."""
    usable = [value for value in values if value is not None]
    is_wide = usable and min(usable) > 0 and max(usable) / min(usable) > ratio
    return "log" if is_wide else "linear"


def _smooth(values: list[float | None], reach: int) -> list[float | None]:
    """Centred moving average over up to `reach` values on either side, fewer near the ends; gaps stay gaps."""
    smoothed: list[float | None] = []
    for index, value in enumerate(values):
        half = min(reach, index, len(values) - 1 - index)
        window = [item for item in values[index - half : index + half + 1] if item is not None]
        smoothed.append(None if value is None else sum(window) / len(window))
    return smoothed


def _has(columns: Table, *names: str) -> bool:
    return all(any(value is not None for value in columns.get(name, [])) for name in names)


def _loss(results: Table) -> Figure | None:
    train, heldout = results["train"], results["heldout"]
    if not _has(train, "tokens", "loss"):
        return None
    reach = len(train["loss"]) // 40
    series = [
        Series("train, each log line", train["tokens"], train["loss"], "s1", "faint"),
        Series("train, smoothed", train["tokens"], _smooth(train["loss"], reach), "s1"),
    ]
    if _has(heldout, "tokens", "loss"):
        series.append(Series("held-out", heldout["tokens"], heldout["loss"], "s2", "line points"))
    values = [value for line in series for value in line.y if value is not None]
    y_axis = Axis("nats per token", _pick_scale(values, 2.5), lambda value: f"{value:.3g}")
    last = next(value for value in reversed(train["loss"]) if value is not None)
    alt = f"Training and held-out loss by tokens; training ends at {last:.3f} nats per token."
    caption = "Loss of the batches and of the held-out files. Shaded spans are the stages and their context windows."
    plot = Plot(alt, _tokens_axis(results), y_axis, series, _bands(results))
    return _line_figure("Loss by tokens", caption, plot, is_full_width=True, height=340)


def _recall(results: Table) -> Figure | None:
    recall = results["recall"]
    if not recall or not recall.get("distances"):
        return None
    accuracy, chance = recall["accuracy"], recall.get("chance", 0)
    series = Series("recall", recall["distances"], accuracy, "s3", "line points", recall.get("low"), recall.get("high"))
    x_axis = Axis("tokens between fact and question", "category", short_number)
    y_axis = Axis("share answered", "linear", lambda value: f"{value:.0%}", lower=0, upper=1)
    pairs = ", ".join(f"{share:.0%} at {distance:,}" for distance, share in zip(recall["distances"], accuracy))
    plot = Plot(f"Recall of a planted fact: {pairs} tokens; chance is {chance:.0%}.", x_axis, y_axis, [series])
    plot.levels.append((chance, f"chance {chance:.0%}"))
    probes = f" {recall['probes']:,} questions at each distance;" if recall.get("probes") else ""
    caption = f"A fact is planted in text and asked for later.{probes} whiskers are 95 % intervals."
    return _line_figure("Recall by distance", caption, plot)


def _learning_rate(results: Table) -> Figure | None:
    train = results["train"]
    if not _has(train, "tokens", "lr"):
        return None
    series = [Series("AdamW", train["tokens"], train["lr"], "s1")]
    if _has(train, "muon_lr"):
        series.insert(0, Series("Muon", train["tokens"], train["muon_lr"], "s2"))
    y_axis = Axis("learning rate", "linear", lambda value: f"{value:.2g}", lower=0)
    plot = Plot("Learning rate by tokens.", _tokens_axis(results), y_axis, series, _bands(results))
    return _line_figure("Learning rate", "Warm-up, then decay, over all stages together.", plot)


def _throughput(results: Table) -> Figure | None:
    train = results["train"]
    if not _has(train, "tokens", "tokens_per_s"):
        return None
    rate = results["headline"]["tokens_per_s"]
    y_axis = Axis("tokens per second", "linear", short_number, lower=0)
    series = [Series("tokens/s", train["tokens"], train["tokens_per_s"], "s3")]
    plot = Plot(f"Tokens per second, median {rate:,.0f}.", _tokens_axis(results), y_axis, series, _bands(results))
    return _line_figure("Speed", f"Training tokens per second on this machine; the median is {rate:,.0f}.", plot)


def _gradient_norm(results: Table) -> Figure | None:
    train = results["train"]
    if not _has(train, "tokens", "grad_norm"):
        return None
    y_axis = Axis("gradient norm", _pick_scale(train["grad_norm"]), short_number)
    series = [Series("norm", train["tokens"], train["grad_norm"], "s4")]
    plot = Plot("Norm of the whole gradient by tokens.", _tokens_axis(results), y_axis, series, _bands(results))
    return _line_figure("Gradient norm", "Norm of the whole gradient before clipping.", plot)


def _gradient_by_depth(results: Table) -> Figure | None:
    steps, norms = results["gradient_by_depth"]["step"], results["gradient_by_depth"]["norms"]
    if not steps:
        return None
    count = min(_DEPTH_SNAPSHOTS, len(steps))
    picks = sorted({round(index * (len(steps) - 1) / max(1, count - 1)) for index in range(count)})
    series = [
        Series(
            f"step {steps[pick]:,}",
            list(range(1, len(norms[pick]) + 1)),
            norms[pick],
            _ramp(index, count),
            "line points",
        )
        for index, pick in enumerate(picks)
    ]
    values = [value for line in series for value in line.y if value is not None]
    axis = Axis("gradient norm", _pick_scale(values), short_number)
    x_axis = Axis("layer", "category", lambda value: f"{value:.0f}")
    plot = Plot("Gradient norm of each layer, early, midway and late in the run.", x_axis, axis, series)
    return _line_figure(
        "Gradient norm by depth", "How much of the gradient each layer gets; a flat line is even.", plot
    )


def _max_violation(results: Table) -> Figure | None:
    experts = results["experts"]
    if not experts["max_violation"] or None in experts["tokens"]:
        return None
    names = list(experts["max_violation"])
    series = [
        Series(_site_name(name), experts["tokens"], experts["max_violation"][name], _ramp(index, len(names)))
        for index, name in enumerate(names)
    ]
    values = [value for line in series for value in line.y if value is not None]
    worst = max((line.y[-1] or 0.0 for line in series), default=0.0)
    y_axis = Axis(
        "max violation", _pick_scale(values, 20), short_number, lower=None if min(values, default=0) > 0 else 0
    )
    alt = f"Largest overload of an expert in each router by tokens; the worst router ends at {worst:.2f}."
    plot = Plot(alt, _tokens_axis(results), y_axis, series, _bands(results))
    caption = "Tokens of the busiest expert over the even share, minus one, for each router. 0 is perfect balance."
    return _line_figure("Expert balance", caption, plot)


def _expert_load(results: Table) -> Figure | None:
    loads = results["experts"]["load"]
    if not loads:
        return None
    picks = [loads[0], loads[len(loads) // 2], loads[-1]] if len(loads) > 2 else loads
    views, is_grouped = [], False
    for load in picks:
        shares = {
            name: [count * len(counts) / max(1, sum(counts)) for count in counts]
            for name, counts in load["routers"].items()
        }
        rows = {name: _grouped(values) for name, values in shares.items()}
        is_grouped |= any(len(rows[name]) < len(shares[name]) for name in rows)
        chart = HeatMap(
            alt=f"Load of each expert by layer at step {load['step']}, 1 is the even share.",
            rows=[_site_name(name) for name in rows],
            columns=[str(index + 1) for index in range(max(len(values) for values in rows.values()))],
            values=list(rows.values()),
            shade=lambda value: ("hot" if value > 1 else "cold", min(1.0, abs(math.log2(max(value, 1e-3))) / 2)),
            format=lambda value: f"{value:.2f}",
            column_label="groups of experts" if is_grouped else "expert",
        )
        views.append((f"step {load['step']:,}", heat_map(chart, FULL_WIDTH), heat_map(chart, PHONE_WIDTH)))
    caption = "Tokens that each expert got, over the even share: 1 is even, orange is more, blue is less."
    return Figure("Expert load by layer", caption, views, is_full_width=True)


def _depth_attention(results: Table) -> Figure | None:
    views = []
    for depth in results["depth"]:
        width = max((len(row) for row in depth["weights"]), default=0)
        if not width:
            continue
        chart = HeatMap(
            alt="Depth attention: how much each layer's attention and MLP read from the embedding and from each block.",
            rows=[_site_name(name) for name in depth["sites"]],
            columns=depth.get("sources") or ["embed", *(f"block {index}" for index in range(1, width))],
            values=[row + [None] * (width - len(row)) for row in depth["weights"]],
            shade=lambda value: ("heat", max(0.04, value)),
            column_label="source",
        )
        name = str(depth.get("stage") or f"step {depth['step']:,}")
        views.append((name, heat_map(chart, HALF_WIDTH), heat_map(chart, PHONE_WIDTH)))
    caption = (
        "Share of each source in what a site reads (rows add up to 1); empty cells do not exist yet at that depth."
    )
    return Figure("Depth attention", caption, views) if views else None


def _qk_logits(results: Table) -> Figure | None:
    train = results["train"]
    if not _has(train, "tokens", "qk_max_logit"):
        return None
    y_axis = Axis("largest logit", "linear", short_number)
    series = [Series("logit", train["tokens"], train["qk_max_logit"], "s5")]
    plot = Plot("Largest attention logit by tokens.", _tokens_axis(results), y_axis, series, _bands(results))
    return _line_figure(
        "Attention logits", "Largest logit before the softmax in the MLA layers; QK-Clip keeps it bounded.", plot
    )


def _ramp(index: int, count: int) -> str:
    """A colour between shallow and deep."""
    return f"color-mix(in oklab, var(--deep) {100 * index / max(1, count - 1):.0f}%, var(--shallow))"


def _site_name(name: str) -> str:
    """`layer3.pre_ffn` or `model.layers.3.mlp` as `layer 4 mlp`: counted from 1, without the words that all share."""
    match = re.search(r"layers?[._ ]?(\d+)[._ ]?(.*)", name)
    if match is None:
        return name.removeprefix("model.")
    kind = "attn" if "attn" in match[2] else "mlp" if re.search("mlp|ffn", match[2]) else ""
    return f"layer {int(match[1]) + 1} {kind}".rstrip()


def _grouped(values: list[float]) -> list[float]:
    """At most `_MAX_COLUMNS` values: means of neighbours."""
    size = math.ceil(len(values) / _MAX_COLUMNS)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(group) / len(group) for group in groups]
