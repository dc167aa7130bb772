"""Bytes for a piece of model state that another process may go on from, and back, or not at all (rl.md section 6).

A record lists, layer by layer, everything that the past leaves behind: the latent rows of an MLA layer, the recurrent
state and the three convolution windows of a KDA layer, and the open chunk where there is one. A hand-over that forgets
one of them still decodes, into fluent nonsense; so a record says what it holds, of which model and weights, and is read
only where all of that is as expected.

    magic (8 bytes) | sha256 of the rest (32) | length of the manifest (8) | manifest (JSON) | tensors (safetensors)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from moonlet.errors import StateRecordError

_MAGIC = b"MOONSTAT"
_FORMAT = 1
_FIELDS = {"format", "kind", "length", "weights_version", "model_id", "layers"}
_DIGEST_AT, _SIZE_AT, _MANIFEST_AT = 8, 40, 48


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a record must be; a size of None may be any."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    def fits(self, tensor: Tensor) -> bool:
        sizes_fit = all(want in (None, size) for want, size in zip(self.shape, tensor.shape))
        return tensor.dtype == self.dtype and len(self.shape) == tensor.dim() and sizes_fit


LayerSpec = Mapping[str, TensorSpec]


@dataclass
class StateRecord:
    """A saved piece of model state.

    Attributes:
        kind: what the piece is, in a word of the writer's ("decode_state", "checkpoint").
        length: tokens that the state has seen. The next token to feed is number `length`: a hand-over that feeds an
            earlier one again advances the state twice.
        weights_version, model_id: which weights computed it.
        layers: named tensors of each layer, on the CPU after `unpack`.
    """

    kind: str
    length: int
    weights_version: int
    model_id: str
    layers: list[dict[str, Tensor]]


def specs_of(layers: Sequence[Mapping[str, Tensor]]) -> list[dict[str, TensorSpec]]:
    """The exact specs of these tensors."""
    return [{name: TensorSpec(tuple(x.shape), x.dtype) for name, x in layer.items()} for layer in layers]


def pack(record: StateRecord) -> bytes:
    """The record as bytes; equal records give equal bytes."""
    if record.length < 0:
        raise ValueError(f"a state after {record.length} tokens")
    manifest = {
        "format": _FORMAT,
        "kind": record.kind,
        "length": record.length,
        "weights_version": record.weights_version,
        "model_id": record.model_id,
        "layers": [{name: _describe(tensor) for name, tensor in layer.items()} for layer in record.layers],
    }
    # Each a copy of its own memory: safetensors refuses tensors that share theirs, as pieces of one pool do.
    tensors = {
        f"{index}.{name}": tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for index, layer in enumerate(record.layers)
        for name, tensor in layer.items()
    }
    described = json.dumps(manifest, sort_keys=True).encode()
    size, payload = len(described).to_bytes(_MANIFEST_AT - _SIZE_AT, "little"), save(tensors)
    return b"".join((_MAGIC, _digest(size, described, payload), size, described, payload))


def unpack(
    data: bytes,
    *,
    expect_weights_version: int,
    expect_model_id: str,
    expect_layers: Sequence[LayerSpec],
) -> StateRecord:
    """The record in `data`, where it is whole and what the caller can use.

    Raises:
        StateRecordError: a byte is wrong or missing; other weights or another model; a tensor is missing, too many or
            of another shape or dtype. There is no way to read such a record in part.
    """
    manifest, payload = read_manifest(data)
    if (model_id := manifest["model_id"]) != expect_model_id:
        raise StateRecordError(f"the saved state is of model '{model_id}', not of '{expect_model_id}': recompute it")
    if (version := manifest["weights_version"]) != expect_weights_version:
        raise StateRecordError(
            f"the saved state was computed with version {version} of the weights, not with {expect_weights_version}: "
            "recompute it"
        )
    layers = _load_layers(manifest["layers"], payload)
    _check_layers(layers, expect_layers)
    return StateRecord(manifest["kind"], manifest["length"], version, model_id, layers)


def read_manifest(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Manifest and packed tensors of a record whose every byte is as it was written.

    Raises:
        StateRecordError: it is not.
    """
    if len(data) < _MANIFEST_AT or data[:_DIGEST_AT] != _MAGIC:
        raise StateRecordError(f"{len(data):,} bytes that are no record of a model's state: recompute it")
    if _digest(memoryview(data)[_SIZE_AT:]) != data[_DIGEST_AT:_SIZE_AT]:
        raise StateRecordError("the saved state is damaged or cut short (its checksum is wrong): recompute it")
    payload_at = _MANIFEST_AT + int.from_bytes(data[_SIZE_AT:_MANIFEST_AT], "little")
    try:
        manifest = json.loads(data[_MANIFEST_AT:payload_at])
        if set(manifest) != _FIELDS or manifest["format"] != _FORMAT:
            raise StateRecordError(
                f"the saved state is not of format {_FORMAT}, which this Moonlet reads: recompute it"
            )
    except (ValueError, TypeError) as error:
        raise StateRecordError(f"the manifest of the saved state cannot be read: {error}") from error
    return manifest, data[payload_at:]


def compute_model_id(model: nn.Module) -> str:
    """A name for a model: SHA-256 over its configuration and all its weights, as hex. Reads every weight once."""
    config = getattr(model, "config", None)
    hashed = hashlib.sha256(config.model_dump_json().encode() if config is not None else b"")
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(f"\n{name} {_describe(tensor)}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def _describe(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _digest(*parts: bytes | memoryview) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _load_layers(described: list[dict[str, list[Any]]], payload: bytes) -> list[dict[str, Tensor]]:
    """Tensors by layer, all that the manifest names and no others."""
    try:
        tensors = load(payload)
    except SafetensorError as error:
        raise StateRecordError(f"the tensors of the saved state cannot be read: {error}") from error
    layers: list[dict[str, Tensor]] = []
    for index, names in enumerate(described):
        layers.append({})
        for name, what in names.items():
            tensor = tensors.pop(f"{index}.{name}", None)
            if tensor is None or _describe(tensor) != what:
                raise StateRecordError(f"layer {index} of the saved state lacks the '{name}' of its manifest")
            layers[index][name] = tensor
    if tensors:
        raise StateRecordError(f"the saved state holds tensors that its manifest does not name: {sorted(tensors)}")
    return layers


def _check_layers(layers: Sequence[Mapping[str, Tensor]], expected: Sequence[LayerSpec]) -> None:
    if len(layers) != len(expected):
        raise StateRecordError(f"the saved state has {len(layers)} layers, {len(expected)} are needed")
    for index, (layer, specs) in enumerate(zip(layers, expected)):
        if layer.keys() != specs.keys():
            missing, extra = sorted(specs.keys() - layer.keys()), sorted(layer.keys() - specs.keys())
            raise StateRecordError(f"layer {index} of the saved state: missing {missing}, unknown {extra}")
        for name, spec in specs.items():
            if not spec.fits(layer[name]):
                raise StateRecordError(
                    f"layer {index} of the saved state: '{name}' is {_describe(layer[name])}, needed is "
                    f"{[str(spec.dtype).removeprefix('torch.'), list(spec.shape)]}"
                )
