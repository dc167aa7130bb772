"""The probe behind `moonlet doctor`: it checks values, and an answer that does not come is an answer."""

from __future__ import annotations

from moonlet.parallel.probe import probe


def test_every_check_holds_here() -> None:
    checks = probe()
    assert {check.name: check.message for check in checks if not check.is_ok} == {}
    assert {"all_to_all, no rows", "sharded weights (FSDP2)", "grouped product, bf16"} <= {
        check.name for check in checks
    }
    assert sum(check.is_needed for check in checks) == 3


def test_silence_is_a_failure_that_says_so() -> None:
    checks = probe(timeout_s=0.01)
    assert not any(check.is_ok for check in checks)
    assert all("no answer" in check.message for check in checks)
