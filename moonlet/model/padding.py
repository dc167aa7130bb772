"""Left- or right-padded batches as packed documents: the model knows one boundary contract, `seq_lens`."""

from __future__ import annotations

from torch import Tensor


def unpad(x_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The valid entries of x [B, T, ...] as one packed row [1, N, ...], and the length of each sequence."""
    mask = mask_BT.bool()
    return x_BT[mask].unsqueeze(0), tuple(int(count) for count in mask.sum(1))


def repad(packed_1N: Tensor, mask_BT: Tensor) -> Tensor:
    """Packed rows [1, N, ...] back in their places [B, T, ...]; padded places are zero."""
    mask = mask_BT.bool()
    out = packed_1N.new_zeros(*mask.shape, *packed_1N.shape[2:])
    out[mask] = packed_1N.squeeze(0)
    return out
