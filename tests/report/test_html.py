"""The page and its figures for machines: complete, self-contained, escaped, and made from whatever a run left behind."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.synthetic_run import write_synthetic_run

from moonlet.config import dump_toml, resolve_run
from moonlet.errors import DataError
from moonlet.report.collect import collect_results
from moonlet.report.html import build_report
from moonlet.report.metrics import MetricsLog

_TITLES = (
    "Held-out text, compressed",
    "Stages",
    "Loss by tokens",
    "Recall by distance",
    "Learning rate",
    "Speed",
    "Gradient norm by depth",
    "Expert balance",
    "Expert load by layer",
    "Depth attention",
    "Samples",
    "Resolved configuration",
)
_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Balance(HTMLParser):
    """Fails on a tag that is closed in the wrong place; collects drawings without a name for screen readers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.nameless = 0
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.nameless += tag == "svg" and not given.get("aria-label")
        self.targets += [value for name, value in attrs if name in ("src", "href", "srcset", "action") and value]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def _page(run: Path) -> str:
    return build_report(run).read_text(encoding="utf-8")


def _check_page(page: str) -> None:
    parser = _Balance()
    parser.feed(page)
    assert parser.open == [] and parser.nameless == 0
    assert parser.targets == ["data:,"], "the page must not ask for anything outside itself"
    assert not re.search(r"@import|url\(|https?://", page)


def test_finished_run_shows_everything(finished_run: Path) -> None:
    page = _page(finished_run)
    _check_page(page)
    assert [title for title in _TITLES if title not in page] == []
    assert "Not there yet" not in page
    assert "layer 3 mlp, block 1" in page
    for number in ("1.612", "1.713", "1.981", "chance 10%", "parses as Python"):
        assert number in page


def test_results_hold_the_same_figures(finished_run: Path) -> None:
    build_report(finished_run)
    results = json.loads((finished_run / "results.json").read_text(), parse_constant=pytest.fail)
    assert results == collect_results(finished_run)
    assert results["run"]["status"] == "finished" and results["missing"] == []
    assert results["headline"]["compressors"] == {"xz": 1.713, "bz2": 1.709, "gzip": 1.981}
    assert [stage["bits_per_byte"] for stage in results["stages"]] == [1.78, 1.67, 1.61]
    assert len({len(column) for column in results["train"].values()}) == 1
    assert results["config"]["name"] == "laptop"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.7, 0.95])
def test_a_run_that_stopped_shows_what_is_there(tmp_path: Path, share: float) -> None:
    run = write_synthetic_run(tmp_path / "run", share)
    page = _page(run)
    _check_page(page)
    assert "has not reached its end" in page and "Not there yet" in page
    assert ("Loss by tokens" in page) == (share > 0.001)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.resolved.toml", "eval", "eval/heldout.json"])
@pytest.mark.parametrize("is_torn", [False, True], ids=["gone", "torn"])
def test_any_piece_may_be_gone_or_torn(finished_run: Path, tmp_path: Path, name: str, is_torn: bool) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    for path in sorted((run / name).iterdir()) if (run / name).is_dir() else [run / name]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) if is_torn else path.unlink()
    _check_page(_page(run))


def test_text_from_the_run_is_escaped(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    attack = "</pre><script>alert(1)</script>"
    (run / "eval" / "samples.json").write_text(json.dumps([{"prompt": attack, "text": attack, "parses": None}]))
    with MetricsLog(run) as log:
        log.event("warning", message=attack)
    page = _page(run)
    _check_page(page)
    assert attack not in page and "&lt;script&gt;alert(1)" in page


def test_the_released_shape_fits_on_a_page(tmp_path: Path) -> None:
    """92 expert layers with 896 experts each, 187 depth sites: experts are grouped, the page stays small."""
    with MetricsLog(tmp_path) as log:
        load = {f"model.layers.{layer}.gate": [100 + layer] * 896 for layer in range(1, 93)}
        log.metrics(1, stage="one", tokens=10, loss=2.0, expert_load=load, max_violation=dict.fromkeys(load, 0.1))
        sites = [f"layers.{layer}.{kind}" for layer in range(93) for kind in ("attn", "mlp")]
        log.metrics(1, kind="depth", stage="one", sites=sites, weights=[[1 / 9] * 9 for _ in sites])
    page = _page(tmp_path)
    _check_page(page)
    assert "groups of experts" in page
    assert len(page) < 6_000_000


def test_what_the_recipe_does_not_ask_for_is_not_missed(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    recipe = run / "config.resolved.toml"
    assert "[eval]" in recipe.read_text()
    for name in ("recall", "samples"):
        (run / "eval" / f"{name}.json").unlink()
    assert len(collect_results(run)["missing"]) == 2
    plain = resolve_run({**tomllib.loads(recipe.read_text()), "eval": {}})
    recipe.write_text(dump_toml(plain))
    assert collect_results(run)["missing"] == []


def test_what_is_not_a_run_directory_is_said(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="is not a run directory"):
            build_report(folder)


def test_rebuilding_gives_the_same_page(finished_run: Path) -> None:
    assert _page(finished_run) == _page(finished_run)
