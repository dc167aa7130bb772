"""`moonlet chat`: through a pipe, command by command, and interrupted."""

from __future__ import annotations

import copy
import io
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trained_run
from typer.testing import CliRunner

from moonlet.cli import main as cli
from moonlet.cli.chat import Conversation, join_lines
from moonlet.eval.samples import Sampling, generate
from moonlet.train.restore import load_model_for_inference

GREEDY = Sampling(temperature=0, seed=0)


@pytest.fixture(scope="module")
def loaded(run: Path):
    return load_model_for_inference(run)


@pytest.fixture
def talk(loaded) -> Callable[..., Conversation]:
    model, _, tokenizer = loaded

    def start(max_tokens: int = 8, out: io.StringIO | None = None) -> Conversation:
        return Conversation(model, tokenizer, GREEDY, max_tokens, out or io.StringIO())

    return start


def _said(conversation: Conversation) -> str:
    assert isinstance(conversation.out, io.StringIO)
    return conversation.out.getvalue()


def _pipe(run: Path, text: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "moonlet", "chat", str(run), "--max-tokens", "6", *options]
    return subprocess.run(command, input=text, capture_output=True, timeout=120)


def test_lines_through_a_pipe_are_answered(run: Path) -> None:
    done = _pipe(run, "about above\n/temp 0\n/stats\n\xfc caf\n/quit\n/temp 9\n".encode("latin-1"))
    assert done.returncode == 0, done.stderr
    notes, answers = done.stderr.decode(), done.stdout.decode()
    assert "temperature 9" not in notes, "/quit ends before the input does"
    assert "temperature 0" in notes and "tokens/s" in notes and "KDA layers at any length" in notes
    assert answers.endswith("\n") and "/stats" not in answers


def test_the_same_seed_gives_the_same_talk(loaded) -> None:
    model, _, tokenizer = loaded
    said = []
    for seed in (1, 1, 2):
        conversation = Conversation(model, tokenizer, Sampling(1.0, seed), 12, io.StringIO())
        conversation.take("about")
        said.append(_said(conversation))
    assert said[0] == said[1] != said[2]


