"""Agents with queues: observations go out, answers come in, the agent manages its tokens.

agent ──▶ obs_queue: (qid, token_ids, gconfig) ──▶ engine ──▶ act_queue ──▶ agent
  │  ▲
  ▼  │ observation, reward, terminated, truncated, info
environment

Agents receive and return `SequenceSample`s. Several sequences of one prompt are concatenated in
each tensor, and `seqlens` gives their lengths:

    packed_input_ids  q q q a a q q q a a a o b    seqlens [[5, 8]]
    prompt_mask       1 1 1 0 0 1 1 1 1 1 1 1 0    seqlens [[5, 8]]
    packed_logprobs   . . p p . . . . . . . p      seqlens [[4, 7]], of every token but the first
    rewards           r r                          seqlens [[1, 1]]
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tuner.areal.hyperparameters import GenerationHyperparameters
from tuner.areal.token_workflow import SessionEngine
from tuner.areal.trajectories import Trajectory, read_trajectories
from tuner.errors import FunctionError, TunerError

IDS, MASK, LOGPROBS, REWARDS = "packed_input_ids", "prompt_mask", "packed_logprobs", "rewards"


@dataclass
class SequenceSample:
    """Packed tensors of the sequences of one prompt.

    For a trajectory, `packed_input_ids`, `prompt_mask`, `packed_logprobs` and `rewards` are read;
    log-probs at prompt tokens are ignored. Other keys are kept and have no effect.

    Attributes:
        ids: The prompt's id, as the only item.
        data: Tensors by key, each with the concatenated sequences.
        seqlens: Lengths of the sequences by key, in a list for each id.
        keys: Those of `data`; named keys must exist.
        dtypes, trailing_shapes: For compatibility with AReaL; tensors have both themselves.
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
        """Number of prompts."""
        return len(self.ids)

    def update_(self, other: SequenceSample) -> None:
        """Copy the keys of `other`."""
        self.data |= other.data
        self.seqlens |= other.seqlens
        self.metadata |= other.metadata
        self.keys = list(self.data)


def trajectories_of(values: Any, source: str) -> list[Trajectory]:
    """Trajectories from an agent's result: `SequenceSample`s, or dicts of padded tensors.

    Raises:
        FunctionError: It is something else, or lengths differ; the message has them.
    """
    if not isinstance(values, (list, tuple)):
        raise FunctionError(
            f"{source} returned {values!r:.80} ({type(values).__name__}); it must return a list "
            "of trajectories, empty to reject"
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
                f"{MASK} {len(prompt_L)}, {LOGPROBS} {len(logprobs_L)}; they must be L, L and L - 1"
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
            "it must have one prompt, with one list of lengths"
        )
    if sum(lengths[0]) != len(packed):
        raise FunctionError(
            f"{key} of {source} has {len(packed)} entries, but its seqlens {lengths[0]} add up to "
            f"{sum(lengths[0])}"
        )
    return [packed[start:stop] for start, stop in pairwise(accumulate(lengths[0], initial=0))]


Observation: TypeAlias = tuple[str, list[int], GenerationHyperparameters]
Step: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]


class EnvironmentFault(TunerError):
    """An environment returned an invalid result."""


class EnvironmentService(ABC):
    """An environment with gymnasium's five values, asynchronous so that episodes do not block each
    other. One episode at a time uses it."""

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Returns:
            First observation, and info.
        """
        return None, {}

    @abstractmethod
    async def step(self, action: Any) -> Step:
        """Take one action.

        Returns:
            Observation, reward, whether the episode has ended, whether it was cut off, and info.
        """

    async def close(self) -> None:  # noqa: B027  # most environments hold nothing
        """Release the environment's resources."""


class Agent(ABC):
    """An agent that requests answers through queues. One instance serves all rollouts of a process,
    concurrently."""

    @abstractmethod
    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> Sequence[Any]:
        """Run one episode.

        Args:
            prompt: `ids[0]` is the prompt's id, `data["packed_prompts"]` its token ids, shape [P],
                `metadata["task"]` the row of the dataset.
            env: The environment; its results are checked.
            obs_queue: Takes `(qid, token_ids, gconfig)`.
            act_queue: Gives one bundle for each observation, in the same order.

        Returns:
            `SequenceSample`s, or dicts of tensors like those of a token-level workflow; an empty
            list rejects the episode.
        """


