"""`SequenceSample`: packed sequences with their lengths, as queue agents receive and return them.

Several sequences of one prompt lie one behind the other in each tensor; `seqlens` cuts them:

    packed_input_ids  q q q a a q q q a a a o b    seqlens [[5, 8]]
    prompt_mask       1 1 1 0 0 1 1 1 1 1 1 1 0    seqlens [[5, 8]]
    packed_logprobs   . . p p . . . . . . . p      seqlens [[4, 7]], of every token but the first
    rewards           r r                          seqlens [[1, 1]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tuner.areal.tensors import Trajectory, read_trajectories
from tuner.errors import FunctionError

IDS, MASK, LOGPROBS, REWARDS = "packed_input_ids", "prompt_mask", "packed_logprobs", "rewards"


@dataclass
class SequenceSample:
    """Packed tensors of the sequences of one prompt.

    Of a trajectory, `packed_input_ids`, `prompt_mask`, `packed_logprobs` and `rewards` are read;
    log-probs at prompt tokens mean nothing. Other keys are kept and have no effect.

    Attributes:
        ids: The prompt's id, as the only item.
        data: Tensors by key, each with the sequences one behind the other.
        seqlens: Lengths of the sequences by key, in a list for each id.
        keys: Those of `data`; those that are named are required to be there.
        dtypes, trailing_shapes: As in AReaL; tensors know both themselves.
        metadata: For the agent: `task` is the row of the dataset.
    """

    ids: list[str]
    data: dict[str, Tensor]
    seqlens: dict[str, list[list[int]]]
    keys: Sequence[str] = ()
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    trailing_shapes: Mapping[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [key for key in self.keys if key not in self.data]
        if missing:
            raise FunctionError(f"the SequenceSample names {', '.join(missing)}, but has no data")
        self.keys = list(self.data)

    @property
    def bs(self) -> int:
        """How many prompts it is of."""
        return len(self.ids)

    def update_(self, other: SequenceSample) -> None:
        """Take over the keys of `other`."""
        self.data |= other.data
        self.seqlens |= other.seqlens
        self.metadata |= other.metadata
        self.keys = list(self.data)


def trajectories_of(values: Any, source: str) -> list[Trajectory]:
    """The trajectories that an agent returned: `SequenceSample`s, or dicts of padded tensors.

    Raises:
        FunctionError: It is something else, or lengths do not agree; the message has them.
    """
    if not isinstance(values, (list, tuple)):
        raise FunctionError(
            f"{source} returned {values!r:.80} ({type(values).__name__}); it returns a list of "
            "trajectories, empty to reject"
        )
    trajectories: list[Trajectory] = []
    for value in values:
        if isinstance(value, SequenceSample):
            trajectories += _sequences(value, source)
        else:
            trajectories += read_trajectories(value, source)
    return trajectories


def _sequences(sample: SequenceSample, source: str) -> list[Trajectory]:
    missing = [key for key in (IDS, MASK, LOGPROBS, REWARDS) if key not in sample.data]
    if missing:
        raise FunctionError(f"a SequenceSample of {source} has no {', '.join(missing)}")
    ids, masks, logprobs, rewards = (
        _cut(sample, key, source) for key in (IDS, MASK, LOGPROBS, REWARDS)
    )
    if not len(ids) == len(masks) == len(logprobs) == len(rewards):
        raise FunctionError(
            f"a SequenceSample of {source} has {len(ids)} sequences of {IDS}, {len(masks)} of "
            f"{MASK}, {len(logprobs)} of {LOGPROBS} and {len(rewards)} {REWARDS}"
        )
    found: list[Trajectory] = []
    for place, (ids_L, prompt_L, logprobs_L) in enumerate(zip(ids, masks, logprobs, strict=True)):
        if not len(ids_L) == len(prompt_L) == len(logprobs_L) + 1:
            raise FunctionError(
                f"the lengths of sequence {place} of {source} do not agree: {IDS} {len(ids_L)}, "
                f"{MASK} {len(prompt_L)}, {LOGPROBS} {len(logprobs_L)}; they are L, L and L - 1"
            )
        tensors = {
            "input_ids": ids_L[None],
            "attention_mask": torch.ones(1, len(ids_L), dtype=torch.bool),
            "loss_mask": ~prompt_L.bool()[None],
            "logprobs": torch.cat([logprobs_L.new_zeros(1), logprobs_L])[None],
            "rewards": rewards[place],
        }
        found += read_trajectories(tensors, source)
    return found


def _cut(sample: SequenceSample, key: str, source: str) -> list[Tensor]:
    """The sequences of one key."""
    packed = torch.as_tensor(sample.data[key])
    lengths = sample.seqlens.get(key)
    if lengths is None or len(lengths) != 1 or len(sample.ids) != 1:
        raise FunctionError(
            f"a SequenceSample of {source} has ids {sample.ids} and seqlens {lengths} of {key}; "
            "it is of one prompt, with one list of lengths"
        )
    if sum(lengths[0]) != len(packed):
        raise FunctionError(
            f"{key} of {source} has {len(packed)} entries, but its seqlens {lengths[0]} add up to "
            f"{sum(lengths[0])}"
        )
    return [packed[start:stop] for start, stop in pairwise(accumulate(lengths[0], initial=0))]
