"""Learning-rate schedules over the whole run, all stages together: pure functions of the step.

The report uses cosine with 1 % linear warm-up and found it better than warm-up-stable-decay at equal tuning; both are
here.
"""

from __future__ import annotations

import math

from moonlet.config import OptimConfig


def learning_rate_scale(step: int, total_steps: int, config: OptimConfig) -> float:
    """Factor in (0, 1] on the peak learning rates at `step` (0-based) of `total_steps`."""
    warmup_steps = max(1, round(config.warmup_fraction * total_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    shape = cosine if config.schedule == "cosine" else warmup_stable_decay
    height = shape(step - warmup_steps, total_steps - warmup_steps, config)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * height


def cosine(step: int, steps: int, config: OptimConfig) -> float:
    """Half a cosine from 1 down to 0, which `steps` itself would reach: the last step still moves."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def warmup_stable_decay(step: int, steps: int, config: OptimConfig) -> float:
    """1, then a straight line to 0 over the last `decay_fraction` of the steps."""
    decay_steps = max(1, round(config.decay_fraction * steps))
    return min(1.0, max(0, steps - step) / decay_steps)
