"""Depth attention: mean weights by site and source."""

from __future__ import annotations

import pytest
import torch

from moonlet.eval.depth import depth_attention


def test_rows_are_distributions_over_the_blocks_seen(model) -> None:
    documents = [torch.arange(40), torch.arange(100, 300)]
    found = depth_attention(model, documents, row_tokens=64)
    # Every layer reads before attention and before its FFN, except that layer 0 attends to the bare embedding.
    assert len(found["sites"]) == 2 * model.config.num_hidden_layers
    widths = set()
    for row in found["weights"]:
        seen = [weight for weight in row if weight is not None]
        assert sum(seen) == pytest.approx(1, abs=1e-5) and row[: len(seen)] == seen
        widths.add(len(row))
    assert len(widths) == 1


def test_zero_queries_read_all_blocks_alike(new_model) -> None:
    model = new_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_res_proj" in name:
                parameter.zero_()
    for row in depth_attention(model, [torch.arange(30)])["weights"]:
        seen = [weight for weight in row if weight is not None]
        assert seen == pytest.approx([1 / len(seen)] * len(seen))


def test_documents_weigh_by_their_tokens(model) -> None:
    long, short = torch.arange(90), torch.arange(100, 110)
    both, first, second = (depth_attention(model, docs)["weights"][3][0] for docs in ([long, short], [long], [short]))
    assert both == pytest.approx((90 * first + 10 * second) / 100, rel=1e-5)


def test_plain_residuals_have_no_site(new_model) -> None:
    assert depth_attention(new_model(attn_res_block_size=None), [torch.arange(9)]) == {"sites": [], "weights": []}
