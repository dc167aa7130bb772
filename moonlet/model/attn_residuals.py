"""What the sub-layers read in depth: plain residuals, or Block Attention Residuals (k3_model.md section 1).

Both streams have the same four verbs, so the model's loop does not know which one it drives:

    h = stream.enter_layer(i); stream.add(attention(h)); stream.add(ffn(stream.read())); ...; stream.output()

Block AttnRes keeps the finished block sums and the running sum. There is no ordinary residual across a block boundary, and
block 0 is the bare token embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moonlet.model.norm import RMSNorm
from moonlet.ops.attn_residuals import Mix, Scan, merge_partial, mix, mix_plain, scan_finished


class Site(NamedTuple):
    """A place that mixes: its name and its query [D] = norm weight * projection (only their product matters)."""

    name: str
    query_D: Tensor


def make_site(name: str, norm: RMSNorm, proj: nn.Linear) -> Site:
    return Site(name, norm.weight * proj.weight.squeeze(0))


@dataclass
class DepthTrace:
    """What one forward pass did in depth, for tests and for the report's heat map."""

    mixes: dict[str, Mix] = field(default_factory=dict)
    sources: dict[str, list[Tensor]] = field(default_factory=dict)
    sublayers: dict[str, Tensor] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)  # the running sum after each layer


class ResidualStream(Protocol):
    current: Tensor | None

    def enter_layer(self, layer: int) -> Tensor: ...
    def read(self) -> Tensor: ...
    def add(self, delta: Tensor) -> None: ...
    def output(self) -> Tensor: ...


class PlainResiduals:
    """h = x; x = x + f(h)."""

    def __init__(self, embedding: Tensor) -> None:
        self.current = embedding

    def enter_layer(self, layer: int) -> Tensor:
        return self.current

    def read(self) -> Tensor:
        return self.current

    def add(self, delta: Tensor) -> None:
        self.current = self.current + delta

    def output(self) -> Tensor:
        return self.current


class BlockAttentionResiduals:
    """Mixes of finished blocks and the running sum.

    Args:
        sites: all sites in the order in which they are read: layer 0's FFN, then attention and FFN of each later layer,
            then the output.
        block_size: decoder layers in a block.
        two_phase: scan the finished blocks once for all sites of a block (inference) instead of at each site.
    """

    def __init__(
        self,
        embedding: Tensor,
        sites: list[Site],
        block_size: int,
        eps: float,
        *,
        two_phase: bool = False,
        trace: DepthTrace | None = None,
    ) -> None:
        self.current: Tensor | None = embedding
        self.sites, self.block_size, self.eps = sites, block_size, eps
        self.two_phase, self.trace = two_phase, trace
        self.blocks: list[Tensor] = []
        self._next = 0
        self._scan: Scan | None = None
        self._scan_start = 0

    def enter_layer(self, layer: int) -> Tensor:
        h = self.read() if self.blocks else self._running()
        if layer % self.block_size == 0:
            self._finish_block()
        return h

    def add(self, delta: Tensor) -> None:
        self.current = delta if self.current is None else self.current + delta

    def read(self) -> Tensor:
        site, index = self.sites[self._next], self._next
        self._next += 1
        if self._scan is not None:
            return merge_partial(self._scan, index - self._scan_start, self.current, site.query_D, self.eps)
        sources = self.blocks if self.current is None else [*self.blocks, self.current]
        if self.trace is None:
            return mix(sources, site.query_D, self.eps)
        explained = mix_plain(sources, site.query_D, self.eps)
        self.trace.mixes[site.name], self.trace.sources[site.name] = explained, list(sources)
        return explained.out

    def output(self) -> Tensor:
        return self.read()

    def _running(self) -> Tensor:
        assert self.current is not None, "a layer added nothing"
        return self.current

    def _finish_block(self) -> None:
        self.blocks.append(self._running())
        self.current = None
        if self.two_phase:
            # From here to the next boundary: 2 * block_size sites (fewer at the end) read the same finished blocks.
            self._scan_start = self._next
            upcoming = self.sites[self._next : self._next + 2 * self.block_size]
            self._scan = scan_finished(self.blocks, torch.stack([site.query_D for site in upcoming]), self.eps)
