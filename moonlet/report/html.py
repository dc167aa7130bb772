"""One self-contained HTML page from a run directory, and the same figures as `results.json` beside it.

Style, script and drawings are inside the page: it opens from disk, from a mail, and without a network. JavaScript adds
only tooltips, hiding of lines and switching of views.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from moonlet.errors import StorageError
from moonlet.report.collect import CONFIG_FILE, collect_results
from moonlet.report.console import format_duration
from moonlet.report.figures import build_figures, short_number

REPORT_FILE, RESULTS_FILE = "report.html", "results.json"

_TEMPLATES = resources.files("moonlet.report") / "templates"
_BLANK = "–"


def build_report(run_dir: str | Path) -> Path:
    """Write `report.html` and `results.json` into a run directory, finished or not; returns the page's path.

    Raises:
        DataError: `run_dir` is no run directory.
        StorageError: the files cannot be written.
    """
    folder = Path(run_dir)
    results = collect_results(folder)
    page = render_page(results, _config_text(folder))
    _write(folder / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return _write(folder / REPORT_FILE, page)


def render_page(results: dict[str, Any], config_text: str) -> str:
    """The page as text. Everything that comes from the run is escaped."""
    names = ("page.html", "style.css", "page.js")
    texts = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in names}
    environment = Environment(loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(
        results=results,
        tiles=_tiles(results),
        bars=_bars(results["headline"]),
        figures=build_figures(results),
        facts=_facts(results["run"]),
        config_text=config_text,
        style=Markup(texts["style.css"]),
        script=Markup(texts["page.js"]),
        svg=Markup,
        to_json=lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    )


def _config_text(folder: Path) -> str:
    path = folder / CONFIG_FILE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _tiles(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers at the top: (value, name, remark); those that the run has not reached are blank."""
    headline, run = results["headline"], results["run"]
    ours, xz = headline["bits_per_byte"], headline["compressors"].get("xz")
    remark = f"{100 * (1 - ours / xz):.0f} % below xz" if ours and xz and ours < xz else "on held-out files"
    steps = f"{run['step']:,} of {run['total_steps']:,} steps" if run["total_steps"] else f"{run['step']:,} steps"
    recall, distance = headline["recall"], "of a planted fact"
    if recall:
        distance = f"at {recall['distance']:,} tokens"
    return [
        (_format(ours, ".3f"), "bits per byte", remark),
        (_format(headline["train_loss"], ".3f"), "training loss", "nats per token, last"),
        (_format(recall and recall["accuracy"], ".0%"), "recall", distance),
        (short_number(run["tokens"]), "tokens", steps),
        (_format(headline["tokens_per_s"], ",.0f"), "tokens per second", "training, median"),
        (
            format_duration(run["training_seconds"]).replace("-", _BLANK),
            "training time",
            "evaluation not counted",
        ),
    ]


def _format(value: float | None, spec: str) -> str:
    return _BLANK if value is None else format(value, spec)


def _bars(headline: dict[str, Any]) -> list[dict[str, Any]]:
    """Held-out bits per byte beside the compressors on the same bytes; widths relative to the largest."""
    values = {"this model": headline["bits_per_byte"], **headline["compressors"]}
    known = {name: value for name, value in values.items() if value}
    largest = max(known.values(), default=1.0)
    return [
        {
            "name": name,
            "value": f"{value:.3f}",
            "percent": round(100 * value / largest, 1),
            "is_ours": name == "this model",
        }
        for name, value in sorted(known.items(), key=lambda item: item[1])
    ]


def _facts(run: dict[str, Any]) -> list[tuple[str, str]]:
    """What the run said about itself at its start, and when it ran; times are UTC."""
    facts = [("run", run["name"]), ("folder", run["folder"]), ("seed", run["seed"]), ("resumes", run["resumes"])]
    facts += [(name, _date(run[key])) for name, key in (("first event", "started"), ("last event", "ended"))]
    facts += [(name.replace("_", " "), value) for name, value in run["facts"].items()]
    return [
        (name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in facts if value is not None
    ]


def _date(timestamp: float | None) -> str | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _write(path: Path, text: str) -> Path:
    """Replace `path` in one move, so that a reader never sees half of it."""
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free some space and run `moonlet report` again"
        ) from error
    return path
