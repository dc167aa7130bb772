"""`moonlet serve` as a process of its own: it says where it listens, answers, and ends in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner

from moonlet.cli import main as cli


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_served_until_a_signal(run: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-u", "-m", "moonlet", "serve", str(run), "--port", "0", "--api-key", "moon"]
    command += ["--mode", "replay", "--pages", "8", "--store", "ram:1MiB", "--store", f"disk:{tmp_path}/store"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"(\S+) listens on (http://127\.0\.0\.1:\d+/v1)", server.stdout.readline())
        assert found, server.communicate(timeout=10)
        client = openai.OpenAI(base_url=found[2], api_key="moon", max_retries=0)
        answer = client.completions.create(model=found[1], prompt="about above", max_tokens=4, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens <= 4
        assert httpx.get(f"{found[2]}/models").status_code == 401
        server.send_signal(number)
        assert server.wait(timeout=60) == 0, server.communicate()
    finally:
        server.kill()
        server.communicate()


def test_wrong_settings_are_explained(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["serve", str(run), "--mode", "quick"])
    assert done.exit_code == 2 and "recurrent, replay" in done.output
    done = CliRunner().invoke(cli.app, ["serve", str(tmp_path / "absent"), "--port", "0"])
    assert done.exit_code == 1 and "there is no run directory" in done.output
    done = CliRunner().invoke(cli.app, ["serve", str(run), "--port", "0", "--store", "tape:8"])
    assert done.exit_code == 1 and "tape" in done.output
