"""The decode state: everything that the past leaves behind, layer by layer (k3_model.md section 2).

B sequences, H heads, K key dim, V value dim, W convolution width, S tokens so far, R latent width, P shared key dim.
A KDA layer keeps a constant amount; an MLA layer keeps one row of R + P numbers for each token, in one piece (`MLAState`,
sequences of equal length) or in pages of a pool that many sequences share (`PagedMLAState`, any lengths).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class OpenChunk:
    """Inputs of the tokens since the last chunk boundary of each sequence: q, k, v, g, beta as [B, C, H, ...]."""

    rows: list[Tensor]
    fill_B: Tensor

    def clone(self) -> OpenChunk:
        return OpenChunk([part.clone() for part in self.rows], self.fill_B.clone())


@dataclass
class KDAState:
    """Recurrent state [B, H, K, V] float32 and the last W raw inputs [B, H*D, W] of each convolution, newest last.

    With an `open` chunk the recurrent state is that of the last chunk boundary, and tokens replay the chunk
    (`ops/kda_replay.py`); without, it is that of the last token.
    """

    recurrent: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    open: OpenChunk | None = None

    def tensors(self) -> list[Tensor]:
        """All that it holds, each with the sequences first."""
        parts = [self.recurrent, self.conv_q, self.conv_k, self.conv_v]
        return parts if self.open is None else [*parts, *self.open.rows, self.open.fill_B]

    @staticmethod
    def of_tensors(parts: list[Tensor]) -> KDAState:
        """From what `tensors` gave."""
        return KDAState(*parts[:4], open=OpenChunk(parts[4:9], parts[9]) if len(parts) > 4 else None)

    def clone(self) -> KDAState:
        return self.of_tensors([part.clone() for part in self.tensors()])

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())


@dataclass
class MLAState:
    """Latent rows [B, capacity, R + P], of which the first `length` are filled. Capacity doubles when it runs out."""

    rows: Tensor
    length: int = 0

    def append(self, new_BTL: Tensor) -> Tensor:
        """Store the latents of new tokens; returns all filled rows [B, length, R + P]."""
        needed = self.length + new_BTL.shape[1]
        if needed > self.rows.shape[1]:
            grown = self.rows.new_empty(self.rows.shape[0], max(needed, 2 * self.rows.shape[1]), self.rows.shape[2])
            grown[:, : self.length] = self.rows[:, : self.length]
            self.rows = grown
        self.rows[:, self.length : needed] = new_BTL
        self.length = needed
        return self.rows[:, :needed]

    def clone(self) -> MLAState:
        return replace(self, rows=self.rows.clone())

    @property
    def num_bytes(self) -> int:
        return self.rows[:, : self.length].nbytes


@dataclass
class PagedMLAState:
    """A batch's view of one layer's pool [pages, rows, R + P]: the pages of each sequence, and how many rows are filled.

    `tables` [B, most pages] and `lengths` [B] (int64) may be shared by all layers: `advance` is theirs who made them.
    """

    pool: Tensor
    tables: Tensor
    lengths: Tensor
    replay: bool = False  # one new token, too, attends in the form and order of whole sequences

    def append(self, new_BTL: Tensor) -> None:
        """Store the latents of T new tokens of each sequence behind its `lengths`; its table has room for them."""
        page_rows = self.pool.shape[1]
        at_BT = self.lengths.unsqueeze(1) + torch.arange(new_BTL.shape[1], device=self.lengths.device)
        pages = self.tables.gather(1, at_BT // page_rows)
        self.pool.index_put_((pages.flatten(), (at_BT % page_rows).flatten()), new_BTL.flatten(0, 1))

    def rows(self, num_new: int) -> list[Tensor]:
        """All rows of each sequence, [1, its length + num_new, R + P]."""
        page_rows, totals = self.pool.shape[1], (self.lengths + num_new).tolist()
        tables = [table[: -(-total // page_rows)] for table, total in zip(self.tables, totals)]
        return [self.pool[table].flatten(0, 1)[:total].unsqueeze(0) for table, total in zip(tables, totals)]

    def clone(self) -> PagedMLAState:
        raise TypeError("pages belong to their pool: copy them there")

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum()) * self.pool.shape[2] * self.pool.element_size()


@dataclass
class DecodeState:
    """State of B sequences after `length` tokens, computed with weights `weights_version`.

    The sequences are of equal length, unless their MLA rows lie in pages; `length` then counts for nobody.
    """

    layers: Sequence[KDAState | MLAState | PagedMLAState]
    length: int = 0
    weights_version: int = 0

    def clone(self) -> DecodeState:
        return replace(self, layers=[layer.clone() for layer in self.layers])

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def batch_size(self) -> int:
        first = self.layers[0]
        if isinstance(first, KDAState):
            return first.recurrent.shape[0]
        return first.rows.shape[0] if isinstance(first, MLAState) else len(first.lengths)


def empty_kda_state(batch: int, heads: int, head_dim: int, width: int, like: Tensor) -> KDAState:
    """The state before the first token: zeros, on the device of `like`; windows in its dtype."""
    recurrent = torch.zeros(batch, heads, head_dim, head_dim, device=like.device, dtype=torch.float32)
    windows = [like.new_zeros(batch, heads * head_dim, width) for _ in range(3)]
    return KDAState(recurrent, *windows)


def empty_mla_state(batch: int, row: int, like: Tensor) -> MLAState:
    return MLAState(like.new_empty(batch, 64, row))