@dataclass(frozen=True)
class BundledGenerationOutputs:
    """The `gconfig.n` answers to one observation.

    Attributes:
        qid: The observation's.
        prompt_ids: The observation's token ids, shape [P].
        output_ids: Sampled ids of each answer, shape [T] each.
        seqs: `prompt_ids` and `output_ids` of each, shape [P + T].
        logprobs: Log-prob of every token of `seqs` except the first, 0 at prompt tokens; shape
            [P + T - 1].
        no_eos: Whether each answer was cut off.
        version_start: Version of the weights (number of updates) at each answer's first token.
        version_end: The same at its last.
    """

    qid: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    seqs: list[list[int]]
    logprobs: list[list[float]]
    no_eos: list[bool]
    version_start: list[int]
    version_end: list[int]

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def seqlens(self) -> list[int]:
        return [len(seq) for seq in self.seqs]

    @property
    def output_logprobs(self) -> list[list[float]]:
        return [logprobs[self.prompt_len - 1 :] for logprobs in self.logprobs]


class ObservationQueue(asyncio.Queue[Observation]):
    """Checks observations on `put`, and copies their ids, which agents may extend."""

    def _put(self, item: Observation) -> None:
        fits = isinstance(item, tuple) and len(item) == 3
        if not fits or not isinstance(item[2], GenerationHyperparameters):
            raise FunctionError(
                f"obs_queue was given {item!r:.120}; put (qid, token_ids, gconfig), the last a "
                "GenerationHyperparameters"
            )
        qid, token_ids, gconfig = item
        super()._put((qid, [int(token) for token in token_ids], gconfig))


async def serve(
    engine: SessionEngine,
    observations: asyncio.Queue[Observation],
    actions: asyncio.Queue[BundledGenerationOutputs],
) -> None:
    """Answer observations until cancelled: concurrently, delivered in order.

    Raises:
        Like `SessionEngine.agenerate`.
    """
    begun: asyncio.Queue[asyncio.Task[BundledGenerationOutputs]] = asyncio.Queue()

    async def answer(observation: Observation) -> BundledGenerationOutputs:
        qid, prompt_ids, gconfig = observation
        sampled = await engine.sample(prompt_ids, gconfig)
        return BundledGenerationOutputs(
            qid=qid,
            prompt_ids=prompt_ids,
            output_ids=[list(g.completion_ids) for g in sampled],
            seqs=[[*prompt_ids, *g.completion_ids] for g in sampled],
            logprobs=[[0.0] * (len(prompt_ids) - 1) + list(g.logprobs) for g in sampled],
            no_eos=[g.finish_reason == "length" for g in sampled],
            version_start=[g.versions[0] for g in sampled],
            version_end=[g.versions[-1] for g in sampled],
        )

    async def deliver() -> None:
        while True:
            actions.put_nowait(await (await begun.get()))

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                begun.put_nowait(group.create_task(answer(await observations.get())))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class CheckedEnvironment(EnvironmentService):
    """An environment whose results are checked before the agent gets them."""

    def __init__(self, environment: EnvironmentService) -> None:
        self._environment = environment
        self._name = type(environment).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Like `EnvironmentService.reset`.

        Raises:
            EnvironmentFault: The result is not two values.
        """
        answer = await self._environment.reset(seed=seed, options=options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(
                f"{self._name}.reset returned {answer!r:.80}; it must return (observation, info)"
            )
        return answer

    async def step(self, action: Any) -> Step:
        """Like `EnvironmentService.step`.

        Raises:
            EnvironmentFault: The result is not five values.
        """
        answer = await self._environment.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFault(
                f"{self._name}.step returned {answer!r:.80}; it must return (observation, reward, "
                "terminated, truncated, info)"
            )
        return answer
