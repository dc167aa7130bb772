"""Which number format the hardware multiplies: decided by capability alone, so that two runs on one machine agree."""

from __future__ import annotations

import torch


def multiplies_bf16(device: torch.device | str) -> bool:
    """Whether `device` has bfloat16 matrix instructions.

    Without them bfloat16 products are emulated and 20 to 60 times slower than float32.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return kind == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def matmul_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere."""
    return torch.bfloat16 if multiplies_bf16(device) else torch.float32
