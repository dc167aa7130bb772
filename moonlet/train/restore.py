"""From a checkpoint back to a model: for resuming, where everything must fit, and for using it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonlet.config import RunConfig, resolve_run
from moonlet.errors import CheckpointError, ConfigError, NoCheckpointError
from moonlet.model.k3 import K3
from moonlet.text.tokenizer import Tokenizer
from moonlet.train.checkpoint import MARKER, TOKENIZER_FILE, Checkpoint, latest_complete, load_checkpoint


def load_model_for_inference(path: Path) -> tuple[K3, RunConfig, Tokenizer]:
    """The model in eval mode, its run's configuration and its tokenizer, from a run directory or a checkpoint folder.

    Raises:
        NoCheckpointError: there is no complete checkpoint.
        CheckpointError: it is damaged, or its parts do not belong together.
    """
    checkpoint = load_checkpoint(find_checkpoint(path), with_optimizer=False)
    config = saved_config(checkpoint)
    tokenizer = Tokenizer(checkpoint.tokenizer, f"{path}: {TOKENIZER_FILE}")
    if tokenizer.hash != checkpoint.state["tokenizer_hash"]:
        raise CheckpointError(f"the tokenizer beside the model in '{path}' is not the one that it was trained with")
    model = K3(config.model)
    load_weights(model, checkpoint.model)
    return model.eval(), config, tokenizer


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a checkpoint, else the newest complete one of the run directory `path`."""
    if (path / MARKER).exists() or path.name.startswith("step_"):
        return path
    if not path.is_dir():
        raise NoCheckpointError(f"there is no run directory or checkpoint '{path}'")
    return latest_complete(path / "checkpoints")


def saved_config(checkpoint: Checkpoint) -> RunConfig:
    try:
        return resolve_run(checkpoint.state["config"])
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"the configuration in the checkpoint is not of this version: {error}") from error


@torch.no_grad()
def load_weights(model: K3, saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the model.

    Raises:
        CheckpointError: names or shapes differ; it lists them, and the model is unchanged.
    """
    own = model.state_dict()
    problems = [f"missing '{name}'" for name in own if name not in saved]
    problems += [f"unexpected '{name}'" for name in saved if name not in own]
    problems += [
        f"'{name}' has shape {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(problems[:8])}{more}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def check_belongs(checkpoint: Checkpoint, config: RunConfig, tokenizer_hash: str) -> list[str]:
    """Refuse a checkpoint of another tokenizer or architecture; returns the other settings that changed since.

    Raises:
        CheckpointError: names what differs.
    """
    if checkpoint.state["tokenizer_hash"] != tokenizer_hash:
        raise CheckpointError(
            "the checkpoint was trained with another tokenizer than the prepared data: its ids mean other words. Resume "
            "with the run's own data folder, or start a new run"
        )
    changed = changed_keys(saved_config(checkpoint).model_dump(mode="json"), config.model_dump(mode="json"))
    if architecture := [key for key in changed if key.startswith("model.")]:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(architecture)} changed since")
    return changed


def changed_keys(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Dotted paths of values that differ between two nested tables."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [prefix.removesuffix(".")]
    keys = dict.fromkeys([*before, *after])
    return [path for key in keys for path in changed_keys(before.get(key), after.get(key), f"{prefix}{key}.")]
