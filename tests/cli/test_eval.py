"""`moonlet eval`: the table, and wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonlet.cli import main as cli
from moonlet.cli.eval import describe, parse_distances


def test_the_table_of_a_run(run: Path) -> None:
    result = CliRunner().invoke(cli.app, ["eval", str(run), "--distances", "24,70"])
    assert result.exit_code == 0, result.output
    for said in ("bits per byte", "after short", "after long", "xz", "gzip", "bz2", "95 % interval", "2 samples"):
        assert said in result.output
    rows = [line.split()[0] for line in result.output.splitlines() if line.startswith("  ") and " to " in line]
    assert rows == ["24", "70"]
    assert {path.stem for path in (run / "eval").iterdir()} == {"heldout", "recall", "samples", "depth"}


def test_rivals_stand_in_order_and_parsing_samples_are_counted() -> None:
    heldout = {"documents": 2, "bytes": 9, "tokens": 4, "bits_per_byte": 1.6, "nats_per_token": 3.5, "by_stage": []}
    pieces = {
        "heldout": heldout | {"compressors": {"gzip": 1.98, "xz": 1.71}},
        "samples": [{"parses": True}, {"parses": False}, {"parses": None}],
    }
    lines = list(describe(pieces))
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["bits", "xz", "gzip"]
    assert lines[-1].strip() == "3 samples, 1 of 2 are valid Python"


def test_distances_are_read_from_a_list() -> None:
    assert parse_distances(None) is None
    assert parse_distances("64, 512,") == [64, 512]


@pytest.mark.parametrize("wrong", ["many", "12,-3", "0"])
def test_a_wrong_list_is_wrong_usage(wrong: str) -> None:
    result = CliRunner().invoke(cli.app, ["eval", "nowhere", "--distances", wrong])
    assert result.exit_code == 2 and wrong in result.output


def test_a_missing_run_is_one_message(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["eval", str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and "nowhere" in result.output and "Traceback" not in result.output
