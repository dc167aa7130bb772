"""Records of model state: what goes in comes out bit for bit, and nothing else comes out (bugs.md B58, B60)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonlet.errors import StateRecordError
from moonlet.serve.state_record import StateRecord, TensorSpec, pack, read_manifest, specs_of, unpack


def sample(open_chunk: bool = False) -> StateRecord:
    """Two KDA layers and an MLA layer, with odd values: bfloat16, NaN with a payload, -0.0, infinities."""
    generator = torch.Generator().manual_seed(1)

    def kda() -> dict[str, Tensor]:
        recurrent = torch.randn(2, 4, 4, generator=generator)
        recurrent[0, 0] = torch.tensor([0x7FC01234, -0x80000000, 0x7F800000, 1], dtype=torch.int32).view(torch.float32)
        layer = {"recurrent": recurrent}
        layer |= {f"conv_{name}": torch.randn(8, 4, generator=generator).bfloat16() for name in "qkv"}
        return layer | ({"open_beta": torch.zeros(16, 2), "open_fill": torch.tensor([3])} if open_chunk else {})

    rows = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return StateRecord("checkpoint", 5, 7, "a model", [kda(), kda(), {"mla": rows}])


def read(data: bytes, record: StateRecord) -> StateRecord:
    return unpack(
        data,
        expect_weights_version=record.weights_version,
        expect_model_id=record.model_id,
        expect_layers=specs_of(record.layers),
    )


def bits(layers: list[dict[str, Tensor]]) -> list[dict[str, tuple]]:
    return [
        {name: (x.dtype, tuple(x.shape), x.contiguous().flatten().view(torch.uint8).tolist()) for name, x in y.items()}
        for y in layers
    ]


def resealed(manifest: dict, payload: bytes) -> bytes:
    """A record with a valid checksum around any manifest: what a writer with a bug would leave."""
    described = json.dumps(manifest).encode()
    rest = len(described).to_bytes(8, "little") + described + payload
    return b"MOONSTAT" + hashlib.sha256(rest).digest() + rest


@pytest.mark.parametrize("open_chunk", [False, True])
def test_a_record_comes_back_bit_for_bit(open_chunk: bool) -> None:
    record = sample(open_chunk)
    back = read(pack(record), record)
    assert bits(back.layers) == bits(record.layers)
    assert replace(back, layers=[]) == replace(record, layers=[])


def test_pieces_of_one_pool_and_empty_pieces_come_back() -> None:
    """Pages are slices of a shared pool, some of them strided or empty: the record owns what it holds."""
    pool = torch.arange(24.0).reshape(4, 6)
    record = StateRecord("page", 2, 0, "m", [{"mla": pool[:2]}, {"mla": pool[1:3]}, {"mla": pool[:, ::2]}, {}])
    record.layers.append({"mla": pool[:0]})
    data = pack(record)
    pool.zero_()
    back = read(data, record).layers
    want = torch.arange(24.0).reshape(4, 6)
    for got, expected in zip(back, (want[:2], want[1:3], want[:, ::2])):
        assert torch.equal(got["mla"], expected)
    assert back[3] == {} and back[4]["mla"].shape == (0, 6)


def test_equal_records_give_equal_bytes() -> None:
    record, other = sample(), sample()
    other.layers = [dict(reversed(layer.items())) for layer in other.layers]
    assert pack(record) == pack(other)


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8),
            st.tuples(
                st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
                st.lists(st.integers(0, 3), max_size=4),
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    st.integers(0, 2**40),
    st.integers(-5, 2**40),
    st.text(max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_any_record_comes_back(layers: list[dict], length: int, version: int, model_id: str) -> None:
    tensors = [{name: torch.full(shape, 3).to(dtype) for name, (dtype, shape) in layer.items()} for layer in layers]
    record = StateRecord("piece", length, version, model_id, tensors)
    back = read(pack(record), record)
    assert bits(back.layers) == bits(tensors)
    assert (back.length, back.weights_version, back.model_id) == (length, version, model_id)


@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
def test_every_flipped_byte_is_found(flip: int) -> None:
    record = StateRecord("c", 1, 2, "m", [{"mla": torch.ones(1, 2)}, {"recurrent": torch.zeros(1)}])
    data = pack(record)
    read(data, record)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= flip
        with pytest.raises(StateRecordError):
            read(bytes(damaged), record)


def test_every_cut_is_found() -> None:
    record = StateRecord("c", 1, 2, "m", [{"mla": torch.ones(1, 2)}])
    data = pack(record)
    for cut in [*(data[:size] for size in range(len(data))), data + b"\0", data[1:]]:
        with pytest.raises(StateRecordError):
            read(cut, record)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, b"MOONSTAT" + hashlib.sha256(noise).digest() + noise):
        with pytest.raises(StateRecordError):
            unpack(data, expect_weights_version=0, expect_model_id="m", expect_layers=[])


def test_other_weights_and_other_models_are_refused() -> None:
    record = sample()
    data = pack(record)
    with pytest.raises(StateRecordError, match="version 7 of the weights, not with 8"):
        read(data, replace(record, weights_version=8))
    with pytest.raises(StateRecordError, match="of model 'a model', not of 'another'"):
        read(data, replace(record, model_id="another"))


@pytest.mark.parametrize(
    ("layer", "name"), [(0, "recurrent"), (0, "conv_q"), (1, "conv_k"), (1, "conv_v"), (0, "open_fill"), (2, "mla")]
)
def test_a_record_without_any_one_tensor_is_refused(layer: int, name: str) -> None:
    """One layer's state left out still decodes to fluent text; it must not be readable at all."""
    whole, lacking = sample(open_chunk=True), sample(open_chunk=True)
    del lacking.layers[layer][name]
    with pytest.raises(StateRecordError, match=rf"layer {layer} .*missing \['{name}'\]"):
        read(pack(lacking), whole)
    with pytest.raises(StateRecordError, match=rf"layer {layer} .*unknown \['{name}'\]"):
        read(pack(whole), lacking)


