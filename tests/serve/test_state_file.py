"""A decode state in a file: another process goes on from it, and no other model or weights do (bugs.md B58, B60)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonlet.config import resolve_model
from moonlet.errors import StateRecordError, StorageError
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.model.state import DecodeState, KDAState, MLAState
from moonlet.serve.state_file import load_state, save_state
from moonlet.serve.state_record import StateRecord, compute_model_id, pack

ROOT = Path(__file__).resolve().parents[2]


def make_model(seed: int = 0) -> K3:
    model = K3(resolve_model({"preset": "nano"})).eval()
    init_weights(model, seed)
    return model


@pytest.fixture(scope="module")
def model() -> K3:
    return make_model()


@pytest.fixture(scope="module")
def model_id(model: K3) -> str:
    return compute_model_id(model)


PROMPT = [[5, 9, 2, 800, 31, 7, 7, 1200, 4, 88, 19], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def prefill(model: K3, prompt: list[list[int]] = PROMPT) -> tuple[DecodeState, Tensor]:
    """State after the prompts, and their next tokens, which the state has not seen."""
    state = model.new_state(len(prompt))
    with torch.inference_mode():
        return state, model(torch.tensor(prompt), state=state)[:, -1].argmax(-1)


def decode(model: K3, state: DecodeState, token_B: Tensor, count: int = 8) -> list[list[int]]:
    """Greedy tokens from the hand-off token on, each fed once."""
    tokens = []
    with torch.inference_mode():
        for _ in range(count):
            token_B = model(token_B.unsqueeze(1), state=state)[:, -1].argmax(-1)
            tokens.append(token_B.tolist())
    return tokens


def test_a_loaded_state_is_the_saved_one(model: K3, model_id: str, tmp_path: Path) -> None:
    state, _ = prefill(model)
    save_state(tmp_path / "state", state, model_id=model_id)
    back = load_state(tmp_path / "state", model, model_id=model_id)
    assert (back.length, back.weights_version, back.batch_size) == (11, 0, 2)
    assert [type(layer) for layer in back.layers] == [type(layer) for layer in state.layers]
    for ours, theirs in zip(state.layers, back.layers):
        if isinstance(ours, MLAState) and isinstance(theirs, MLAState):
            assert theirs.length == 11 and torch.equal(ours.rows[:, :11], theirs.rows)
        if isinstance(ours, KDAState) and isinstance(theirs, KDAState):
            assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


_GO_ON = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[3])
from test_state_file import decode, load_state, make_model
from moonlet.serve.state_record import compute_model_id

model = make_model()
state = load_state(Path(sys.argv[1]), model, model_id=compute_model_id(model))
before = state.length
tokens = decode(model, state, torch.tensor(json.loads(sys.argv[2])))
print(json.dumps([before, state.length, tokens]))
"""


def test_another_process_goes_on_with_the_same_tokens(model: K3, model_id: str, tmp_path: Path) -> None:
    """The hand-off token is fed once, by whoever goes on: the state's length says which one is next."""
    state, next_B = prefill(model)
    save_state(tmp_path / "state", state, model_id=model_id)
    done = subprocess.run(
        [sys.executable, "-c", _GO_ON, tmp_path / "state", json.dumps(next_B.tolist()), Path(__file__).parent],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [11, 19, decode(model, state, next_B)]


def test_a_state_with_an_open_chunk_comes_back(model: K3, model_id: str, tmp_path: Path) -> None:
    state = model.new_state(1)
    for layer, module in zip(state.layers, model.model.layers):
        if isinstance(layer, KDAState):
            layer.open = module.self_attn.new_state(1, replay=True).open  # type: ignore[union-attr]
    with torch.inference_mode():
        token_B = model(torch.tensor(PROMPT[:1]), state=state)[:, -1].argmax(-1)
    save_state(tmp_path / "state", state, model_id=model_id)
    back = load_state(tmp_path / "state", model, model_id=model_id)
    first = back.layers[0]
    assert isinstance(first, KDAState) and first.open is not None and first.open.fill_B.tolist() == [11]
    assert decode(model, back, token_B) == decode(model, state, token_B)


def test_a_state_of_other_weights_is_refused(model: K3, model_id: str, tmp_path: Path) -> None:
    state, _ = prefill(model)
    save_state(tmp_path / "state", state, model_id=model_id)
    other = make_model(seed=1)
    with pytest.raises(StateRecordError, match="not of"):
        load_state(tmp_path / "state", other, model_id=compute_model_id(other))
    with pytest.raises(StateRecordError, match="version 0 of the weights, not with 1"):
        load_state(tmp_path / "state", model, model_id=model_id, weights_version=1)


def test_a_state_of_another_architecture_is_refused(model: K3, tmp_path: Path) -> None:
    """Even where somebody gives two models one name."""
    state, _ = prefill(model)
    save_state(tmp_path / "state", state, model_id="same")
    narrower = K3(resolve_model({"preset": "nano", "kv_lora_rank": 32})).eval()
    with pytest.raises(StateRecordError, match="'mla' is"):
        load_state(tmp_path / "state", narrower, model_id="same")


def test_a_damaged_or_absent_file_is_refused(model: K3, model_id: str, tmp_path: Path) -> None:
    state, _ = prefill(model)
    save_state(tmp_path / "state", state, model_id=model_id)
    data = bytearray((tmp_path / "state").read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "state").write_bytes(data)
    with pytest.raises(StateRecordError, match="checksum"):
        load_state(tmp_path / "state", model, model_id=model_id)
    with pytest.raises(StorageError, match="cannot read"):
        load_state(tmp_path / "nothing", model, model_id=model_id)


def test_a_piece_is_no_decode_state(model: K3, tmp_path: Path) -> None:
    (tmp_path / "piece").write_bytes(pack(StateRecord("page", 4, 0, "m", [{"mla": torch.ones(4, 96)}])))
    with pytest.raises(StateRecordError, match="'page' and not a whole decode state"):
        load_state(tmp_path / "piece", model, model_id="m")


def test_a_state_in_the_middle_of_a_step_is_not_saved(model: K3, tmp_path: Path) -> None:
    state, _ = prefill(model)
    state.length += 1
    with pytest.raises(ValueError, match="11 rows after 12 tokens"):
        save_state(tmp_path / "state", state, model_id="m")


def test_a_failed_save_leaves_the_older_file(model: K3, model_id: str, tmp_path: Path) -> None:
    state, _ = prefill(model)
    with pytest.raises(StorageError, match="cannot save"):
        save_state(tmp_path / "absent" / "state", state, model_id=model_id)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    with pytest.raises(StorageError, match="cannot save"):
        save_state(tmp_path / "folder", state, model_id=model_id)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_the_model_id_knows_every_weight(model: K3, model_id: str) -> None:
    assert compute_model_id(make_model()) == model_id
    other = make_model()
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[0, 0] += 1e-3  # type: ignore[union-attr]
    assert compute_model_id(other) != model_id
