"""Recipes: TOML files, presets and dotted overrides, resolved to one `RunConfig`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from moonlet.config.model import ModelConfig, merge_model
from moonlet.config.run import RunConfig
from moonlet.errors import ConfigError, nearest_name

_PRESETS = resources.files("moonlet.config") / "presets"


def preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _PRESETS.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> dict[str, Any]:
    """The architecture fields of preset `name`."""
    if name not in preset_names():
        raise ConfigError(f"unknown preset '{name}'{nearest_name(name, preset_names())}; there are {preset_names()}")
    return tomllib.loads((_PRESETS / f"{name}.toml").read_text())


def resolve_model(table: dict[str, Any], where: str = "[model]") -> ModelConfig:
    """A `[model]` table: an optional `preset` with any of its fields replaced. TOML has no null: write "none"."""
    table = _none_from_text(table)
    base = load_preset(table.pop("preset")) if "preset" in table else {}
    return ModelConfig.parse(merge_model(base, table), where)


def _none_from_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_from_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_none_from_text(inner) for inner in value]
    return None if value == "none" else value


def load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe '{path}'") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not valid TOML: {error}") from None


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and lay `a.b=value` overrides over it; the later one wins.

    Raises:
        ConfigError: the file is missing or malformed, or a key is unknown, missing or wrong.
    """
    return resolve_run(apply_overrides(load_toml(path), overrides), where=str(path))


def resolve_run(table: dict[str, Any], where: str = "") -> RunConfig:
    table = _none_from_text(table)
    if isinstance(table.get("model"), dict):
        table["model"] = resolve_model(table["model"], where=f"{where} [model]".strip())
    return RunConfig.parse(table, where)


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`stages.0.tokens=1000` reaches into lists by position; values are TOML, and bare words are strings."""
    table = json.loads(json.dumps(table))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override '{override}' is not of the form key=value")
        _set_path(table, key.strip().split("."), _parse_value(text.strip()), override)
    return table


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set_path(node: Any, path: list[str], value: Any, override: str) -> None:
    for part in path[:-1]:
        node = _child(node, part, override)
    if isinstance(node, list):
        node[_position(node, path[-1], override)] = value
    else:
        node[path[-1]] = value


def _child(node: Any, part: str, override: str) -> Any:
    child = node[_position(node, part, override)] if isinstance(node, list) else node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"override '{override}': '{part}' is a value, not a table")
    return child


def _position(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override '{override}': '{part}' is not a position in a list of {len(node)}")
    return int(part)


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that `load_recipe` reads back to an equal one."""
    return "\n".join(_lines(config.model_dump(mode="json"), "")) + "\n"


def _lines(table: dict[str, Any], prefix: str) -> list[str]:
    plain = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _is_table(value)]
    lines = ([f"[{prefix}]"] if prefix and (plain or not table) else []) + plain
    for key, value in table.items():
        name = f"{prefix}.{_key(key)}" if prefix else _key(key)
        if isinstance(value, dict):
            lines += ["", *_lines(value, name)]
        elif _is_table(value):
            for item in value:
                lines += ["", f"[[{name}]]", *_item_lines(item)]
    return lines


def _item_lines(item: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in item.items()]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value)
