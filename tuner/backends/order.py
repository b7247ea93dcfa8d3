"""How many steps a run has, and which rows of the dataset each of them takes."""

from __future__ import annotations

import random
from functools import lru_cache

from tuner.config import RunConfig
from tuner.config.trainer_input import DataSelector
from tuner.rollout.seeds import derive_seed


def planned_steps(config: RunConfig, tasks: int) -> int:
    """Steps of the run: `total_steps`, or as many full batches as all epochs together have."""
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    return config.buffer.total_epochs * tasks // config.buffer.batch_size


def batch_indices(step: int, *, size: int, rows: int, selector: DataSelector) -> list[int]:
    """Rows of the dataset that make up the batch of `step`; epochs follow without a gap."""
    indices = []
    for position in range((step - 1) * size, step * size):
        epoch, offset = divmod(position, rows)
        if selector.selector_type == "shuffle":
            offset = _permutation(rows, derive_seed(selector.seed, "epoch", epoch))[offset]
        indices.append(offset)
    return indices


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return tuple(order)
