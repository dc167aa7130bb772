"""Per-Head Muon (K3 report, section 3): momentum, orthogonalised block by block.

A block is a head of an attention projection, an expert, or a whole matrix (`optim/groups.py` says which).
Orthogonalising a head alone keeps a head with large gradients from taking the direction that all of them share. An
update is scaled by 0.2 * sqrt(max(rows, columns)) of its block, which gives its entries a root mean square of 0.2
whatever the shape (Moonlight), so that learning rates carry over from AdamW.

All equal-shaped blocks of all parameters go through one Newton-Schulz call; tall blocks are turned on their side for
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moonlet.ops.newton_schulz import newton_schulz
from moonlet.optim.sharded import gathered_part, is_sharded, local_part, own_part

Orthogonalise = Callable[[Tensor], Tensor]
_CHUNK_NUMBERS = 1 << 18  # numbers in one Newton-Schulz call: its temporaries stay in the cache


def update_scale(rows: int, columns: int) -> float:
    """Factor on an orthogonal block that makes the root mean square of its entries 0.2."""
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class WorkShare:
    """This rank's part of the orthogonalisation. `sum_in_place` adds tensors up over the ranks."""

    rank: int
    num_ranks: int
    sum_in_place: Callable[[Sequence[Tensor]], None]


class PerHeadMuon:
    """Muon with Nesterov momentum and decoupled weight decay over named parameters, plain tensors or DTensor shards.

    A sharded parameter is gathered for orthogonalisation, for the polar factor of a shard is not a shard of the polar
    factor, and each rank takes back its own part.

    Args:
        parameters: name -> parameter, matrices [R, C] or stacks [E, R, C].
        block_rows: name -> heights of its blocks of rows.
        share: divides the orthogonalisation among ranks that hold equal parameters and gradients; the result is
            the same bit for bit.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        block_rows: Mapping[str, tuple[int, ...]],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        orthogonalise: Orthogonalise = newton_schulz,
        share: WorkShare | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.block_rows = {name: block_rows[name] for name in self.parameters}
        self.momentum, self.weight_decay = momentum, weight_decay
        self.orthogonalise, self.share = orthogonalise, share
        self.buffers = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the `.grad` of every parameter; one without a gradient is left alone."""
        named = {name: p for name, p in self.parameters.items() if p.grad is not None}
        if not named:
            return
        directions = self._directions(named)
        torch._foreach_mul_([local_part(p) for p in named.values()], 1 - lr * self.weight_decay)
        # A whole parameter takes its blocks directly; a shard takes its part of the whole update afterwards.
        targets = [torch.zeros(p.shape, device=p.device) if is_sharded(p) else p for p in named.values()]
        rows = [self.block_rows[name] for name in named]
        for chunk in self._orthogonalised(_chunks(directions, targets, rows)):
            chunk.apply(-lr)
        for parameter, whole in zip(named.values(), targets):
            if is_sharded(parameter):
                local_part(parameter).add_(own_part(whole, parameter))

    def _directions(self, named: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """Nesterov momentum of every parameter, whole."""
        grads = [local_part(p.grad) for p in named.values()]
        buffers = [local_part(self.buffers[name]) for name in named]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, grads)
        local = torch._foreach_add(grads, buffers, alpha=self.momentum)
        return [gathered_part(part, parameter) for part, parameter in zip(local, named.values())]

    def _orthogonalised(self, chunks: list[_Chunk]) -> Iterator[_Chunk]:
        share = self.share
        if share is None or share.num_ranks == 1:
            for chunk in chunks:
                chunk.result = self.orthogonalise(chunk.gather())
                yield chunk
            return
        for index, chunk in enumerate(chunks):
            is_mine = index % share.num_ranks == share.rank
            chunk.result = self.orthogonalise(chunk.gather()).to(chunk.dtype).contiguous() if is_mine else chunk.empty()
        share.sum_in_place([chunk.result for chunk in chunks if chunk.result is not None])
        yield from chunks


class _Chunk:
    """Blocks of one shape that are orthogonalised together, lying on their side."""

    def __init__(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        self.sources, self.targets = sources, targets
        self.result: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    def gather(self) -> Tensor:
        return torch.cat(self.sources)

    def empty(self) -> Tensor:
        first = self.sources[0]
        return first.new_zeros(sum(len(source) for source in self.sources), *first.shape[1:])

    def apply(self, step: float) -> None:
        assert self.result is not None
        scale = step * update_scale(*self.result.shape[-2:])
        for target, part in zip(self.targets, self.result.split([len(target) for target in self.targets])):
            target.add_(part.to(target.dtype), alpha=scale)
        self.result = None


def _chunks(directions: list[Tensor], targets: list[Tensor], rows: list[tuple[int, ...]]) -> list[_Chunk]:
    """Blocks grouped by shape (short side first), each group cut into chunks of a bounded size."""
    by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for direction, target, heights in zip(directions, targets, rows):
        for source_BRC, target_BRC in zip(_blocks(direction, heights), _blocks(target, heights)):
            by_shape.setdefault(tuple(source_BRC.shape[1:]), []).append((source_BRC, target_BRC))
    return [
        chunk for shape, pairs in by_shape.items() for chunk in _cut(pairs, max(1, _CHUNK_NUMBERS // math.prod(shape)))
    ]


def _cut(pairs: list[tuple[Tensor, Tensor]], size: int) -> Iterator[_Chunk]:
    """Chunks of at most `size` blocks, in order; a stack may be cut across chunks."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    room = size
    for pair in pairs:
        for source, target in zip(*(part.split(size) for part in pair)):
            if len(source) > room:
                yield _Chunk(sources, targets)
                sources, targets, room = [], [], size
            sources.append(source)
            targets.append(target)
            room -= len(source)
    yield _Chunk(sources, targets)


def _blocks(matrix: Tensor, heights: tuple[int, ...]) -> list[Tensor]:
    """Views [B, short, long] of the blocks of a matrix or of a stack of matrices."""
    stack = matrix.view(-1, *matrix.shape[-2:])
    if len(set(heights)) == 1:
        views = [stack.view(-1, heights[0], stack.shape[-1])]
    else:
        views = list(stack.split(heights, dim=1))
    return [view.mT if view.shape[-2] > view.shape[-1] else view for view in views]
