"""The order of documents: every document once an epoch, shuffled anew each epoch, resumable at any document."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from moonlet.errors import CheckpointError


def counter_rng(seed: int, name: str, *counters: int) -> np.random.Generator:
    """A generator that depends on nothing but its arguments, so that no generator state has to be saved."""
    return np.random.Generator(np.random.PCG64([seed & (2**64 - 1), zlib.crc32(name.encode()), *counters]))


class DocumentStream:
    """An endless walk over `num_documents` documents. Its state is the epoch and the position in it."""

    def __init__(self, num_documents: int, seed: int, name: str) -> None:
        self.num_documents, self.seed, self.name = num_documents, seed, name
        self.epoch = self.position = 0
        self._order = self._shuffle()

    def next(self) -> tuple[int, int]:
        """(epoch, index of the document)."""
        if self.position == self.num_documents:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffle()
        self.position += 1
        return self.epoch, int(self._order[self.position - 1])

    def _shuffle(self) -> np.ndarray:
        return counter_rng(self.seed, f"order of {self.name}", self.epoch).permutation(self.num_documents)

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self.num_documents, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the state belongs to a corpus of another size."""
        if state["documents"] != self.num_documents:
            raise CheckpointError(
                f"the saved data position is in a corpus where source '{self.name}' has {state['documents']} documents; "
                f"here it has {self.num_documents}: resume with the corpus of that run"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffle()
