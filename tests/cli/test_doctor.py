"""`moonlet doctor`: its rows are about this machine, and its exit code tells whether something needed is broken."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from moonlet.cli.doctor import num_usable_cores


def _doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonlet", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def _row(text: str, name: str) -> list[str]:
    """State and value of the row called `name`."""
    for line in text.splitlines():
        state, _, rest = line.strip().partition(" ")
        if rest.strip().startswith(f"{name} "):
            return [state, rest.strip().removeprefix(name).strip()]
    raise AssertionError(f"no row '{name}' in:\n{text}")


@pytest.fixture(scope="module")
def with_torch_kernels() -> str:
    done = _doctor("--no-probe", MOONLET_KERNELS="torch")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_are_about_this_machine(with_torch_kernels: str) -> None:
    assert _row(with_torch_kernels, "python") == ["ok", platform.python_version()]
    assert _row(with_torch_kernels, "torch")[1].startswith(torch.__version__)
    assert _row(with_torch_kernels, "cores")[1].startswith(f"{num_usable_cores()} for this process")
    assert _row(with_torch_kernels, "precision")[1].split(":")[0] in ("float32", "bfloat16")
    for title in ("machine", "software", "will be used", "missing"):
        assert f"\n{title}\n" in with_torch_kernels


def test_forced_kernels_are_reported_with_the_reason(with_torch_kernels: str) -> None:
    assert _row(with_torch_kernels, "kernels") == ["note", "torch: forced"]


def test_what_is_needed_and_broken_gives_1_and_one_message() -> None:
    done = _doctor("--no-probe", MOONLET_KERNELS="nativ")
    assert done.returncode == 1
    assert _row(done.stdout, "kernels")[0] == "failed"
    assert (
        done.stderr.startswith("error: this machine cannot train as it is: kernels") and "Traceback" not in done.stderr
    )


def test_a_missing_compiler_is_said() -> None:
    done = _doctor("--no-probe", CXX="no-such-compiler", MOONLET_KERNELS="torch")
    assert _row(done.stdout, "C++ compiler")[0] == "note"
