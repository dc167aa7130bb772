"""Documents in a row never see each other, to the last bit (cases/bugs.md B08, B09)."""

from __future__ import annotations

import pytest
import torch

from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3

LENGTHS = (33, 7, 1, 58, 64)


def tiny(**changes) -> K3:
    table = {"preset": "nano", "vocab_size": 256, "pad_token_id": 255, "bos_token_id": 240, "eos_token_id": 242}
    table |= {"hidden_size": 48, "intermediate_size": 64, "routed_expert_hidden_size": 24, "moe_intermediate_size": 16}
    table |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    table |= {"linear_attn_config": {"head_dim": 16, "num_heads": 2}}
    model = K3(resolve_model(table | changes))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # depth queries start at zero: move them, so that every mix is exercised
        for name, parameter in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                parameter.normal_(0, 0.2, generator=generator)
    return model


def rows(seed: int) -> torch.Tensor:
    return torch.randint(0, 240, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("document", range(len(LENGTHS)))
def test_changing_the_last_token_of_one_document_leaves_every_bit_of_the_others(document, grad):
    model = tiny().eval()
    start, end = sum(LENGTHS[:document]), sum(LENGTHS[: document + 1])
    others = [t for t in range(sum(LENGTHS)) if not start <= t < end]
    with torch.set_grad_enabled(grad):
        for seed in range(3):
            ids = rows(seed)
            before = model(ids, seq_lens=LENGTHS)
            for delta in (1, 77, 130):
                changed = ids.clone()
                changed[0, end - 1] = (changed[0, end - 1] + delta) % 240
                after = model(changed, seq_lens=LENGTHS)
                assert torch.equal(before[0, others], after[0, others])
                assert not torch.equal(before[0, end - 1], after[0, end - 1])


def test_no_gradient_crosses_a_document_border():
    model = tiny().eval()
    ids = rows(0)
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()
    hidden = model.hidden(ids, seq_lens=LENGTHS, embeddings=embedded)
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    hidden[0, start:end].square().sum().backward()
    outside = torch.cat([embedded.grad[0, :start], embedded.grad[0, end:]])
    assert float(outside.abs().max()) == 0 and float(embedded.grad[0, start:end].abs().max()) > 0


def test_packed_equals_alone():
    model = tiny().eval()
    ids = rows(1)
    packed = model(ids, seq_lens=LENGTHS)
    alone = torch.cat([model(part) for part in ids.split(LENGTHS, dim=1)], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)


def test_routing_can_be_replayed_in_a_padded_batch():
    model = tiny().eval()
    ids, mask = rows(3)[:, :40].view(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    generator = torch.Generator().manual_seed(0)
    forced = {layer: torch.rand(40, 16, generator=generator).topk(4).indices for layer in (1, 2, 3)}
    padded = model(ids, attention_mask=mask, forced_routing=forced)
    whole = {layer: indices.view(2, 20, 4)[0, 5:] for layer, indices in forced.items()}
    torch.testing.assert_close(padded[0, 5:], model(ids[:1, 5:], forced_routing=whole)[0], atol=2e-5, rtol=1e-5)


def test_two_boundary_contracts_at_once_are_refused():
    model = tiny()
    ids, mask = rows(0), torch.ones(1, sum(LENGTHS), dtype=torch.long)
    torch.testing.assert_close(model(ids, seq_lens=LENGTHS, attention_mask=mask), model(ids, seq_lens=LENGTHS))
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="not both"):
        model(ids, seq_lens=LENGTHS, attention_mask=mask)


@pytest.mark.parametrize("lengths", [(5, 6), (163, 0), (10,), ()])
def test_lengths_that_do_not_add_up_are_refused(lengths):
    with pytest.raises(ValueError):
        tiny()(rows(0), seq_lens=lengths)


def test_seq_lens_with_several_rows_are_refused():
    with pytest.raises(ValueError, match="one row"):
        tiny()(rows(0).expand(2, -1), seq_lens=LENGTHS)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_res_block_size": "none"},
        {"attn_res_block_size": 1},
        {"attn_res_block_size": 3},
        {"routed_expert_hidden_size": "none", "latent_moe_use_norm": False},
        {"q_lora_rank": "none", "mla_use_output_gate": False},
        {"first_k_dense_replace": 3},
        {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.446},
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        {"num_attention_heads": 6, "num_key_value_heads": 1},
        {"hidden_act": "silu", "activation_situ_beta": "none", "activation_situ_linear_beta": "none"},
        {
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 2,
                "gate_lower_bound": "none",
                "use_full_rank_gate": False,
            }
        },
        {"tie_word_embeddings": True},
        {"moe_router_activation_func": "softmax"},
        {"num_shared_experts": 0},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_every_variant_decodes_to_what_it_computes_at_once(changes):
    """Full, prefill + steps, and the gradient of every used parameter is finite."""
    model = tiny(**changes)
    ids = rows(2)[:, :40]
    full = model(ids)
    full.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert "layers.0.self_attention_res" in name, name
        else:
            assert bool(parameter.grad.isfinite().all()), name
    model.eval()
    with torch.no_grad():
        state = model.new_state(1)
        pieces = [model(piece, state=state) for piece in (ids[:, :17], ids[:, 17:30], *ids[:, 30:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(pieces, 1), full.detach(), atol=1e-4, rtol=1e-4)
