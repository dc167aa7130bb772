"""The decode state: everything that the past leaves behind, layer by layer (k3_model.md section 2).

B sequences, H heads, K key dim, V value dim, W convolution width, S tokens so far, R latent width, P shared key dim.
A KDA layer keeps a constant amount; an MLA layer keeps one row of R + P numbers for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class KDAState:
    """Recurrent state [B, H, K, V] float32 and the last W raw inputs [B, H*D, W] of each convolution, newest last."""

    recurrent: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor

    def clone(self) -> KDAState:
        return KDAState(*(part.clone() for part in (self.recurrent, self.conv_q, self.conv_k, self.conv_v)))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.recurrent, self.conv_q, self.conv_k, self.conv_v))


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
class DecodeState:
    """State of B sequences of equal length after `length` tokens, computed with weights `weights_version`."""

    layers: list[KDAState | MLAState]
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
        return (first.recurrent if isinstance(first, KDAState) else first.rows).shape[0]


def empty_kda_state(batch: int, heads: int, head_dim: int, width: int, like: Tensor) -> KDAState:
    """The state before the first token: zeros, on the device of `like`; windows in its dtype."""
    recurrent = torch.zeros(batch, heads, head_dim, head_dim, device=like.device, dtype=torch.float32)
    windows = [like.new_zeros(batch, heads * head_dim, width) for _ in range(3)]
    return KDAState(recurrent, *windows)


def empty_mla_state(batch: int, row: int, like: Tensor) -> MLAState:
    return MLAState(like.new_empty(batch, 64, row))
