"""Decoding with a state equals the forward pass of training, far beyond the windows that were trained on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moonlet.eval.samples import PREFILL_TOKENS, Continuation
from moonlet.model.k3 import K3
from moonlet.train.restore import load_model_for_inference

POSITIONS = (0, 2047, 8191)
LAYERS_WITH_ATTENTION = {"kda": (), "hybrid": (4,)}


def _ids(model: K3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size - 16, (1, POSITIONS[-1] + 1), generator=generator)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(params=[*LAYERS_WITH_ATTENTION, "after a change of context stage"])
def decoder(request: pytest.FixtureRequest, new_model) -> K3:
    if request.param in LAYERS_WITH_ATTENTION:
        return new_model(full_attn_layers=LAYERS_WITH_ATTENTION[request.param])
    return load_model_for_inference(request.getfixturevalue("run"))[0]


def test_decode_equals_training_at_far_positions(decoder: K3) -> None:
    ids = _ids(decoder)
    trained = decoder(ids)[0].detach()  # with gradients: the path that training takes
    text, read = Continuation(decoder), 0
    for position in POSITIONS:
        # All but the last token in pieces, the last one as a single step.
        for end in filter(None, (position, position + 1)):
            text.add(ids[0, read:end].tolist())
            logits, read = text.next_logits(), end
        assert _distance(logits, trained[position]) < 1e-5


def test_a_prompt_in_pieces_equals_the_prompt_at_once(decoder: K3) -> None:
    ids = _ids(decoder)
    with torch.inference_mode():
        whole, state = decoder(ids), decoder.new_state(1)
        pieces = torch.cat([decoder(piece, state=state) for piece in ids.split(PREFILL_TOKENS, dim=1)], dim=1)
    assert state.length == ids.shape[1]
    assert _distance(pieces, whole) < 1e-5
    assert float((pieces - whole).norm(dim=-1).amax() / whole.norm(dim=-1).mean()) < 1e-4
