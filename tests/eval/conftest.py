"""Tiny models for the measuring tests: random weights, every kind of layer, a vocabulary of bytes and specials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_run

from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.text.tokenizer import Tokenizer, train_tokenizer

VOCAB = 320
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "pad_token_id": VOCAB - 1,
    "bos_token_id": VOCAB - 16,
    "eos_token_id": VOCAB - 14,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
}


def build_model(full_attn_layers: tuple[int, ...] = (4,), seed: int = 0, **changes: Any) -> K3:
    kda_layers = [layer for layer in range(1, 5) if layer not in full_attn_layers]
    linear = {"head_dim": 16, "full_attn_layers": list(full_attn_layers), "kda_layers": kda_layers}
    model = K3(resolve_model({"preset": "nano", **SMALL, "linear_attn_config": linear, **changes}))
    init_weights(model, seed)
    # Larger than trained models start with, so that predictions differ visibly from place to place.
    with torch.no_grad():
        model.output_weight.mul_(10)
    return model.eval()


@pytest.fixture(scope="session")
def new_model() -> Callable[..., K3]:
    return build_model


@pytest.fixture(scope="session")
def model() -> K3:
    return build_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    texts = ["def add(a, b):\n    return a + b\n", "for word in words:\n    print(word)\n", "Grüße, 你好, 🌙\n"] * 3
    return train_tokenizer(texts, VOCAB)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of two context stages; tests that change it take a copy."""
    return trained_run.make(tmp_path_factory.mktemp("trained"))
