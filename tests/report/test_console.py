"""The terminal lines: fields, their order, ETA; on a terminal and in a file."""

from __future__ import annotations

import io
import re

from moonlet.report.console import ConsoleLog, Phase, format_duration


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_step_line_has_its_fields_in_a_fixed_order() -> None:
    out = io.StringIO()
    log = ConsoleLog(total_steps=850, total_tokens=850_000, stream=out)
    log.metrics(
        120, kind="train", stage="short", tokens=120_000, loss=3.12345, lr=0.03, grad_norm=0.531, tokens_per_s=10_000
    )
    expected = (
        "step 120/850 |  14.1% | stage short | loss 3.1235 | lr 3.00e-02 | gnorm 0.531 | tok/s 10,000 | eta 1:13\n"
    )
    assert out.getvalue() == expected


def test_eta_goes_by_steps_where_tokens_are_not_known() -> None:
    out, clock = io.StringIO(), _Clock()
    log = ConsoleLog(total_steps=100, stream=out, clock=clock)
    log.metrics(10, loss=1.0)
    clock.now = 20.0
    log.metrics(20, loss=1.0)
    etas = re.findall(r"eta (\S+)", out.getvalue())
    assert etas == ["-", "2:40"]


def test_heldout_and_events_have_lines() -> None:
    out = io.StringIO()
    log = ConsoleLog(total_steps=10, stream=out)
    log.metrics(10, kind="heldout", stage="long", bits_per_byte=1.61234, loss=2.0)
    log.metrics(10, kind="depth", sites=[])
    log.event("checkpoint", step=10)
    assert out.getvalue() == "heldout 10/10 | stage long | bits/byte 1.6123 | loss 2.0000\ncheckpoint: step=10\n"


def test_phase_in_a_file_prints_seldom_and_at_the_end() -> None:
    out, clock = io.StringIO(), _Clock()
    with Phase("tokenise", 1000, "docs", stream=out, clock=clock) as phase:
        for done in range(0, 1000, 10):
            clock.now += 0.125
            phase(done + 10)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("tokenise 400/1,000 docs |  40.0% | 80 docs/s | eta 0:08")
    assert lines[-1] == "tokenise 1,000 docs | done in 12.5 s"


def test_phase_on_a_terminal_rewrites_one_line() -> None:
    out, clock = _Terminal(), _Clock()
    with Phase("read", None, "files", stream=out, clock=clock) as phase:
        for done in range(1, 5):
            clock.now += 1
            phase(done)
    assert out.getvalue().count("\n") == 1
    assert "\r\x1b[2Kread 3 files | 1 files/s" in out.getvalue()


def test_durations() -> None:
    assert [format_duration(s) for s in (None, 0, 59.6, 3723, float("inf"))] == ["-", "0:00", "1:00", "1:02:03", "-"]
