"""Write a model in the released checkpoint layout.

Types follow the released rule: routed experts MXFP4, decay and convolution weights and other small vectors F32, the rest
BF16. Everything is written to a folder beside the target and renamed at the end, so a target is whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moonlet.errors import CheckpointError, ConfigError, StorageError
from moonlet.model.empty import tensors_of
from moonlet.model.hf_config import MEDIA_KEY, parse_config, released_config, with_quantization
from moonlet.model.hf_files import INDEX_NAME, CheckpointFiles
from moonlet.model.hf_layout import TEXT_PREFIX, Weight, layout, padded_length, shard_key
from moonlet.model.hf_load import LoadReport, weight_names
from moonlet.model.k3 import K3
from moonlet.model.multimodal import K3Multimodal
from moonlet.model.size import can_quantize
from moonlet.ops.mxfp4 import BLOCK, dequantize, quantize

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class ExportOptions:
    """How to write a checkpoint; the defaults give the released form of a model of our own."""

    raw: dict[str, Any] | None = None  # an existing config.json to keep; it must describe the same model
    weight_map: Mapping[str, str] | None = None  # an existing split into files to keep
    source: Path | None = None  # the folder that the model was loaded from: unchanged experts keep its bytes
    tokenizer_path: Path | None = None  # copied as tokenizer.json
    quantize_experts: bool = True
    prefixed: bool = True  # text names start with `language_model.`
    max_shard_bytes: int | None = None  # None: one file for each layer, as released

    @classmethod
    def like(cls, folder: Path, report: LoadReport, tokenizer_path: Path | None = None) -> Self:
        """Write a loaded checkpoint back exactly as it was in `folder`, without what was left out when it was loaded."""
        raw = dict(report.config.raw)
        if report.skipped:
            del raw["vision_config"]
        return cls(
            raw=raw,
            weight_map=report.weight_map,
            source=folder,
            tokenizer_path=tokenizer_path,
            quantize_experts=report.quantized,
            prefixed=report.prefixed,
        )


@dataclass(frozen=True)
class ExportReport:
    tensors: int
    total_bytes: int  # of the tensors, as the index says it
    files: tuple[str, ...]


def export_released(model: K3 | K3Multimodal, folder: Path, options: ExportOptions | None = None) -> ExportReport:
    """Write shards, index, config.json and tokenizer to `folder`, which must not exist yet or be empty.

    Weights are rounded once, so export, import and export again gives the same bytes.

    Raises:
        CheckpointError: the folder has files in it; an expert is too narrow for MXFP4; `weight_map` names other tensors.
        ConfigError: `raw` describes another model.
        StorageError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    options = options or ExportOptions()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not an empty folder: choose another one or remove it")
    _check_widths(model, options)
    raw = _config(model, options)
    shards = _assign_files(model, options)
    with _staged(folder) as stage:
        for file, weights in _by_file(shards).items():
            _write_shard(model, stage / file, weights, options, shards)
        report = _write_index(stage, model, options, shards)
        _write_json(stage / "config.json", raw)
        if options.tokenizer_path is not None:
            shutil.copyfile(options.tokenizer_path, stage / "tokenizer.json")
    return report


