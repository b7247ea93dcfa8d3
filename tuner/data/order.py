"""Which rows of a dataset each step takes, how many steps a run has, and seeds."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

import numpy as np

from tuner.config import RunConfig
from tuner.config.buffer import DataSelector


def derive_seed(*parts: object) -> int:
    """A 63-bit seed for the thing named by `parts`, the same in every process and order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Set the global random states, which the user's functions may draw from."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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


def rows_taken(steps: int, *, size: int, rows: int, selector: DataSelector) -> frozenset[int]:
    """Rows of the dataset that any step of a run of so many takes."""
    if steps * size >= rows:  # every one comes once before any comes again
        return frozenset(range(rows))
    found = (batch_indices(n, size=size, rows=rows, selector=selector) for n in range(1, steps + 1))
    return frozenset(index for indices in found for index in indices)


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return tuple(order)