def test_a_record_without_a_layer_is_refused() -> None:
    record = sample()
    with pytest.raises(StateRecordError, match="2 layers, 3 are needed"):
        read(pack(replace(record, layers=record.layers[:2])), record)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((5, 7), torch.float64),
        TensorSpec((5,), torch.float64),
        TensorSpec((5, 6, 1), torch.float64),
        TensorSpec((4, None), torch.float64),
        TensorSpec((5, 6), torch.float32),
    ],
)
def test_another_shape_or_dtype_is_refused(spec: TensorSpec) -> None:
    record = sample()
    expected = [*specs_of(record.layers[:2]), {"mla": spec}]
    with pytest.raises(StateRecordError, match=r"layer 2 .*'mla' is "):
        unpack(pack(record), expect_weights_version=7, expect_model_id="a model", expect_layers=expected)


def test_a_size_of_none_is_any() -> None:
    record = sample()
    expected = [*specs_of(record.layers[:2]), {"mla": TensorSpec((None, 6), torch.float64)}]
    back = unpack(pack(record), expect_weights_version=7, expect_model_id="a model", expect_layers=expected)
    assert back.layers[2]["mla"].shape == (5, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(format=2),
        lambda manifest: manifest.pop("model_id"),
        lambda manifest: manifest["layers"][0].pop("mla"),
        lambda manifest: manifest["layers"][0].update(more=["float32", [1]]),
        lambda manifest: manifest["layers"][0].update(mla=["float32", [2, 1]]),
    ],
    ids=["format", "field", "unnamed tensor", "absent tensor", "shape"],
)
def test_a_manifest_that_disagrees_with_its_tensors_is_refused(change: Callable[[dict], object]) -> None:
    record = StateRecord("c", 1, 2, "m", [{"mla": torch.ones(1, 2)}])
    manifest, payload = read_manifest(pack(record))
    change(manifest)
    with pytest.raises(StateRecordError):
        read(resealed(manifest, payload), record)


def test_a_negative_length_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="-1 tokens"):
        pack(StateRecord("c", -1, 0, "m", []))
