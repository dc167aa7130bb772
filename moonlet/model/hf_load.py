"""Load a released checkpoint: every weight is checked against the table of the layout, then streamed to its place.

Weights go straight into the parameters of the model, one tensor at a time; routed experts are decoded into their stack
one by one. So the model is in memory once, beside the largest single tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moonlet.errors import CheckpointError
from moonlet.model.empty import build_empty, tensors_of
from moonlet.model.hf_config import ReleasedConfig, read_config
from moonlet.model.hf_files import CheckpointFiles
from moonlet.model.hf_layout import TEXT_PREFIX, VISION_PREFIXES, Shape, Weight, layout
from moonlet.model.k3 import K3
from moonlet.model.multimodal import K3Multimodal
from moonlet.ops.mxfp4 import dequantize

_FLOATS = ("BF16", "F32", "F16")
_SHOWN = 50
_LOG = logging.getLogger("moonlet")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, and what is needed to write it back in the same form."""

    config: ReleasedConfig
    weight_map: dict[str, str]  # loaded tensor -> file
    loaded: int
    expected: int
    skipped: int  # vision tensors left out on request
    quantized: bool  # routed experts are MXFP4 in the files
    prefixed: bool  # text names start with `language_model.`


@dataclass(frozen=True)
class _Plan:
    """Where each weight of the layout lies in the files."""

    names: dict[Weight, list[str]]
    problems: list[str]

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for names in self.names.values())


def load_released(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, text_only: bool = False
) -> tuple[K3 | K3Multimodal, LoadReport]:
    """Build the model that `folder` describes and fill it.

    Args:
        folder: config.json and one or more safetensors files, with or without the prefix `language_model.`.
        device: where the parameters live.
        dtype: of the parameters; those that are released as F32 stay float32.
        text_only: leave the vision half of a multimodal checkpoint out.

    Returns:
        `K3`, or `K3Multimodal` where the configuration has a vision half, in eval mode; and the report.

    Raises:
        ConfigError: the configuration is incomplete or not understood.
        CheckpointError: a file is missing or cut short; a tensor is missing, unexpected or of another shape or type;
            the padding of an A_log vector is not zero. All such tensors are listed at once.
    """
    config = read_config(folder)
    vision = None if text_only else config.vision
    with CheckpointFiles(folder) as files:
        prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in files.weight_map) else ""
        skipped = {name for name in files.weight_map if text_only and name.startswith(VISION_PREFIXES)}
        weights = [weight for entry in layout(config.text, vision) for weight in entry.weights()]
        plan = _plan(weights, files, prefix)
        _check(folder, plan, files, skipped)
        model = build_empty(config.text, vision, config.media_token_id, device=device, dtype=dtype)
        _fill(model, plan, files)
    expected = plan.num_tensors
    _LOG.info("%s: %d loaded / %d expected tensors", folder, expected, expected)
    weight_map = {name: file for name, file in files.weight_map.items() if name not in skipped}
    report = LoadReport(config, weight_map, expected, expected, len(skipped), files.has_packed, bool(prefix))
    return model.eval(), report


def weight_names(weight: Weight, prefix: str, quantized: bool) -> list[str]:
    """Names of the tensors that hold `weight` in the files."""
    return [(prefix if weight.is_text else "") + name for name, _, _ in weight.stored(quantized)]


def _plan(weights: list[Weight], files: CheckpointFiles, prefix: str) -> _Plan:
    plan = _Plan({}, [])
    for weight in weights:
        # By the names that are there: the ignore list of the released quantization_config is not complete.
        quantized = files.has_packed and weight_names(weight, prefix, False)[0] not in files.weight_map
        stored = weight.stored(quantized)
        plan.names[weight] = names = weight_names(weight, prefix, quantized)
        for name, (_, shape, dtype) in zip(names, stored):
            plan.problems.extend(_tensor_problems(name, weight, shape, dtype, files))
    return plan


def _tensor_problems(name: str, weight: Weight, shape: Shape, dtype: str, files: CheckpointFiles) -> Iterator[str]:
    header = files.headers.get(name)
    if header is None:
        yield f"missing {name}"
        return
    # The length of a padded A_log is the writer's choice; what lies beyond the heads is checked when it is read.
    is_padded = name.endswith(".A_log") and prod(header.shape) >= weight.entry.shape[0]
    if header.shape != shape and not is_padded:
        yield f"wrong shape {name}: {list(header.shape)}, expected {list(shape)}"
    if header.dtype not in (("U8",) if dtype == "U8" else _FLOATS):
        yield f"wrong type {name}: {header.dtype}, expected {dtype}"


def _check(folder: Path, plan: _Plan, files: CheckpointFiles, skipped: set[str]) -> None:
    expected = {name for names in plan.names.values() for name in names}
    unexpected = sorted(files.weight_map.keys() - expected - skipped)
    problems = plan.problems + [f"unexpected {name}" for name in unexpected]
    if problems:
        found = len(expected & files.weight_map.keys())
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        lines = "\n  ".join(problems[:_SHOWN] + more)
        raise CheckpointError(
            f"'{folder}' does not hold the model of its config.json: {found} found / {len(expected)} expected tensors, "
            f"{len(problems)} problems:\n  {lines}"
        )


@torch.no_grad()
def _fill(model: K3 | K3Multimodal, plan: _Plan, files: CheckpointFiles) -> None:
    """In the order of the files, so that each is mapped once."""
    targets = tensors_of(model)
    for weight, names in sorted(plan.names.items(), key=lambda item: files.weight_map[item[1][0]]):
        owner = (TEXT_PREFIX if weight.is_text else "") + weight.parameter
        target = weight.view(targets[owner])
        target.copy_(_read(weight, names, files, target.dtype))


def _read(weight: Weight, names: list[str], files: CheckpointFiles, dtype: torch.dtype) -> Tensor:
    tensors = [files.tensor(name) for name in names]
    if len(tensors) == 2:
        packed, scale = tensors
        return dequantize(packed, scale, dtype)
    return _unpad(names[0], tensors[0], weight.entry.shape[0]) if names[0].endswith(".A_log") else tensors[0]


def _unpad(name: str, A_log: Tensor, num_heads: int) -> Tensor:
    values, padding = A_log.flatten().split([num_heads, A_log.numel() - num_heads])
    if bool((padding != 0).any()):
        raise CheckpointError(
            f"{name} has {A_log.numel()} entries for {num_heads} heads, and the rest is not zero padding: "
            "it is of another model, or stored for each channel"
        )
    return values
