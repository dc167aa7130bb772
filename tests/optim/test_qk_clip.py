"""QK-Clip on Gated MLA: logits come back to the threshold, and nothing else changes."""

import pytest
import torch

from moonlet.config import ModelConfig, resolve_model
from moonlet.model.gated_mla import GatedMLA
from moonlet.optim.qk_clip import LogitTracker, clip_qk


def config(**changes: object) -> ModelConfig:
    sizes = {"num_attention_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    return resolve_model({"preset": "nano", **sizes, "num_key_value_heads": 4, **changes})


def attention(seed: int = 0, **changes: object) -> GatedMLA:
    layer = GatedMLA(config(**changes))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.3 if parameter.ndim > 1 else 1))
    return layer


def inputs() -> torch.Tensor:
    return torch.randn(1, 24, 128, generator=torch.Generator().manual_seed(9))


def logits(layer: GatedMLA, x: torch.Tensor) -> torch.Tensor:
    """All scores [H, T, T] by the definition, future ones -inf."""
    q, (k, _) = layer._query(x), layer.expand(layer._latent_rows(x))
    scores = torch.einsum("bthk,bshk->hts", q, k) * layer.scale
    return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"num_key_value_heads": 2}, {"qk_rope_head_dim": 0}])
@torch.no_grad()
def test_every_head_is_brought_to_the_threshold(changes: dict):
    layer, x = attention(**changes), inputs()
    before = logits(layer, x)
    maxima = before.amax((1, 2))
    threshold = maxima.sort().values[1:3].mean().item()  # two heads above it
    values_before = layer.expand(layer._latent_rows(x))[1]
    clip_qk(layer, maxima, threshold)
    gamma = (threshold / maxima).clamp(max=1)
    torch.testing.assert_close(logits(layer, x), before * gamma.view(-1, 1, 1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.expand(layer._latent_rows(x))[1], values_before)


@torch.no_grad()
def test_square_root_on_own_keys_and_the_shared_key_is_left_alone():
    layer = attention()
    query, keys = layer.q_b_proj.weight.clone(), layer.kv_b_proj.weight.clone()
    shared = layer.kv_a_proj_with_mqa.weight.clone()
    clip_qk(layer, torch.tensor([400.0, 50.0, -3.0, float("-inf")]), 100.0)
    factor_q = (layer.q_b_proj.weight / query).view(4, 12, -1)
    factor_kv = (layer.kv_b_proj.weight / keys).view(4, 14, -1)
    torch.testing.assert_close(factor_q[0, :8], torch.full_like(factor_q[0, :8], 0.5))
    torch.testing.assert_close(factor_q[0, 8:], torch.full_like(factor_q[0, 8:], 0.25))
    torch.testing.assert_close(factor_kv[0, :8], torch.full_like(factor_kv[0, :8], 0.5))
    assert bool((factor_kv[0, 8:] == 1).all() and (factor_q[1:] == 1).all() and (factor_kv[1:] == 1).all())
    assert torch.equal(layer.kv_a_proj_with_mqa.weight, shared)


@torch.no_grad()
def test_tracker_takes_the_largest_over_micro_batches():
    layer, x = attention(), inputs()
    tracker = LogitTracker(layer)
    tracker.start(True)
    for part in x.split(8, dim=1):
        layer(part)
        tracker.observe(-torch.inf)
    expected = torch.stack([logits(layer, part).amax((1, 2)) for part in x.split(8, dim=1)]).amax(0)
    torch.testing.assert_close(tracker.maxima[0], expected)
    assert tracker.largest == pytest.approx(expected.max().item())
    weight = layer.q_b_proj.weight.clone()
    tracker.clip(2 * tracker.largest)
    assert torch.equal(layer.q_b_proj.weight, weight)
    tracker.clip(0.5 * tracker.largest)
    assert not torch.equal(layer.q_b_proj.weight, weight)


@torch.no_grad()
def test_tracker_off_keeps_nothing():
    layer = attention()
    tracker = LogitTracker(layer)
    tracker.start(True)
    layer(inputs())
    tracker.stop()
    layer(inputs())
    assert layer.tracked is None
    tracker.start(False)
    layer(inputs())
    tracker.observe(100.0)
    assert layer.tracked is None and tracker.largest is None
