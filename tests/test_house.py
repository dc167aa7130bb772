"""The rules of the house: who imports whom, sizes, names, what no file may say. One test a rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_TORCH = ("config", "errors", "process", "text", "report", "cli")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
BANNED_STEMS = {"utils", "util", "common", "helpers", "helper", "misc"}

# Written so that this file does not match itself.
_MACHINE_PATHS = re.compile(r"(?<![\w./])/(work|root|home|opt|Users)/\w")
_REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.(org|com)|deb\.debian\.org")
_SECRETS = re.compile(r"\b(hf_[A-Za-z]{30,}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{30,}|sk-\w{20,})|-----BEGIN [A-Z ]*PRIVATE")
_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
_MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")


@cache
def _tracked() -> tuple[Path, ...]:
    """Tracked files that still exist; without git (an unpacked archive) every file of the package and its tests."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
        return tuple(ROOT / name for name in names if (ROOT / name).is_file())
    return tuple(path for folder in ("moonlet", "tests") for path in (ROOT / folder).rglob("*") if path.is_file())


def _sources(*suffixes: str) -> list[Path]:
    return [path for path in _tracked() if path.suffix in suffixes]


def _texts() -> list[tuple[Path, str]]:
    found = []
    for path in _tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found.append((path, data.decode(errors="replace")))
    return found


def _matches(pattern: re.Pattern[str], texts: list[tuple[Path, str]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("room", NO_TORCH)
def test_rooms_without_torch(room: str) -> None:
    """Importing every module of the room leaves torch out of the process."""
    at = ROOT / "moonlet" / room
    modules = [
        f"moonlet.{room}",
        *(f"moonlet.{room}.{path.stem}" for path in at.glob("*.py") if path.stem != "__init__"),
    ]
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_grab_bag_files() -> None:
    assert [str(path) for path in _tracked() if path.stem.removeprefix("test_") in BANNED_STEMS] == []


def test_files_are_short() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in _sources(".py", ".cpp", ".h")}
    assert {str(path): lines for path, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = []
    for path in _sources(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        path for path in _sources(".py") if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_nothing_is_left_unfinished() -> None:
    code = [(path, text) for path, text in _texts() if path.is_relative_to(ROOT / "moonlet")]
    assert _matches(_UNFINISHED, code) == []


@pytest.mark.parametrize(
    "pattern", [_MACHINE_PATHS, _REGISTRIES, _SECRETS], ids=["machine paths", "registries", "secrets"]
)
def test_files_do_not_say(pattern: re.Pattern[str]) -> None:
    assert _matches(pattern, _texts()) == []


def test_links_between_documents_exist() -> None:
    broken = []
    for path in _sources(".md"):
        for match in _MARKDOWN_LINK.finditer(path.read_text()):
            target = (match[1] or match[2]).split("#")[0]
            if (
                target
                and "://" not in target
                and not target.startswith("mailto:")
                and not (path.parent / target).exists()
            ):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def test_tests_mirror_the_package() -> None:
    rooms = {path.parent.relative_to(ROOT / "tests") for path in _sources(".py") if path.is_relative_to(ROOT / "tests")}
    assert [str(room) for room in rooms if not (ROOT / "moonlet" / room).is_dir()] == []


def test_an_installed_package_has_all_its_files() -> None:
    """What is not Python is installed only where pyproject.toml names it."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["moonlet"]
    data = [path.relative_to(ROOT / "moonlet") for path in _tracked() if path.is_relative_to(ROOT / "moonlet")]
    missing = [str(path) for path in data if path.suffix != ".py" and not any(path.match(name) for name in patterns)]
    assert missing == []
