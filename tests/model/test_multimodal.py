"""The whole wrapper: images merged into text, against the golden vectors and its own rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import golden_stems

from moonlet.config import ModelConfig, VisionConfig
from moonlet.errors import ConfigError
from moonlet.model.gated_mla import GatedMLA
from moonlet.model.hf_layout import layout
from moonlet.model.multimodal import IGNORED, K3Multimodal, Merged, multimodal_loss

LOGITS = {"atol": 2e-4, "rtol": 2e-4}


def build(golden, stem) -> K3Multimodal:
    info, weights = golden.info(f"{stem}.weights"), golden.tensors(f"{stem}.weights")
    vision = {key: value for key, value in info["vision_config"].items() if not key.startswith("_")}
    config, vision = ModelConfig.parse(info["text_config"]), VisionConfig.parse(vision)
    model = K3Multimodal(config, vision, info["media_placeholder_token_id"])
    filled = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for entry in layout(config, vision):
            for weight in entry.weights():
                prefix = "language_model." if weight.is_text else ""
                name = prefix + weight.name + (".weight" if entry.dtype == "MXFP4" else "")
                weight.view(filled[prefix + weight.parameter]).copy_(weights.pop(name))
    assert not weights
    return model.eval()


def released_loss(model: K3Multimodal, merged: Merged, logits: torch.Tensor) -> torch.Tensor:
    """Our loss and, in left-padded rows, the term that the released loss adds: padding predicts the first token."""
    assert merged.labels_BM is not None
    mask, labels = merged.attention_mask_BM, merged.labels_BM
    terms = [multimodal_loss(logits, merged)] * int((mask[:, 1:] * mask[:, :-1] * (labels[:, 1:] != IGNORED)).sum())
    for row in range(len(mask)):
        if padding := int((mask[row] == 0).sum()):
            label = labels[row, padding]
            terms.append(F.cross_entropy(padding_logits(model, merged, row, padding), label[None]))
    return torch.stack(terms).mean()


@torch.no_grad()
def padding_logits(model: K3Multimodal, merged: Merged, row: int, padding: int) -> torch.Tensor:
    """What the released code computes on a padding position: KDA gives nothing, and a query of MLA whose keys are all
    masked takes the plain mean of every value in the row, later ones too."""
    text = model.language_model
    values: list[torch.Tensor] = []
    mla = [layer.self_attn for layer in text.model.layers if isinstance(layer.self_attn, GatedMLA)]
    hooks = [module.kv_b_proj.register_forward_hook(lambda _module, _args, out: values.append(out)) for module in mla]
    text.hidden(merged.ids_BM[row : row + 1, padding:], embeddings=merged.embeddings_BMD[row : row + 1, padding:])
    for hook in hooks:
        hook.remove()
    stream = text._stream(torch.zeros(1, 1, text.config.hidden_size), None)
    real = iter(values)
    for index, layer in enumerate(text.model.layers):
        x = layer.input_layernorm(stream.enter_layer(index))
        stream.add(
            mean_attention(layer.self_attn, x, next(real), padding) if layer.self_attn in mla else torch.zeros_like(x)
        )
        stream.add(layer.feed_forward(stream.read(), None, None))
    return text.lm_head(text.model.norm(stream.output()))[0]


def mean_attention(module: GatedMLA, x: torch.Tensor, expanded: torch.Tensor, padding: int) -> torch.Tensor:
    own = module.kv_b_proj(module._latent_rows(x)[..., : module.latent_dim])
    everything = torch.cat([own.expand(-1, padding, -1), expanded], dim=1).mean(1, keepdim=True)
    value = everything.unflatten(-1, (module.num_heads, -1))[..., module.nope_dim :].flatten(-2)
    return module.o_proj(value * torch.sigmoid(module.g_proj(x)))


def merge_cases(golden, stem) -> list[str]:
    return sorted({name.split("/")[0] for name in golden.tensors(stem) if name.endswith("/merged_embeds")})


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_merge_logits_and_loss(golden, stem):
    model = build(golden, stem)
    for case in merge_cases(golden, stem):
        want = golden.tensors(stem, case)
        rows = model.image_rows(want["pixel_values"], want["grid_thws"])
        merged = model.merge(want["input_ids"], rows, want["attention_mask"], want["labels"])
        assert torch.equal(merged.attention_mask_BM, want["merged_attention_mask"])
        assert torch.equal(merged.labels_BM, want["merged_labels"])
        assert torch.equal(merged.positions_BM, want["merged_position_ids"])
        torch.testing.assert_close(merged.embeddings_BMD, want["merged_embeds"], atol=5e-6, rtol=5e-6)
        logits = model.logits(merged)
        torch.testing.assert_close(logits, want["logits"], **LOGITS)
        torch.testing.assert_close(released_loss(model, merged, logits), want["loss"][0], **LOGITS)
        whole = model(want["input_ids"], want["pixel_values"], want["grid_thws"], want["attention_mask"])
        assert torch.equal(whole, logits)


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_wrapper_without_images_is_the_text_model(golden, stem):
    model = build(golden, stem)
    ids = torch.arange(7)[None] + 1
    assert torch.equal(model(ids), model.language_model(ids))


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_merge_rules(golden, stem):
    model = build(golden, stem)
    media, pad, width = model.media_token_id, model.config.pad_token_id, model.config.hidden_size
    rows = [torch.full((2, width), 1.0), torch.full((3, width), 2.0)]
    with pytest.raises(ValueError, match="1 image placeholders, but there are 2 images"):
        model.merge(torch.tensor([[1, media, 3]]), rows)

    both = model.merge(torch.tensor([[media, 1, media, 3], [4, 5, 6, 7]]), rows)
    assert both.ids_BM.tolist() == [[media, media, 1, media, media, media, 3], [pad, pad, pad, 4, 5, 6, 7]]
    assert both.embeddings_BMD[0, [0, 1, 3, 4, 5], 0].tolist() == [1, 1, 2, 2, 2], "images in reading order"
    assert both.labels_BM is None
    with pytest.raises(ValueError, match="without labels"):
        multimodal_loss(model.logits(both), both)

    ids = torch.tensor([[media, 1, 2, 3], [4, media, pad, pad]])
    mask = (ids != pad).long()
    right = model.merge(ids, rows, mask, ids)
    assert right.attention_mask_BM.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]], "padding stays on the right"
    assert right.labels_BM is not None and right.labels_BM[0].tolist() == [IGNORED, IGNORED, 1, 2, 3, IGNORED]

    alone = model.merge(ids[1:, :2], rows[1:])
    torch.testing.assert_close(model.logits(right)[1, :4], model.logits(alone)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_gradients_reach_the_tower_through_the_text(golden, stem):
    model = build(golden, stem)
    want = golden.tensors(stem, merge_cases(golden, stem)[0])
    rows = model.image_rows(want["pixel_values"], want["grid_thws"])
    merged = model.merge(want["input_ids"], rows, want["attention_mask"], want["labels"])
    multimodal_loss(model.logits(merged), merged).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.vision_tower.parameters())


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_widths_must_meet(golden, stem):
    model = build(golden, stem)
    narrow = model.vision_config.model_copy(update={"text_hidden_size": model.config.hidden_size // 2})
    with pytest.raises(ConfigError, match="text_hidden_size"):
        K3Multimodal(model.config, narrow, model.media_token_id)
