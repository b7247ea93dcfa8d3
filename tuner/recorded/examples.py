"""A whole dataset as examples, and how many of its rows cannot be trained and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.algorithms.table import Recorded
from tuner.config.trainer_input import FormatSection
from tuner.errors import DatasetError
from tuner.gateway import ChatRenderer
from tuner.recorded.columns import conversation, pair
from tuner.recorded.turns import Turn, Unusable, trained_turns

# One row of a dataset: the trained turns of each of its conversations. SFT data has one
# conversation in a row, DPO data two, the better one first.
Example = tuple[tuple[Turn, ...], ...]


@dataclass(frozen=True)
class Examples:
    """A dataset to train on: `rows == len(used) + sum(left_out.values())`.

    Attributes:
        used: The examples, in the order of their rows.
        left_out: How many rows are not used, by reason.
    """

    used: tuple[Example, ...]
    left_out: dict[str, int]

    @property
    def rows(self) -> dict[str, int]:
        """How many rows of the dataset are used, and how many are left out by which reason."""
        return {"used": len(self.used), **self.left_out}


def examples_of(
    rows: Sequence[Mapping[str, Any]],
    renderer: ChatRenderer,
    form: FormatSection,
    *,
    recorded: Recorded,
    longest: int,
) -> Examples:
    """All rows of a dataset as token ids.

    Args:
        rows: The dataset.
        renderer: The chat form of the model that is trained.
        form: Which columns say what.
        recorded: What a row holds.
        longest: The most tokens of a prompt and its completion; longer rows are left out whole.

    Raises:
        DatasetError: A row is not of that form; names the row. Or no row can be used.
    """
    used: list[Example] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            both = (conversation(row, form),) if recorded == "conversations" else pair(row, form)
            used.append(tuple(trained_turns(renderer, one, longest=longest) for one in both))
        except Unusable as error:
            left_out[error.reason] += 1
        except DatasetError as error:
            raise DatasetError(f"train_dataset: row {number}: {error}") from None
    if not used:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        raise DatasetError(
            f"train_dataset: no row can be trained ({reasons}); see docs/offline.md for what these "
            "mean"
        )
    return Examples(tuple(used), dict(sorted(left_out.items())))
