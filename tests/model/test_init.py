"""Initial weights: the same for the same seed, and what `model/init.py` promises about the start."""

from __future__ import annotations

import math

import pytest
import torch

from moonlet.config import resolve_model
from moonlet.model.gated_mla import GatedMLA
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.model.kda import KimiDeltaAttention
from moonlet.ops.kda import kda_gate


def build(seed: int = 0, **changes) -> K3:
    model = K3(resolve_model({"preset": "nano", **changes}))
    init_weights(model, seed)
    return model


def test_a_seed_decides_every_number():
    first, again, other = build(1).state_dict(), build(1).state_dict(), build(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_first_loss_is_that_of_a_guess():
    model = build()
    ids = torch.randint(0, 2000, (1, 256), generator=torch.Generator().manual_seed(0))
    logits = model(ids)[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert float(loss) == pytest.approx(math.log(2048), abs=0.4)


def test_depth_mixes_start_as_averages_and_padding_as_zero():
    model = build()
    for name, parameter in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            assert float(parameter.abs().max()) == 0
    assert float(model.model.embed_tokens.weight[model.config.pad_token_id].abs().max()) == 0


def test_decay_spans_short_and_long_memories():
    layer = next(m for m in build().modules() if isinstance(m, KimiDeltaAttention))
    zero = torch.zeros(1, 1, layer.num_heads, layer.head_dim)
    decay = kda_gate(zero, layer.A_log, layer.dt_bias.view(layer.num_heads, layer.head_dim), layer.lower_bound)
    memory = (-1 / decay).flatten()
    assert float(memory.min()) < 10 and float(memory.max()) > 4096


def test_attention_starts_as_a_comparison():
    model = build()
    kda = next(m for m in model.modules() if isinstance(m, KimiDeltaAttention))
    assert torch.equal(kda.k_proj.weight, kda.q_proj.weight)
    mla = next(m for m in model.modules() if isinstance(m, GatedMLA))
    latent = torch.randn(1, 1, mla.latent_dim)
    queries = mla.q_b_proj(latent).unflatten(-1, (mla.num_heads, -1))[..., : mla.nope_dim]
    keys = mla.kv_b_proj(latent).unflatten(-1, (mla.num_kv_heads, -1))[..., : mla.nope_dim]
    torch.testing.assert_close(queries, keys)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": "none"},
        {"q_lora_rank": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"linear_attn_config": {"short_conv_kernel_size": 1}},
    ],
    ids=str,
)
def test_every_variant_is_filled(changes):
    model = build(**changes)
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name
    assert bool(model(torch.randint(0, 2000, (1, 20))).isfinite().all())
