"""Vision presets: `NAME.toml` beside this file describes the vision half of text preset NAME, where it has one."""

from __future__ import annotations

import tomllib
from importlib import resources

from moonlet.config.model import VisionConfig

_FOLDER = resources.files("moonlet.config.vision")


def load_vision_preset(name: str) -> VisionConfig | None:
    """The vision configuration that belongs to text preset `name`, or None if that model only reads text."""
    file = _FOLDER / f"{name}.toml"
    return VisionConfig.parse(tomllib.loads(file.read_text()), f"vision preset '{name}'") if file.is_file() else None
