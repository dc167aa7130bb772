"""Forward passes for sequences in pages: one sequence's prompt, or the next token of many.

B sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.model.gated_mla import MIN_ROWS, GatedMLA
from moonlet.model.k3 import K3
from moonlet.model.kda import KimiDeltaAttention
from moonlet.model.state import DecodeState, KDAState, PagedMLAState
from moonlet.serve.pages import SCRATCH, PagePool, padded_tables
from moonlet.serve.sequence import Sequence


class Runner:
    """Holds the KDA states of the sequences that decode as one batch, so that steady decoding copies nothing.

    Args:
        replay: decode with the arithmetic of whole sequences (`ops/kda_replay.py`), slower, to the bit.
    """

    def __init__(self, model: K3, pool: PagePool, *, replay: bool) -> None:
        self.model, self.pool, self.replay = model.eval(), pool, replay
        layers = list(model.model.layers)
        self._kda: dict[int, KimiDeltaAttention] = {
            index: layer.self_attn for index, layer in enumerate(layers) if not isinstance(layer.self_attn, GatedMLA)
        }
        self._num_layers = len(layers)
        self._batch: list[Sequence] = []
        self._states: dict[int, KDAState] = {}

    def new_states(self, batch: int = 1) -> dict[int, KDAState]:
        return {index: attention.new_state(batch, replay=self.replay) for index, attention in self._kda.items()}

    @torch.inference_mode()
    def prefill(self, sequence: Sequence, count: int) -> Tensor:
        """Read the next `count` tokens of a sequence; logits [V] after the last of them."""
        self.leave([sequence])
        sequence.states = sequence.states or self.new_states()
        start = sequence.num_computed
        ids = torch.tensor([sequence.ids[start : start + count]], device=self.model.output_weight.device)
        state = self._state(sequence.states, [sequence])
        hidden_BTD = self.model.hidden(ids, state=state)
        sequence.num_computed += count
        return self._logits(hidden_BTD[:, -1])[0]

    @torch.inference_mode()
    def decode(self, sequences: Items[Sequence]) -> Tensor:
        """Read the one pending token of each sequence; logits [B, V]."""
        self._join(list(sequences))
        size = len(self._batch)
        padding = max(0, MIN_ROWS - size)
        ids = [[sequence.ids[sequence.num_computed]] for sequence in self._batch] + [[0]] * padding
        state = self._state(self._states, self._batch, padding)
        hidden_BTD = self.model.hidden(torch.tensor(ids, device=self.model.output_weight.device), state=state)
        for sequence in self._batch:
            sequence.num_computed += 1
        return self._logits(hidden_BTD[:, -1])[:size]

    def leave(self, sequences: Items[Sequence]) -> None:
        """Give sequences of the batch their states back: they end, wait, or are read in larger pieces."""
        gone = [sequence for sequence in sequences if sequence in self._batch]
        if gone:
            self._regroup([sequence for sequence in self._batch if sequence not in gone])

    def states_of(self, sequence: Sequence) -> dict[int, KDAState]:
        """A copy of a sequence's KDA states."""
        if sequence in self._batch:
            place = self._batch.index(sequence)
            return {index: _part(state, place).clone() for index, state in self._states.items()}
        return {index: state.clone() for index, state in sequence.states.items()}

    def _join(self, sequences: list[Sequence]) -> None:
        if sequences != self._batch:
            self._regroup(sequences)

    def _regroup(self, sequences: list[Sequence]) -> None:
        for place, sequence in enumerate(self._batch):
            sequence.states = {index: _part(state, place) for index, state in self._states.items()}
        self._batch, self._states = sequences, {}
        if not sequences:
            return
        padding = max(0, MIN_ROWS - len(sequences))
        rest = [self.new_states(padding)] if padding else []
        for index in self._kda:
            parts = [states[index] for states in [*(sequence.states for sequence in sequences), *rest]]
            self._states[index] = _joined(parts)
        for sequence in sequences:
            sequence.states = {}

    def _state(self, states: dict[int, KDAState], sequences: list[Sequence], padding: int = 0) -> DecodeState:
        tables = padded_tables([sequence.table for sequence in sequences] + [[SCRATCH]] * padding)
        lengths = torch.tensor([sequence.num_computed for sequence in sequences] + [0] * padding)
        layers = [
            states[index] if index in states else PagedMLAState(self.pool.rows[index], tables, lengths, self.replay)
            for index in range(self._num_layers)
        ]
        return DecodeState(layers)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        size = len(hidden_BD)
        padded = F.pad(hidden_BD, (0, 0, 0, max(0, MIN_ROWS - size)))
        return F.linear(padded, self.model.output_weight).float()[:size]


def _part(state: KDAState, place: int) -> KDAState:
    return KDAState.of_tensors([tensor[place : place + 1].clone() for tensor in state.tensors()])


def _joined(parts: list[KDAState]) -> KDAState:
    return KDAState.of_tensors([torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts))])
