"""A whole decode state in a file: written whole or not at all, read back only by the model and the weights that made it.

B sequences, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonlet.errors import StateRecordError, StorageError
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState, KDAState, MLAState
from moonlet.serve.state_record import LayerSpec, StateRecord, TensorSpec, pack, read_manifest, specs_of, unpack

_KDA_NAMES = ("recurrent", "conv_q", "conv_k", "conv_v")
_OPEN_NAMES = ("open_q", "open_k", "open_v", "open_g", "open_beta", "open_fill")


def save_state(path: Path, state: DecodeState, *, model_id: str) -> None:
    """Write a whole decode state to a file, by a rename when all of it is on the disk.

    Raises:
        ValueError: its layers disagree about the number of tokens, or keep them in pages of a pool.
        StorageError: the file cannot be written; one that was there before is as it was.
    """
    layers = [_layer_tensors(layer, state.length) for layer in state.layers]
    _write_whole(path, pack(StateRecord("decode_state", state.length, state.weights_version, model_id, layers)))


def load_state(path: Path, model: K3, *, model_id: str, weights_version: int = 0) -> DecodeState:
    """The decode state in a file, ready for the next token of `model`, on the device of its weights.

    Args:
        model_id, weights_version: those of `model` now; a state of others is refused.
    Raises:
        StateRecordError: the file is no whole record, or one of another model or of other weights.
        StorageError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read the saved state '{path}': {error}") from error
    try:
        expected = _expected_layers(model, read_manifest(data)[0])
        record = unpack(data, expect_weights_version=weights_version, expect_model_id=model_id, expect_layers=expected)
    except StateRecordError as error:
        raise StateRecordError(f"'{path}': {error}") from error
    device = model.output_weight.device
    return DecodeState(
        [_layer_of({name: x.to(device) for name, x in tensors.items()}) for tensors in record.layers],
        record.length,
        record.weights_version,
    )


def _layer_tensors(layer: Any, length: int) -> dict[str, Tensor]:
    if isinstance(layer, KDAState):
        return dict(zip((*_KDA_NAMES, *_OPEN_NAMES), layer.tensors()))
    if not isinstance(layer, MLAState):
        raise ValueError(f"a {type(layer).__name__} keeps its rows in a pool: copy the sequence out, then save it")
    if layer.length != length:
        raise ValueError(f"a layer holds {layer.length} rows after {length} tokens: save between two steps")
    return {"mla": layer.rows[:, :length]}


def _layer_of(tensors: dict[str, Tensor]) -> KDAState | MLAState:
    if "mla" in tensors:
        return MLAState(tensors["mla"], tensors["mla"].shape[1])
    return KDAState.of_tensors([tensors[name] for name in (*_KDA_NAMES, *_OPEN_NAMES) if name in tensors])


def _expected_layers(model: K3, manifest: dict[str, Any]) -> list[dict[str, TensorSpec]]:
    """What `model` needs of a state after as many tokens; batch size and form (open chunk or not) are the writer's."""
    first = next((layer for layer in manifest["layers"] if layer), None)
    if manifest["kind"] != "decode_state" or first is None:
        raise StateRecordError(f"the record is a '{manifest['kind']}' and not a whole decode state")
    batch = next(iter(first.values()))[1][0]
    has_open_chunk = any(_OPEN_NAMES[0] in layer for layer in manifest["layers"])
    expected = []
    for layer in model.new_state(batch).layers:
        if isinstance(layer, MLAState):
            expected.append({"mla": TensorSpec((batch, manifest["length"], layer.rows.shape[2]), layer.rows.dtype)})
        else:
            (specs,) = specs_of([_layer_tensors(layer, 0)])
            expected.append(specs | (_open_specs(specs) if has_open_chunk else {}))
    return expected


def _open_specs(specs: LayerSpec) -> dict[str, TensorSpec]:
    """Inputs of the open chunk beside a recurrent state [B, H, K, V]: any number of places, in float32."""
    batch, heads, key_dim, value_dim = specs["recurrent"].shape
    shapes = [(key_dim,), (key_dim,), (value_dim,), (key_dim,), ()]
    rows = {name: TensorSpec((batch, None, heads, *shape), torch.float32) for name, shape in zip(_OPEN_NAMES, shapes)}
    return rows | {_OPEN_NAMES[-1]: TensorSpec((batch,), torch.int64)}


def _write_whole(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise StorageError(f"cannot save the state as '{path}': {error}") from error
