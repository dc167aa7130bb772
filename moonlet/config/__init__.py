"""Configuration: what a model and a run are, read from TOML and checked key by key."""

from moonlet.config.load import dump_toml, load_preset, load_recipe, preset_names, resolve_model, resolve_run
from moonlet.config.model import LinearAttention, ModelConfig, VisionConfig
from moonlet.config.run import (
    BalanceConfig,
    DataConfig,
    EvalConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
)

__all__ = [
    "BalanceConfig",
    "DataConfig",
    "EvalConfig",
    "LinearAttention",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "SourceConfig",
    "StageConfig",
    "TrainConfig",
    "VisionConfig",
    "dump_toml",
    "load_preset",
    "load_recipe",
    "preset_names",
    "resolve_model",
    "resolve_run",
]
