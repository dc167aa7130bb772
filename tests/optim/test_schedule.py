"""Learning-rate schedules over all steps of a run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.config import OptimConfig
from moonlet.optim.schedule import learning_rate_scale


def scales(steps: int, **options: object) -> list[float]:
    config = OptimConfig.parse(options)
    return [learning_rate_scale(step, steps, config) for step in range(steps)]


@given(
    st.integers(1, 400),
    st.sampled_from(["cosine", "wsd"]),
    st.floats(0, 0.9),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_rises_then_never_rises_again(steps: int, schedule: str, warmup: float, floor: float, decay: float):
    values = scales(steps, schedule=schedule, warmup_fraction=warmup, min_lr_ratio=floor, decay_fraction=decay)
    assert all(0 < value <= 1 for value in values)
    top = values.index(max(values))
    assert values[:top] == sorted(values[:top])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert top + 1 <= max(1, round(warmup * steps)) + 1


def test_cosine_with_one_percent_warm_up():
    values = scales(1000)
    assert values[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert values[10] == 1.0
    assert values[505] == pytest.approx(0.5)
    assert 0 < values[-1] < 1e-5
    assert scales(1000, min_lr_ratio=0.1)[-1] == pytest.approx(0.1, abs=1e-4)


def test_warmup_stable_decay():
    values = scales(1000, schedule="wsd", decay_fraction=0.2)
    decay_steps = round(0.2 * 990)
    assert values[10:-decay_steps] == [1.0] * (990 - decay_steps)
    drops = [before - after for before, after in zip(values[-decay_steps:], values[-decay_steps + 1 :])]
    assert drops == pytest.approx([1 / decay_steps] * len(drops))
    assert math.isclose(values[-1], 1 / decay_steps)
