"""Depth mixes keep references, not copies: what is saved for the backward pass grows with depth, not with its square (B19)."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.model.test_packing import tiny


def saved_bytes(num_layers: int, block_size: int) -> int:
    """Bytes of distinct storages that one training forward saves."""
    full = list(range(4, num_layers + 1, 4))
    layers = {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full],
        "head_dim": 16,
        "num_heads": 2,
    }
    model = tiny(num_hidden_layers=num_layers, attn_res_block_size=block_size, linear_attn_config=layers).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 240, (1, 256), generator=torch.Generator().manual_seed(0))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids).square().mean()
    loss.backward()
    return sum(seen.values())


def test_twice_the_layers_save_about_twice_the_bytes():
    assert saved_bytes(16, block_size=2) <= 2.2 * saved_bytes(8, block_size=2)


def test_depth_mixes_cost_little_over_plain_residuals():
    plain, mixed = saved_bytes(8, block_size=8), saved_bytes(8, block_size=1)
    assert mixed <= 1.2 * plain, "eight times the sources must not mean eight times the memory"
