"""Learning-rate schedules with Trinity-RFT's names."""

from __future__ import annotations

import math
from typing import Literal

Scheduler = Literal["constant", "linear", "cosine"]


def lr_factor(
    step: int,
    *,
    kind: Scheduler,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float,
) -> float:
    """What the learning rate of update `step` (0 .. total_steps - 1) is multiplied with.

    Rises linearly to 1 over `warmup_steps` updates, the first at `1 / warmup_steps`, then stays
    ("constant") or falls to `min_lr_ratio` at `total_steps` ("linear", "cosine").
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_ratio + (1 - min_lr_ratio) * shape
