"""`moonlet size`: the released figures, small presets, a folder, and a name that is not there."""

from __future__ import annotations

import json

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

from moonlet.cli import main as cli
from moonlet.config import preset_names, resolve_model
from moonlet.model.hf_config import released_config

RELEASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")) or ["absent"]


def output(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["size", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_released_figures_are_printed_whole():
    printed = output("k3")
    for figure in ("2,779,484,476,000", "2,779,931,834,976", "104,189,612,640", "1,560,860,324,864", "497,220"):
        assert figure in printed


@pytest.mark.parametrize("preset", sorted(set(preset_names()) - {"k3"}))
def test_presets_and_their_written_configuration_agree(preset, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(released_config(resolve_model({"preset": preset}), quantized=True)))

    def totals(text: str) -> list[str]:
        return text.splitlines()[1:]

    assert totals(output(preset)) == totals(output(str(file))) == totals(output(str(tmp_path)))
    assert "with vision" not in output(preset)


@pytest.mark.golden
@pytest.mark.parametrize("name", RELEASES)
def test_golden_folder_has_the_bytes_of_its_index(golden, name):
    index = json.loads((golden.folder / name / "model.safetensors.index.json").read_text())
    printed = output(str(golden.folder / name))
    assert f"{index['metadata']['total_size']:,}" in printed and f"{len(index['weight_map']):,}" in printed


def test_the_context_moves_the_flops():
    assert "at 1,024 tokens" in output("nano", "--context", "1024")


def test_an_unknown_name_suggests_a_preset():
    result = CliRunner().invoke(cli.app, ["size", "mikro"])
    assert result.exit_code == 1 and "did you mean 'micro'" in result.output
