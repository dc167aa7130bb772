"""Metrics files: what is written is read back, torn lines are passed over, a resume drops what it will write again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.report.metrics import FanOut, MetricsLog, read_events, read_metrics


def _write_steps(folder: Path, steps: range, resume_step: int | None = None) -> None:
    with MetricsLog(folder, resume_step) as log:
        for step in steps:
            log.metrics(step, kind="train", loss=step / 10)


def test_lines_come_back_in_order_and_by_kind(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.metrics(1, kind="train", loss=2.5, max_violation={"a": np.float32(0.5)}, load=np.arange(3))
        log.metrics(1, kind="heldout", bits_per_byte=1.5)
        log.event("start", run="x")
    assert read_metrics(tmp_path, "train") == [
        {"kind": "train", "step": 1, "loss": 2.5, "max_violation": {"a": 0.5}, "load": [0, 1, 2]}
    ]
    assert [line["kind"] for line in read_metrics(tmp_path)] == ["train", "heldout"]
    assert read_events(tmp_path, "start")[0]["run"] == "x"
    assert read_metrics(tmp_path / "nowhere") == []


def test_non_finite_numbers_are_null_so_that_any_json_reader_can_read_them(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.metrics(1, loss=float("nan"), grad_norm=float("inf"))
    raw = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(raw, parse_constant=pytest.fail)["loss"] is None


@given(cut=st.integers(0, 400), resume_step=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_run_cut_anywhere_resumes_to_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_step: int
) -> None:
    straight, broken = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("broken")
    _write_steps(straight, range(1, 13))
    _write_steps(broken, range(1, 13))
    path = broken / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:cut])
    kept = read_metrics(broken)
    assert kept == read_metrics(straight)[: len(kept)]
    resume_step = min(resume_step, len(kept))
    _write_steps(broken, range(resume_step + 1, 13), resume_step)
    assert path.read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_events_survive_a_resume(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.event("checkpoint", step=9)
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.event("resume", step=3)
    assert [line["event"] for line in read_events(tmp_path)] == ["checkpoint", "resume"]


def test_fan_out_reaches_every_sink(tmp_path: Path) -> None:
    sink = FanOut([MetricsLog(tmp_path / "a"), MetricsLog(tmp_path / "b")])
    sink.metrics(3, loss=1.0)
    sink.event("done")
    sink.close()
    for name in "ab":
        assert read_metrics(tmp_path / name)[0]["step"] == 3
        assert read_events(tmp_path / name)[0]["event"] == "done"
