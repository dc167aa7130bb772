"""Layers against the golden vectors: KDA (b), Gated MLA (c), LatentMoE (d), the depth stack (f)."""

from __future__ import annotations

import torch
from golden_weights import load_tensors
from torch import nn

from moonlet.config import ModelConfig
from moonlet.model.attn_residuals import DepthTrace
from moonlet.model.gated_mla import GatedMLA
from moonlet.model.k3 import K3
from moonlet.model.kda import KimiDeltaAttention
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.mlp import MLP
from moonlet.model.padding import repad, unpad

CLOSE = {"atol": 5e-6, "rtol": 1e-5}
GRAD = {"atol": 2e-5, "rtol": 1e-4}


def build(golden, stem: str, kind: type[nn.Module]) -> nn.Module:
    config = ModelConfig.parse(golden.info(stem)["config"], stem)
    module = kind(config)
    load_tensors(module, golden.tensors(stem, "param"))
    return module.eval()


def check_gradients(golden, stem: str, module: nn.Module, x: torch.Tensor) -> None:
    grads = golden.tensors(stem, "grad")
    x = x.clone().requires_grad_()
    module(x).backward(grads["cotangent"])
    torch.testing.assert_close(x.grad, grads["x"], **GRAD)
    found = dict(module.named_parameters())
    for name, value in grads.items():
        if name.startswith("param.") and ".experts." not in name and not name.startswith("param.experts."):
            torch.testing.assert_close(
                found[name.removeprefix("param.")].grad, value, **GRAD, msg=lambda m, n=name: f"{n}: {m}"
            )


def run_cached(module: nn.Module, x: torch.Tensor, pieces: list[int]):
    state = module.new_state(x.shape[0])
    return torch.cat([module(piece, None, state) for piece in x.split(pieces, dim=1)], 1), state


def test_kda_layer(golden):
    stem = "b_kda_layer"
    layer, info, data = build(golden, stem, KimiDeltaAttention), golden.info(stem), golden.tensors(stem)
    x = data["full/x"]
    torch.testing.assert_close(layer(x), data["full/y"], **CLOSE)
    prefill, middle = info["splits"]["prefill"], info["splits"]["chunk_end"]
    _, state = run_cached(layer, x[:, :prefill], [prefill])
    check_kda_cache(state, golden.tensors(stem, "cache_after_prefill"))
    y, state = run_cached(layer, x, [prefill, middle - prefill, *[1] * (x.shape[1] - middle)])
    torch.testing.assert_close(y, data["cached/y"], **CLOSE)
    check_kda_cache(state, golden.tensors(stem, "cache_final"))
    check_gradients(golden, stem, layer, x)


def check_kda_cache(state, cache):
    torch.testing.assert_close(state.recurrent.transpose(-1, -2), cache["recurrent"], **CLOSE)
    for name in ("conv_q", "conv_k", "conv_v"):
        torch.testing.assert_close(getattr(state, name), cache[name], **CLOSE)


def test_kda_layer_with_a_context_shorter_than_its_window(golden):
    stem = "b_kda_layer"
    layer, short = build(golden, stem, KimiDeltaAttention), golden.tensors(stem, "short2")
    x = golden.tensors(stem)["full/x"][:, : short["y"].shape[1]]
    y, state = run_cached(layer, x, [x.shape[1]])
    torch.testing.assert_close(y, short["y"], **CLOSE)
    torch.testing.assert_close(state.recurrent.transpose(-1, -2), short["recurrent"], **CLOSE)
    torch.testing.assert_close(state.conv_q, short["conv_q"], **CLOSE)


def test_kda_layer_left_padded(golden):
    stem = "b_kda_layer"
    layer, pad = build(golden, stem, KimiDeltaAttention), golden.tensors(stem, "leftpad")
    packed, lengths = unpad(golden.tensors(stem)["full/x"], pad["attention_mask"])
    torch.testing.assert_close(repad(layer(packed, lengths), pad["attention_mask"]), pad["y"], **CLOSE)


def test_mla_layer(golden):
    stem = "c_mla_layer"
    layer, data = build(golden, stem, GatedMLA), golden.tensors(stem)
    x, prefill = data["full/x"], golden.info(stem)["prefill"]
    torch.testing.assert_close(layer(x), data["full/y"], **CLOSE)
    _, state = run_cached(layer, x[:, :prefill], [prefill])
    check_mla_cache(layer, state, golden.tensors(stem, "cache_after_prefill"))
    y, state = run_cached(layer, x, [prefill, *[1] * (x.shape[1] - prefill)])
    torch.testing.assert_close(y, data["cached/y"], **CLOSE)
    check_mla_cache(layer, state, golden.tensors(stem, "cache_final"))
    check_gradients(golden, stem, layer, x)


def check_mla_cache(layer, state, cache):
    key, value = layer.expand(state.rows[:, : state.length])
    torch.testing.assert_close(key.transpose(1, 2), cache["key"], **CLOSE)
    torch.testing.assert_close(value.transpose(1, 2), cache["value"], **CLOSE)
    assert state.rows.shape[-1] == layer.latent_dim + layer.rope_dim


