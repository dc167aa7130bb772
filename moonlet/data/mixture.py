"""Which source the next row comes from. Rows have equal length, so the weights are shares of tokens."""

from __future__ import annotations

from typing import Any

from moonlet.data.stream import counter_rng

_GOLDEN = 0.6180339887498949


class Mixture:
    """Row n is given to the source at point frac(phase + n * golden ratio) of the cumulated weights.

    These points fill the unit interval more evenly than random ones: after n rows each source is within a few rows of
    its share, and the state is one counter.
    """

    def __init__(self, weights: dict[str, float], seed: int) -> None:
        total = sum(weights.values())
        self.weights = {name: weight / total for name, weight in weights.items() if weight > 0}
        self.rows = 0
        self._phase = float(counter_rng(seed, "mixture").random())

    def next(self) -> str:
        point = (self._phase + self.rows * _GOLDEN) % 1.0
        self.rows += 1
        for name, weight in self.weights.items():
            if point < weight:
                return name
            point -= weight
        return list(self.weights)[-1]  # rounding left the point just above the last weight

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
