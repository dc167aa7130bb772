"""Rows of one stage, optimiser step by optimiser step, and the packed batch that travels to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moonlet.config.run import StageConfig
from moonlet.data.corpus import Corpus
from moonlet.data.mixture import Mixture
from moonlet.data.rows import Row, build_rows
from moonlet.errors import CheckpointError

IGNORE = -100  # label of a position that nothing is predicted at


@dataclass(frozen=True)
class PackedBatch:
    """Documents back to back: `ids` int64 [N], `loss_mask` bool [N], sum(seq_lens) == N.

    A token with `loss_mask` False is read but never a target. Padding is a document of its own, masked.
    """

    ids: torch.Tensor
    seq_lens: tuple[int, ...]
    loss_mask: torch.Tensor

    def __post_init__(self) -> None:
        if self.ids.shape != self.loss_mask.shape or self.ids.ndim != 1 or sum(self.seq_lens) != len(self.ids):
            raise ValueError(
                f"ids {tuple(self.ids.shape)}, loss_mask {tuple(self.loss_mask.shape)} and the sum of seq_lens "
                f"{sum(self.seq_lens)} must be the same length"
            )


def pack_rows(rows: Sequence[Row]) -> PackedBatch:
    """Rows end to end."""
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([row.ids for row in rows])),
        seq_lens=tuple(length for row in rows for length in row.seq_lens),
        loss_mask=torch.from_numpy(np.concatenate([row.loss_mask for row in rows])),
    )


def labels(batch: PackedBatch) -> torch.Tensor:
    """int64 [N]: the next token of the same document where it may be learned, else -100."""
    targets = torch.where(batch.loss_mask, batch.ids, IGNORE)
    shifted = torch.cat([targets[1:], targets.new_full((1,), IGNORE)])
    last = torch.tensor(batch.seq_lens).cumsum(0) - 1
    shifted[last] = IGNORE
    return shifted


class BatchStream:
    """The rows of a stage. The same corpus, stages and seed give the same rows on every rank and after every resume."""

    def __init__(
        self, corpus: Corpus, stage: StageConfig, seed: int, resume_from: dict[str, Any] | None = None
    ) -> None:
        """`resume_from`: the state of the stage before, so that no document is repeated or left out between them."""
        self.stage = stage
        self.mixture = Mixture(stage.mixture, seed)
        self.sources = {name: build_rows(name, corpus, seed) for name in self.mixture.weights}
        self.consumed_ids: list[str] = []  # documents in the rows of the last step, in order
        self._resting: dict[str, Any] = {}  # states of sources that this stage does not use
        if resume_from is not None:
            self.load_state_dict(resume_from)

    def next_rows(self) -> list[Row]:
        """The batch_tokens / seq_len rows of one optimiser step, of all ranks and micro-batches together."""
        num_rows = self.stage.batch_tokens // self.stage.seq_len
        rows = [self.sources[self.mixture.next()].next_row(self.stage.seq_len) for _ in range(num_rows)]
        self.consumed_ids = [piece.document_id for row in rows for piece in row.pieces]
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists: counters, and the places of the documents read ahead. No tokens."""
        used = {name: source.state_dict() for name, source in self.sources.items()}
        return {"mixture": self.mixture.state_dict(), "sources": {**self._resting, **used}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the state does not belong to this corpus."""
        try:
            self.mixture.load_state_dict(state["mixture"])
            saved = dict(state["sources"])
            for name, source in self.sources.items():
                if name in saved:
                    source.load_state_dict(saved.pop(name))
            self._resting = saved
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the saved data position is damaged: {type(error).__name__} {error}") from None
