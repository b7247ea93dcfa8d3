"""Batches of a dataset in an order that can be taken up again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tuner.data.order import derive_seed
from tuner.errors import DatasetError


class StatefulDataLoader:
    """Goes through a dataset in batches; each `iter` goes on to the end of the epoch.

    The order of an epoch depends on the seed and the epoch alone, so two numbers are its state.

    Args:
        dataset: Anything with a length and rows by index.
        batch_size: Rows in a batch.
        shuffle: Draw a new order for each epoch.
        seed: Seed of the orders.
        drop_last: Leave out the last batch of an epoch where it is not full.
        collate_fn: Makes a batch of a list of rows.

    Raises:
        DatasetError: The dataset has no rows, or fewer than a batch and `drop_last` is set.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 42,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] = lambda rows: rows,
    ) -> None:
        if not len(dataset) or (drop_last and len(dataset) < batch_size):
            raise DatasetError(
                f"the dataset has {len(dataset)} rows and batch_size is {batch_size}: there is no "
                "full batch; lower batch_size or add rows"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._collate = collate_fn
        self._epoch = 0
        self._batch = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self._drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        while self._batch < len(self):
            start = self._batch * self.batch_size
            rows = self._order()[start : start + self.batch_size]
            # Counted before the batch is used: its user may save the state meanwhile.
            self._batch += 1
            yield self._collate([self.dataset[row] for row in rows])
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` goes on from."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken."""
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _order(self) -> list[int]:
        rows = list(range(len(self.dataset)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", self._epoch)).shuffle(rows)
        return rows


def endless(dataloader: Any) -> Iterator[Any]:
    """Batches of one epoch after the other, each read anew: `itertools.cycle` would repeat the
    batches of the first, in their order."""
    while True:
        yield from dataloader