def plan_shards(weights: list[Weight], quantized: bool = True, max_bytes: int | None = None) -> dict[Weight, str]:
    """Weight -> file. Without a limit one file for each layer, then trunk, projector and vision tower, as released."""
    sizes = {entry: entry.num_bytes(quantized) // entry.copies for entry in {weight.entry for weight in weights}}
    keyed = sorted(((shard_key(weight), weight) for weight in weights), key=lambda pair: pair[0])
    groups: dict[Weight, int] = {}
    last, used, count = None, 0, 0
    for key, weight in keyed:
        size = sizes[weight.entry]
        if last is None or (key != last if max_bytes is None else used + size > max_bytes):
            count, used = count + 1, 0
        last, used = key, used + size
        groups[weight] = count
    return {weight: f"model-{group:05d}-of-{count:06d}.safetensors" for weight, group in groups.items()}


def _weights(model: K3 | K3Multimodal) -> list[Weight]:
    vision = model.vision_config if isinstance(model, K3Multimodal) else None
    return [weight for entry in layout(model.config, vision) for weight in entry.weights()]


def _names(weight: Weight, options: ExportOptions) -> list[str]:
    return weight_names(weight, TEXT_PREFIX if options.prefixed else "", options.quantize_experts)


def _assign_files(model: K3 | K3Multimodal, options: ExportOptions) -> dict[Weight, list[str]]:
    """The file of each tensor of each weight."""
    weights = _weights(model)
    if options.weight_map is None:
        plan = plan_shards(weights, options.quantize_experts, options.max_shard_bytes)
        return {weight: [plan[weight]] * len(_names(weight, options)) for weight in weights}
    given = dict(options.weight_map)
    names = {weight: _names(weight, options) for weight in weights}
    if wrong := given.keys() ^ {name for group in names.values() for name in group}:
        raise CheckpointError(
            f"weight_map differs from the model in {len(wrong)} tensors: {', '.join(sorted(wrong)[:10])}"
        )
    return {weight: [given[name] for name in group] for weight, group in names.items()}


def _by_file(shards: dict[Weight, list[str]]) -> dict[str, list[Weight]]:
    files: dict[str, list[Weight]] = {}
    for weight, names in shards.items():
        for file in dict.fromkeys(names):
            files.setdefault(file, []).append(weight)
    return dict(sorted(files.items()))


def _write_shard(
    model: K3 | K3Multimodal, path: Path, weights: list[Weight], options: ExportOptions, shards: dict[Weight, list[str]]
) -> None:
    owners = tensors_of(model)
    source = CheckpointFiles(options.source) if options.source is not None else None
    tensors: dict[str, Tensor] = {}
    for weight in weights:
        owner = owners[(TEXT_PREFIX if weight.is_text else "") + weight.parameter]
        names = _names(weight, options)
        for name, file, tensor in zip(
            names, shards[weight], _encode(weight, weight.view(owner).detach(), names, source)
        ):
            if file == path.name:
                tensors[name] = tensor.cpu().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    _sync(path)


def _encode(weight: Weight, values: Tensor, names: list[str], source: CheckpointFiles | None) -> tuple[Tensor, ...]:
    if len(names) == 2:
        return _kept(values, names, source) or quantize(values)
    if weight.entry.dtype == "F32":
        values = values.to(torch.float32, copy=True)
        return (
            (F.pad(values, (0, padded_length(len(values)) - len(values))),)
            if names[0].endswith(".A_log")
            else (values,)
        )
    return (values.to(torch.bfloat16, copy=True),)


def _kept(values: Tensor, names: list[str], source: CheckpointFiles | None) -> tuple[Tensor, Tensor] | None:
    """The bytes of the source, if they still say `values`: another encoder may write the same numbers differently."""
    if source is None or any(name not in source.weight_map for name in names):
        return None
    packed, scale = (source.tensor(name) for name in names)
    return (packed, scale) if torch.equal(dequantize(packed, scale, values.dtype), values.cpu()) else None


def _write_index(
    stage: Path, model: K3 | K3Multimodal, options: ExportOptions, shards: dict[Weight, list[str]]
) -> ExportReport:
    weight_map = {name: file for weight, files in shards.items() for name, file in zip(_names(weight, options), files)}
    stored = [part for weight in shards for part in weight.entry.stored(options.quantize_experts)]
    total = sum(prod(shape) * _BYTES[dtype] for _, shape, dtype in stored)
    _write_json(stage / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return ExportReport(len(weight_map), total, tuple(sorted(set(weight_map.values()))))


def _check_widths(model: K3 | K3Multimodal, options: ExportOptions) -> None:
    if options.quantize_experts and not can_quantize(model.config):
        inner, width = model.config.moe_intermediate_size, model.config.expert_hidden_size
        raise CheckpointError(
            f"MXFP4 needs expert widths that are multiples of {BLOCK}, this model has {width} and {inner}: "
            "export it with plain BF16 experts"
        )


def _config(model: K3 | K3Multimodal, options: ExportOptions) -> dict[str, Any]:
    vision = model.vision_config if isinstance(model, K3Multimodal) else None
    if options.raw is None:
        raw = released_config(model.config, quantized=options.quantize_experts)
        if isinstance(model, K3Multimodal):
            raw |= {"vision_config": model.vision_config.model_dump(mode="json"), MEDIA_KEY: model.media_token_id}
        return raw
    given = parse_config(options.raw, "the config.json to keep")
    if (given.text, given.vision) != (model.config, vision):
        raise ConfigError("the config.json to keep describes another model than the one that is exported")
    return with_quantization(options.raw, options.quantize_experts)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder to write to; it takes the name `folder` at the end, or disappears."""
    stage = folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        yield stage
        _sync(stage)
        os.rename(stage, folder)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write '{folder}': {error}; free some space or choose another place") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
