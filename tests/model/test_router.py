"""The router's balancing in the model (cases/bugs.md B23 to B28): tokens count once, the bias moves once a step."""

from __future__ import annotations

import pytest
import torch

from moonlet.config import resolve_model
from moonlet.model.router import Router
from moonlet.ops.quantile_balancing import max_violation
from tests.model.test_packing import tiny


def skewed_router(method: str = "histogram") -> tuple[Router, torch.Tensor]:
    """4096 tokens, 64 experts, k = 4, a few experts far ahead."""
    config = resolve_model({"preset": "nano", "num_experts": 64, "num_experts_per_token": 4})
    router = Router(config).train()
    router.method = method
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(64, config.hidden_size, generator=generator) / config.hidden_size**0.5)
        router.weight[:, 0] += 1.5 * torch.randn(64, generator=generator)
    x = torch.randn(4096, config.hidden_size, generator=generator)
    x[:, 0] = 1
    return router, x


def step(router: Router, *batches: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    for batch in batches:
        router(batch, valid)
        router.collect()
    return router.update()


@pytest.mark.parametrize("method", ["histogram", "exact"])
def test_one_update_levels_a_skewed_router_and_it_stays_level(method):
    router, x = skewed_router(method)
    violations = [max_violation(step(router, x)) for _ in range(6)]
    assert violations[0] > 8
    assert max(violations[1:]) < 0.5


@pytest.mark.parametrize("method", ["histogram", "exact"])
def test_micro_batches_and_padding_do_not_move_the_bias(method):
    biases = []
    for parts, padding in ((1, 0), (8, 0), (1, 0.3), (4, 0.3)):
        router, x = skewed_router(method)
        num_padding = int(len(x) * padding)
        rows = torch.cat([x, torch.full((num_padding, x.shape[1]), 3.0)])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        valid = (torch.arange(len(rows)) < len(x))[order]
        for part, mask in zip(rows[order].chunk(parts), valid.chunk(parts)):
            router(part, mask)
            router.collect()
        assert int(router.load_per_expert.sum()) == len(x) * 4
        router.update()
        biases.append(router.e_score_correction_bias.clone())
    assert all(torch.equal(bias, biases[0]) for bias in biases[1:])


def test_histogram_mass_is_tokens_times_experts():
    router, x = skewed_router()
    router(x[:100])
    router.collect()
    assert int(router._histogram.sum()) == 100 * 64


def test_evaluation_counts_nothing_and_leaves_the_bias():
    router, x = skewed_router()
    router.eval()
    assert int(step(router, x).sum()) == 0
    assert float(router.e_score_correction_bias.abs().max()) == 0


def test_counts_with_recomputation_equal_those_without():
    loads = []
    for checkpointing in (False, True):
        model = tiny().train()
        model.activation_checkpointing = checkpointing
        ids = torch.randint(0, 240, (2, 30), generator=torch.Generator().manual_seed(0))
        model(ids).square().mean().backward()
        model.collect_routing()
        loads.append(torch.stack([router.load_per_expert for router in model.routers().values()]))
    assert torch.equal(*loads)
    assert int(loads[0][0].sum()) == 60 * 4


def test_padding_tokens_are_not_counted():
    model = tiny().train()
    ids = torch.randint(0, 240, (1, 30), generator=torch.Generator().manual_seed(0))
    ids[0, 20:] = model.config.pad_token_id
    model(ids)
    model.collect_routing()
    assert all(int(router.load_per_expert.sum()) == 20 * 4 for router in model.routers().values())


def test_a_layer_without_balancing_does_not_stop_the_others():
    model = tiny().train()
    routers = list(model.routers().values())
    routers[1].method = "off"
    model(torch.randint(0, 240, (4, 60), generator=torch.Generator().manual_seed(0)))
    model.collect_routing()
    model.update_balance()
    moved = [bool(router.e_score_correction_bias.abs().max() > 0) for router in routers]
    assert moved == [True, False, True]
    assert all(int(router.load_per_expert.sum()) == 0 for router in routers)


def test_training_and_evaluation_select_the_same_experts():
    router, x = skewed_router()
    step(router, x)
    chosen = router.train()(x[:1000]).indices_NK
    assert torch.equal(chosen, router.eval()(x[:1000]).indices_NK)


def test_forced_routing_agreement_and_parity():
    """Two models that differ by rounding: with routing replayed their outputs agree (B12)."""
    model = tiny().eval()
    ids = torch.randint(0, 240, (1, 64), generator=torch.Generator().manual_seed(0))
    chosen = {}
    for index, layer in enumerate(model.model.layers):
        if layer.is_moe:
            layer.block_sparse_moe.gate.register_forward_hook(
                lambda _m, _i, out, key=index: chosen.__setitem__(key, out.indices_NK)
            )
    with torch.no_grad():
        first = model(ids)
        replay = dict(chosen)
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
        unforced = model(ids)
        agreement = torch.stack(
            [(chosen[key].sort(1).values == replay[key].sort(1).values).float().mean() for key in replay]
        ).mean()
        forced = model(ids, forced_routing=replay)
    divergence = torch.nn.functional.kl_div(forced[0].log_softmax(-1), first[0].softmax(-1), reduction="batchmean")
    assert abs(float(divergence)) < 1e-6
    assert 0.9 < float(agreement) <= 1
    assert unforced.shape == first.shape