def test_mla_layer_left_padded(golden):
    stem = "c_mla_layer"
    layer, pad = build(golden, stem, GatedMLA), golden.tensors(stem, "leftpad")
    mask = pad["attention_mask"]
    packed, lengths = unpad(golden.tensors(stem)["full/x"], mask)
    y = repad(layer(packed, lengths), mask)
    torch.testing.assert_close(y[mask.bool()], pad["y_valid_rows_only"][mask.bool()], **CLOSE)


def test_latent_moe(golden):
    stem = "d_latent_moe"
    layer, io = build(golden, stem, LatentMoE), golden.tensors(stem, "io")
    x = io["x"]
    flat = x.flatten(0, 1)
    routing = layer.gate(flat)
    order = routing.indices_NK.argsort(dim=1)
    assert torch.equal(routing.indices_NK.gather(1, order), io["topk_idx_sorted"])
    torch.testing.assert_close(routing.weights_NK.gather(1, order), io["topk_weight_for_sorted_idx"], **CLOSE)
    torch.testing.assert_close(layer.routed_expert_down_proj(flat), io["latent_in"], **CLOSE)
    torch.testing.assert_close(layer.shared_experts(x), io["shared_out"], **CLOSE)
    routed = layer.routed(flat, routing.indices_NK, routing.weights_NK).view_as(x)
    torch.testing.assert_close(routed, io["routed_out"], **CLOSE)
    torch.testing.assert_close(layer(x), io["y"], **CLOSE)
    layer.train()(x)
    layer.gate.collect()
    assert layer.gate.load_per_expert.tolist() == golden.info(stem)["tokens_per_expert"]
    check_gradients(golden, stem, layer.eval(), x)


def test_expert_gradients(golden):
    stem = "d_latent_moe"
    layer, grads = build(golden, stem, LatentMoE), golden.tensors(stem, "grad")
    layer(golden.tensors(stem, "io")["x"]).backward(grads["cotangent"])
    inner = layer.experts.w13.shape[1] // 2
    for name, value in grads.items():
        if name.startswith("param.experts."):
            expert, matrix = name.split(".")[2:4]
            w13 = layer.experts.w13.grad[int(expert)]
            found = {"w1": w13[:inner], "w3": w13[inner:], "w2": layer.experts.w2.grad[int(expert)]}[matrix]
            torch.testing.assert_close(found, value, **GRAD)
    for name in golden.info(stem)["params_without_grad"]:
        if name.startswith("experts."):
            assert float(layer.experts.w13.grad[int(name.split(".")[1])].abs().max()) == 0


def test_forced_routing_replays_experts_and_keeps_the_router_gradient(golden):
    layer, io = build(golden, "d_latent_moe", LatentMoE), golden.tensors("d_latent_moe", "io")
    chosen = layer.gate(io["x"].flatten(0, 1)).indices_NK
    assert torch.equal(layer(io["x"], None, chosen), layer(io["x"]))
    other = (chosen + 1) % layer.num_experts
    out = layer(io["x"], None, other)
    assert not torch.allclose(out, layer(io["x"]))
    out.sum().backward()
    assert float(layer.gate.weight.grad.abs().sum()) > 0


def test_situ_mlp(golden):
    stem = "e_situ_glu"
    part = golden.tensors(stem, "mlp")
    betas = golden.info(stem)["k3"]
    config = ModelConfig.parse(golden.info("d_latent_moe")["config"])
    config = config.model_copy(
        update={"activation_situ_beta": betas["beta"], "activation_situ_linear_beta": betas["linear_beta"]}
    )
    layer = MLP(config, part["param/gate_proj.weight"].shape[0])
    load_tensors(
        layer, {name.removeprefix("param/"): value for name, value in part.items() if name.startswith("param/")}
    )
    torch.testing.assert_close(layer(part["x"]), part["y"], **CLOSE)


def test_depth_stack(golden):
    """Every mix's sources, scores, weights and output, and every sub-layer's output."""
    stem = "f_attn_res"
    info, stack = golden.info(stem), golden.tensors(stem, "stack")
    model = K3(ModelConfig.parse(info["stack_config"], stem)).eval()
    load_tensors(model, golden.tensors(stem, "stack/param"))
    trace = DepthTrace()
    logits = model(stack["input_ids"], trace=trace)
    torch.testing.assert_close(logits, stack["logits"], atol=2e-4, rtol=0)
    assert list(trace.mixes) == [call["name"] for call in info["stack_calls"]]
    loose = {"atol": 5e-5, "rtol": 1e-4}
    for call in info["stack_calls"]:
        name, mixed = call["name"], trace.mixes[call["name"]]
        assert len(trace.sources[name]) == call["num_sources"]
        sources = torch.stack(trace.sources[name], dim=-2).flatten(0, 1)
        torch.testing.assert_close(sources, stack[f"{name}/sources"], **loose)
        torch.testing.assert_close(mixed.scores.flatten(0, 1), stack[f"{name}/scores"], **loose)
        torch.testing.assert_close(mixed.weights.flatten(0, 1), stack[f"{name}/weights"], **loose)
        torch.testing.assert_close(mixed.out.flatten(0, 1), stack[f"{name}/out"], **loose)
    for name, value in trace.sublayers.items():
        torch.testing.assert_close(value, stack[name], **loose)
