"""The learning rate of a step: a pure function, so that a resumed run cannot have another one."""

from __future__ import annotations

import math


def learning_rate(step: int, *, highest: float, warmup_steps: int, last_step: int, final_fraction: float) -> float:
    """Linear warm-up to `highest`, then a cosine down to `final_fraction * highest` at `last_step`.

    `step` counts from 1. Step `warmup_steps` is the first with the highest rate; without warm-up step 1 is.
    After `last_step` the rate stays where the cosine ended.
    """
    if step <= warmup_steps:
        return highest * step / warmup_steps
    first = max(warmup_steps, 1)
    progress = min((step - first) / max(last_step - first, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))  # 1 -> 0
    return highest * (final_fraction + (1.0 - final_fraction) * cosine)
