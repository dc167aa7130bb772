"""The choice of kernels: once, logged once, forceable, and a clear error for what cannot run (bug B11)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonlet.errors import KernelError
from moonlet.ops.backend import VARIABLE, kernel_report, kernels, use_kernels

TWO_STEPS = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s|%(message)s")
from moonlet.ops.kda import kda, kda_step
from moonlet.ops.situ import situ_glu
for _ in range(2):
    x = [torch.rand(1, 5, 2, 8).requires_grad_() for _ in range(4)]
    o, state = kda(*x[:3], -x[3], torch.rand(1, 5, 2))
    situ_glu(o, o, 4.0, 25.0).sum().backward()
kda_step(*(y[:, 0].detach() for y in x), torch.rand(1, 2), state)
print("done")
"""


def run_python(code: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "CXX")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("name", ["torch", "naive"])
def test_one_log_line_names_the_forced_kernels(tmp_path: Path, name: str) -> None:
    result = run_python(TWO_STEPS, tmp_path, **{VARIABLE: name})
    lines = [line for line in result.stdout.splitlines() if line.startswith("moonlet|")]
    assert result.stdout.endswith("done\n"), result.stderr
    assert len(lines) == 1 and "KDA" in lines[0] and name in lines[0] and "forced" in lines[0]


def test_without_a_compiler_torch_is_chosen_and_the_log_says_why(tmp_path: Path) -> None:
    result = run_python(TWO_STEPS, tmp_path, CXX="no-such-compiler")
    lines = [line for line in result.stdout.splitlines() if line.startswith("moonlet|")]
    assert result.stdout.endswith("done\n"), result.stderr
    assert len(lines) == 1 and "torch" in lines[0] and "no-such-compiler" in lines[0]


@pytest.mark.parametrize(
    ("script", "complaint"), [("echo it is broken >&2; exit 1", "it is broken"), ("exit 0", "file too short")]
)
def test_a_broken_compiler_is_no_disaster(tmp_path: Path, script: str, complaint: str) -> None:
    """It fails, or it succeeds and what it built does not load; nothing of it stays in the cache."""
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    result = run_python(TWO_STEPS, tmp_path, CXX=str(broken))
    assert result.stdout.endswith("done\n"), result.stderr
    assert complaint in result.stdout
    assert not list((tmp_path / "moonlet").iterdir())


def test_forced_native_without_a_compiler_is_an_error(tmp_path: Path) -> None:
    code = "from moonlet.ops.backend import kernels; kernels()"
    result = run_python(code, tmp_path, CXX="no-such-compiler", **{VARIABLE: "native"})
    assert result.returncode != 0 and "KernelError" in result.stderr and "install g++" in result.stderr


@pytest.mark.parametrize(("name", "hint"), [("triton", "native, torch, naive"), ("nativ", "did you mean 'native'")])
def test_unknown_kernels_are_an_error(monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    with pytest.raises(KernelError, match=hint), use_kernels(name):
        pass


def test_use_kernels_restores_what_was_there() -> None:
    before = kernels()
    with use_kernels("naive"):
        assert kernels() == "naive"
        with use_kernels("torch"):
            assert kernels() == "torch"
        assert kernels() == "naive"
    assert kernels() == before


def test_report_names_kernels_and_reason() -> None:
    report = kernel_report()
    assert report["kernels"] == kernels() and report["why"]
    assert {"compiler", "flags", "path", "lanes"} <= set(report) if report["native"] else report["reason"]
