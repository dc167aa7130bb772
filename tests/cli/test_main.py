"""The command line: instant help, one clear message for each error, exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonlet.cli import main as cli
from moonlet.errors import DataError

_NO_TORCH = """
import sys
import moonlet.cli.main as cli
assert "torch" not in sys.modules, "importing the command line loads torch"
sys.argv = ["moonlet", *{arguments}]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules, "help loads torch"
"""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_overview_needs_no_torch(arguments: list[str]) -> None:
    done = _python(_NO_TORCH.format(arguments=arguments))
    assert done.returncode == 0, done.stderr


def test_overview_names_every_verb() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for name, verb in cli.VERBS.items():
        assert name in result.output and verb.summary[:20] in result.output


@pytest.mark.parametrize("name", sorted(cli.VERBS))
def test_every_verb_shows_its_own_help_without_torch(name: str) -> None:
    done = _python(_NO_TORCH.format(arguments=[name, "--help"]))
    assert done.returncode == 0, done.stderr
    assert f"moonlet {name}" in done.stdout


def test_wrong_usage_ends_with_2_and_suggests() -> None:
    result = CliRunner().invoke(cli.app, ["reprot"])
    assert result.exit_code == 2
    assert "report" in result.output


def _run_a_verb_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of the command line around a verb that fails."""

    def verb() -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("moonlet.cli.report"), "report", verb)
    with pytest.raises(SystemExit) as end:
        cli.app(["report"])
    return int(end.value.code or 0)


def test_a_moonlet_error_is_one_message_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    error = DataError("the corpus 'x' is empty; name a folder with text in it")
    assert _run_a_verb_that_raises(error, monkeypatch) == 1
    assert capfd.readouterr() == ("", f"error: {error}\n")


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_a_verb_that_raises(KeyboardInterrupt(), monkeypatch) == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _run_a_verb_that_raises(ZeroDivisionError(), monkeypatch)


def test_python_dash_m_is_the_same_program(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "moonlet", "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("moonlet ")


def test_a_real_signal_gives_a_message_and_130() -> None:
    code = (
        "import time, sys, moonlet.cli.main as cli, moonlet.cli.report as report\n"
        "def verb():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "report.report = verb\nsys.argv = ['moonlet', 'report']\ncli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "interrupted\n"
