"""How new weights get from the actor to the engine: here they are the same ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from tuner.errors import ConfigError

_PART = re.compile(r"(?:[a-z]+:)?(?P<sizes>(?:[a-z]\d+)+)")


@dataclass(frozen=True)
class AllocationMode:
    """Devices of generation and training, as `sglang:d1p1t1+d1p1t1`; one of each here.

    Attributes:
        text: As it was given.
    """

    text: str

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Read an allocation.

        Raises:
            ConfigError: It is no allocation, or asks for more than one device in a part.
        """
        for part in text.split("+"):
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"allocation {text!r}: {part!r} is not of the form sglang:d1p1t1")
            if any(int(size) != 1 for size in re.findall(r"\d+", match["sizes"])):
                raise ConfigError(
                    f"allocation {text!r}: {part!r} asks for more than one device, but the local "
                    "loop generates and trains on one; make every size 1"
                )
        return cls(text)


@dataclass(frozen=True)
class WeightUpdateMeta:
    """How weights are updated. The engine generates with the very weights that are trained, so an
    update is to say that they have changed; nothing is sent.

    Attributes:
        allocation: Devices.
    """

    allocation: AllocationMode | None = None

    @classmethod
    def from_fsdp_xccl(cls, allocation: AllocationMode) -> Self:
        """AReaL's name for an update from a trainer to an engine beside it."""
        return cls(allocation)


@dataclass(frozen=True)
class FinetuneSpec:
    """How long a run is: what the learning rate's schedule needs to know.

    Attributes:
        total_train_epochs: How often the dataset is gone through.
        dataset_size: Rows of the dataset.
        train_batch_size: Rows in a step.
    """

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def total_train_steps(self) -> int:
        """Full batches of all epochs together."""
        return max(1, self.total_train_epochs * self.dataset_size // self.train_batch_size)
