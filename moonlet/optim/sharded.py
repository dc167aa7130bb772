"""Parameters that FSDP2 has cut into shards (DTensor), as the optimisers need them: this rank's part, and the whole.

Plain tensors pass through. `torch.distributed.tensor` takes a second to import, so only those who have shards import
it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def local_part(tensor: Any) -> Tensor:
    """This rank's part; writing to it writes to `tensor`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gathered(tensor: Any) -> Tensor:
    """The whole tensor; every rank must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered_part(part: Tensor, like: Any) -> Tensor:
    """The whole of which `part` is this rank's share, cut as `like` is; every rank must call it."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, **layout).full_tensor()


def own_part(whole: Tensor, like: Any) -> Tensor:
    """This rank's share of `whole`, which every rank has, cut as `like` is. No communication."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
