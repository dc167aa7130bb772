"""Whole text models against the golden vectors: full, cached, chunked, padded, gradients. Cases come from the folder."""

from __future__ import annotations

import pytest
import torch
from conftest import golden_stems
from golden_weights import load_tensors

from moonlet.config import ModelConfig
from moonlet.model.attn_residuals import DepthTrace
from moonlet.model.k3 import K3
from moonlet.model.state import KDAState

LOGITS = {"atol": 2e-4, "rtol": 0}
TEXT_MODELS = [stem for stem in golden_stems("g_*")]


class Case:
    """A golden text model with its run."""

    def __init__(self, golden, stem: str) -> None:
        if stem == "absent":
            pytest.skip("no g_* golden files")
        self.info = golden.info(stem)
        self.run = golden.tensors(stem, "run")
        self.model = K3(ModelConfig.parse(self.info["config"], stem))
        parameters = golden.tensors(stem, "param")
        weights = golden.folder / f"{stem}.weights.safetensors"
        if weights.exists():
            parameters = golden.tensors(f"{stem}.weights")
        load_tensors(self.model, parameters)
        self.model.eval()
        self.ids = self.run["input_ids"]


@pytest.fixture(params=TEXT_MODELS)
def case(request, golden):
    return Case(golden, request.param)


@pytest.mark.parametrize("form", ["plain", "two_phase"])
def test_logits(case, form):
    case.model.depth_form = form
    torch.testing.assert_close(case.model(case.ids), case.run["logits"], **LOGITS)


def test_the_running_sum_after_each_layer(case):
    trace = DepthTrace()
    case.model(case.ids, trace=trace)
    torch.testing.assert_close(torch.stack(trace.sums), case.run["layer_prefix_sums"], **LOGITS)


@pytest.mark.parametrize("grad", [False, True])
def test_one_token_at_a_time(case, grad):
    with torch.set_grad_enabled(grad):
        state = case.model.new_state(case.ids.shape[0])
        steps = [case.model(case.ids[:, t : t + 1], state=state) for t in range(case.ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), case.run["step_logits_from_token0"], **LOGITS)


@torch.no_grad()
def test_prefill_chunk_then_steps_and_the_caches_they_leave(case):
    length, prefill = case.ids.shape[1], case.info["run"]["prefill"]
    state = case.model.new_state(case.ids.shape[0])
    middle = (prefill + length) // 2
    pieces = [case.ids[:, :prefill], case.ids[:, prefill:middle], *case.ids[:, middle:].split(1, dim=1)]
    logits = torch.cat([case.model(piece, state=state) for piece in pieces if piece.shape[1]], 1)
    torch.testing.assert_close(logits, case.run["prefill_chunk_step_logits"], **LOGITS)
    assert state.length == length
    check_caches(case, state)


def check_caches(case, state):
    layers = {int(name.split("/")[1]) for name in case.run if name.startswith("cache/")}
    assert layers == set(range(len(state.layers)))
    for index, layer in enumerate(state.layers):
        cache = {name.split("/")[2]: value for name, value in case.run.items() if name.startswith(f"cache/{index}/")}
        if isinstance(layer, KDAState):
            # released caches keep the value dim first
            torch.testing.assert_close(layer.recurrent.transpose(-1, -2), cache["recurrent"], **LOGITS)
            for name in ("conv_q", "conv_k", "conv_v"):
                torch.testing.assert_close(getattr(layer, name), cache[name], **LOGITS)
        else:
            rows = layer.rows[:, : layer.length]
            key, value = case.model.model.layers[index].self_attn.expand(rows)
            torch.testing.assert_close(key.transpose(1, 2), cache["key"], **LOGITS)
            torch.testing.assert_close(value.transpose(1, 2), cache["value"], **LOGITS)
            assert rows.numel() * 2 < cache["key"].numel() + cache["value"].numel(), "latents, not expanded keys"


def test_left_padded_batch(case):
    mask = case.run["leftpad/attention_mask"]
    logits = case.model(case.run["leftpad/input_ids"], attention_mask=mask)
    valid = mask.bool()
    torch.testing.assert_close(logits[valid], case.run["leftpad/logits"][valid], **LOGITS)


def test_packed_rows_equal_separate_rows(case):
    rows = [row.unsqueeze(0) for row in case.ids] + [case.ids[:1, :5], case.ids[:1, :1]]
    lengths = tuple(row.shape[1] for row in rows)
    packed = case.model(torch.cat(rows, 1), seq_lens=lengths)
    alone = torch.cat([case.model(row) for row in rows], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients(case, checkpointing, golden):
    if "loss" not in case.run:
        pytest.skip("this vector has no loss")
    case.model.train()
    case.model.activation_checkpointing = checkpointing
    logits = case.model(case.ids)
    labels = case.run["labels"]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, case.run["loss"].squeeze(), atol=2e-5, rtol=1e-5)
    loss.backward()
    found = released_gradients(case.model)
    for name, norm in case.info["run"]["grad_norms"].items():
        grad = found.get(name)  # the bias is a buffer: it has none
        if norm is None:
            assert grad is None or float(grad.norm()) == 0, name
        else:
            assert float(grad.norm()) == pytest.approx(norm, rel=1e-3, abs=1e-7), name
    full = {name.removeprefix("grad/"): value for name, value in case.run.items() if name.startswith("grad/")}
    assert full, "the vector promises some full gradients"
    for name, value in full.items():
        torch.testing.assert_close(found[name.removeprefix("param.")], value, atol=2e-4, rtol=1e-3)
    assert float(case.model.model.embed_tokens.weight.grad[case.model.config.pad_token_id].norm()) == 0


def released_gradients(model: K3) -> dict[str, torch.Tensor | None]:
    """Gradients under released names: stacked experts taken apart."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.w13"):
            inner = parameter.shape[1] // 2
            for expert, grad in enumerate(parameter.grad):
                found[name.replace("w13", f"{expert}.w1.weight")] = grad[:inner]
                found[name.replace("w13", f"{expert}.w3.weight")] = grad[inner:]
        elif name.endswith("experts.w2"):
            for expert, grad in enumerate(parameter.grad):
                found[name.replace("w2", f"{expert}.w2.weight")] = grad
        else:
            found[name] = parameter.grad
    return found