def test_a_reader_that_leaves_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m moonlet chat {run} --max-tokens 40 | head -c 1"
    lines = "about above after again\n" * 40
    done = subprocess.run(["bash", "-c", command], input=lines, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_answers_continue_the_text(loaded, talk) -> None:
    model, _, tokenizer = loaded
    conversation = talk()
    conversation.take("about above")
    first = list(generate(model, tokenizer, tokenizer.encode("about above"), GREEDY, max_tokens=8))
    assert _said(conversation).removesuffix("\n") == tokenizer.decode(first).removesuffix("\n")
    # The next line goes on from the state: the text so far, a line end where one is missing, and the line.
    before = len(_said(conversation))
    conversation.take("after")
    line_end = [] if tokenizer.decode(first).endswith("\n") else tokenizer.encode("\n")
    text = [*tokenizer.encode("about above"), *first, *tokenizer.encode("\nafter" if line_end else "after")]
    second = list(generate(model, tokenizer, text, GREEDY, max_tokens=8))
    assert _said(conversation)[before:].removesuffix("\n") == tokenizer.decode(second).removesuffix("\n")


def test_an_empty_line_goes_on(talk) -> None:
    halves, whole = talk(max_tokens=4), talk(max_tokens=8)
    halves.take("about above")
    halves.take("")
    whole.take("about above")
    assert _said(halves).replace("\n", "") == _said(whole).replace("\n", "")


def test_reset_forgets(talk) -> None:
    conversation = talk()
    conversation.take("about above")
    first = _said(conversation)
    conversation.take("/reset")
    assert conversation.text.num_tokens == 0
    conversation.take("about above")
    assert _said(conversation) == first * 2


def test_stats_tell_the_size_of_the_state(talk) -> None:
    conversation = talk()
    sizes = []
    for line in ("about above", "after again along"):
        conversation.take(line)
        sizes.append(
            [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes in", conversation.stats())]
        )
    (kda_before, mla_before), (kda_after, mla_after) = sizes
    assert kda_before == kda_after > 0 and mla_after > mla_before
    rows = conversation.text.state.length
    config = conversation.model.config
    assert mla_after == rows * (config.kv_lora_rank + config.qk_rope_head_dim) * 4


@pytest.mark.parametrize("wrong", ["/temp", "/temp warm", "/temp -1", "/temp nan", "/temp inf"])
def test_a_wrong_temperature_is_refused(talk, capsys, wrong: str) -> None:
    conversation = talk()
    assert conversation.take(wrong) and conversation.sampling == GREEDY
    assert "/temp 0.5" in capsys.readouterr().err
    conversation.take("/temp 0.5")
    assert conversation.sampling.temperature == 0.5


def test_an_unknown_command_suggests_the_known_one(talk, capsys) -> None:
    conversation = talk()
    conversation.take("/rest")
    assert "/reset" in capsys.readouterr().err and conversation.text.num_tokens == 0
    conversation.take("/usr/bin is a path")
    assert conversation.text.num_tokens > 0


def test_a_prompt_beyond_the_context_is_refused_and_forgotten(talk, capsys) -> None:
    conversation = talk()
    conversation.take("about " * trained_run.MAX_POSITIONS)
    said = capsys.readouterr().err
    assert f"{trained_run.MAX_POSITIONS} tokens" in said and "/reset" in said
    assert conversation.text.num_tokens == 0 and _said(conversation) == ""


def test_the_context_fills_up_to_its_last_token(talk, capsys) -> None:
    conversation = talk(max_tokens=10_000)
    conversation.take("about above after again")
    if conversation.text.num_tokens:  # the model has not ended the document by itself
        assert conversation.text.num_tokens == trained_run.MAX_POSITIONS
        assert "is full" in capsys.readouterr().err


def test_an_end_of_document_starts_a_new_one(loaded, capsys) -> None:
    model, _, tokenizer = loaded
    model = copy.deepcopy(model)
    with torch.no_grad():
        # The row of [EOS] points where the hidden state after this text points, and wins.
        hidden = model.hidden(torch.tensor([tokenizer.encode("about above")]))[0, -1]
        model.output_weight[tokenizer.special_id("[EOS]")] = 100 * hidden
    conversation = Conversation(model, tokenizer, GREEDY, 8, io.StringIO())
    conversation.take("about above")
    assert _said(conversation) == "\n" and conversation.text.num_tokens == 0
    assert "end of the document" in capsys.readouterr().err


class _Presser(io.StringIO):
    """Presses Ctrl-C when the second piece is written."""

    def write(self, text: str) -> int:
        if self.getvalue() and text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_an_answer_between_tokens(talk) -> None:
    conversation = talk(max_tokens=50, out=_Presser())
    before = signal.getsignal(signal.SIGINT)
    assert conversation.take("about above", stops_on_interrupt=True)
    assert signal.getsignal(signal.SIGINT) is before
    lengths = {layer.length for layer in conversation.text.state.layers if hasattr(layer, "length")}
    assert lengths == {conversation.text.state.length} and conversation.text.num_tokens < 30
    conversation.out = io.StringIO()
    assert conversation.take("after") and _said(conversation)


def test_a_backslash_joins_lines() -> None:
    assert list(join_lines(["def f(x):\\\n", "    return x\r\n", "", "a\\"])) == ["def f(x):\n    return x", "", "a"]


def test_unusable_runs_are_one_message(run: Path, tmp_path: Path) -> None:
    partial = shutil.copytree(run, tmp_path / "partial")
    for marker in (partial / "checkpoints").glob("*/COMPLETE"):
        marker.unlink()
    for path, said in ((tmp_path / "nowhere", "nowhere"), (partial, "no complete checkpoint")):
        result = CliRunner().invoke(cli.app, ["chat", str(path)], input="about\n")
        assert result.exit_code == 1 and said in result.output and "Traceback" not in result.output


def test_the_end_of_the_input_is_a_good_end(run: Path) -> None:
    for text in ("", "about", "about\n"):
        result = CliRunner().invoke(cli.app, ["chat", str(run), "--max-tokens", "2"], input=text)
        assert result.exit_code == 0, result.output
