"""Pages for the latents of all MLA layers: one table for all layers, counted references, a page that belongs to nobody.

N pages of S rows, L numbers to a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moonlet.model.gated_mla import GatedMLA
from moonlet.model.k3 import K3

SCRATCH = 0  # what padding sequences of a batch write to


class OutOfPagesError(Exception):
    """No page is free and none can be evicted; the scheduler answers by preempting somebody."""


class PagePool:
    """`rows[layer]` is [N, S, L] for each MLA layer; a page id means the same page in all of them.

    Args:
        evict: frees at least one page if it can; called when none is free. Returns whether it did.
    """

    def __init__(self, model: K3, num_pages: int, page_rows: int) -> None:
        self.page_rows = page_rows
        self.num_pages = num_pages
        like = model.output_weight
        self.rows: dict[int, Tensor] = {
            index: like.new_zeros(num_pages, page_rows, layer.self_attn.latent_dim + layer.self_attn.rope_dim)
            for index, layer in enumerate(model.model.layers)
            if isinstance(layer.self_attn, GatedMLA)  # type: ignore[union-attr]
        }
        self._references = [0] * num_pages
        self._references[SCRATCH] = 1
        self._free = list(range(num_pages - 1, SCRATCH, -1))
        self.evict: Callable[[], bool] = lambda: False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page of one's own. Raises OutOfPagesError."""
        while not self._free:
            if not self.evict():
                raise OutOfPagesError
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        assert self._references[page] > 0, "a free page cannot be shared"
        self._references[page] += 1

    def release(self, page: int) -> bool:
        """Give up one reference; returns whether the page is free now."""
        assert self._references[page] > 0, "a page was released twice"
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
            return True
        return False

    def references(self, page: int) -> int:
        return self._references[page]

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """The first `count` rows of a page into another one."""
        for rows in self.rows.values():
            rows[target, :count] = rows[source, :count]

    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


def pages_for(num_rows: int, page_rows: int) -> int:
    return -(-num_rows // page_rows)


def padded_tables(tables: list[list[int]]) -> Tensor:
    """[B, most pages] int64, padded with the scratch page."""
    width = max(1, *(len(table) for table in tables))
    return torch.tensor([table + [SCRATCH] * (width - len(table)) for table in tables], dtype=torch.int64)
