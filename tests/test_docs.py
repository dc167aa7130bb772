"""The documentation agrees with the code: configuration keys and defaults, links, verbs, options, files, make targets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from moonlet.cli.main import VERBS, load_command
from moonlet.config import RunConfig, load_preset

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]
CONFIGURATION = ROOT / "docs" / "configuration.md"

_CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
_COMMAND = re.compile(r"\bmoonlet +(--[a-z-]+|[a-z]+)\b(.*)")
_FILE = re.compile(r"(?<![\w/])(?!runs/)[\w.-]+(/[\w.-]+)+\.(py|cpp|h|toml|txt)\b")
_PACKAGE = ROOT / "moonlet"


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Models inside an annotation, and whether each stands in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for inner in getattr(annotation, "__args__", ()):
        for model, _ in models_in(inner):
            yield model, getattr(annotation, "__origin__", None) is list


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(TOML path, model) of a configuration and of everything in it; list items in double brackets."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner, is_list in models_in(field.annotation):
            bare = f"{path.strip('[]')}.{name}".removeprefix(".")
            yield from sections(inner, f"[[{bare}]]" if is_list else f"[{bare}]")


@cache
def documented() -> dict[str, dict[str, list[str]]]:
    """Tables of the configuration page: TOML path -> key -> the other cells of its row."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = None
    for line in CONFIGURATION.read_text().splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ").strip("`")
            heading = found.setdefault("" if title == "Top level" else title, {})
        elif heading is not None and (match := re.match(r"\| `(\w+)` \| (.*) \|$", line)):
            heading[match[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", match[2])]
    return found


def default_cell(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "-"
    return "all defaults" if isinstance(value, BaseModel) else f"`{json.dumps(value)}`"


def code_of(page: Path) -> list[str]:
    """Lines of code on a page, from blocks and from the running text."""
    return [line for match in _CODE.finditer(page.read_text()) for line in (match[1] or match[2]).splitlines()]


def options_in(command: Any) -> set[str]:
    """Options of a command and of the commands below it."""
    below = [options_in(child) for child in getattr(command, "commands", {}).values()]
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {"--help"}.union(own, *below)


@cache
def options_of(verb: str) -> set[str]:
    return options_in(load_command(verb))


def wrong_words(verb: str, rest: str) -> Iterator[str]:
    """Words after `moonlet VERB` that are neither a command below it nor an option of that command."""
    command = load_command(verb)
    for word in rest.split():
        if not hasattr(command, "commands"):
            break
        if word in command.commands:
            command = command.commands[word]
        elif re.fullmatch(r"[a-z]+", word):
            yield word
    yield from set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition(" -- ")[0])) - options_in(command)


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for match in _LINK.finditer(page.read_text()):
        link = match[1] or match[2]
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def missing_file(name: str) -> bool:
    return not any((folder / name).exists() for folder in (ROOT, _PACKAGE))


def test_every_table_of_the_configuration_has_a_section():
    assert sorted(documented()) == sorted(path for path, _ in sections(RunConfig))


@pytest.mark.parametrize(
    "path, model", list(sections(RunConfig)), ids=lambda value: value if type(value) is str else ""
)
def test_every_key_is_documented_with_its_default(path: str, model: type[BaseModel]):
    table = documented()[path]
    assert list(table) == list(model.model_fields)
    if "model" not in path:  # architecture fields have no defaults
        assert {key: cells[0] for key, cells in table.items()} == {
            key: default_cell(field) for key, field in model.model_fields.items()
        }


@pytest.mark.parametrize("column, preset", enumerate(("nano", "k3")))
def test_preset_values_are_those_of_the_presets(column: int, preset: str):
    values = load_preset(preset)
    nested = values["linear_attn_config"]
    for path, table in (("[model]", values), ("[model.linear_attn_config]", nested)):
        for key, cells in documented()[path].items():
            if not isinstance(table[key], list | dict):
                assert cells[column] == f"`{json.dumps(table[key])}`", f"{path} {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_exist(page: Path):
    every_option = {"--version", *(option for verb in VERBS for option in options_of(verb))}
    wrong = []
    for line in code_of(page):
        if match := _COMMAND.search(line):
            verb, rest = match.groups()
            if verb in ("--help", "--version"):
                continue
            wrong += [line] if verb not in VERBS or [*wrong_words(verb, rest)] else []
        elif line.startswith("--") and line.split()[0] not in every_option:
            wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_make_targets_exist(page: Path):
    code = code_of(page)
    files = {match[0] for line in code for match in _FILE.finditer(line) if "://" not in line}
    targets = {match[1] for line in code if (match := re.match(r"make ([a-z]+)", line))}
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert ({name for name in files if missing_file(name)}, targets - known) == (set(), set())
