"""Agents with queues: observations go out, answers come in, the agent owns its tokens.

agent ──▶ obs_queue: (qid, token_ids, gconfig) ──▶ engine ──▶ act_queue ──▶ agent
  │  ▲
  ▼  │ observation, reward, terminated, truncated, info
environment
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tuner.areal.engine import SessionEngine
from tuner.areal.requests import GenerationHyperparameters
from tuner.areal.samples import SequenceSample
from tuner.engines.base import Generation
from tuner.errors import FunctionError, TunerError

Observation: TypeAlias = tuple[str, list[int], GenerationHyperparameters]
Step: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]


class EnvironmentFault(TunerError):
    """An environment gave something that is no answer of an environment."""


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
        """Act once.

        Returns:
            Observation, reward, whether the episode has ended, whether it was cut off, and info.
        """

    async def close(self) -> None:  # noqa: B027  # most environments hold nothing
        """Let go of what the environment holds."""


class Agent(ABC):
    """An agent that asks for answers through queues. One instance serves all rollouts, also at the
    same time."""

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
            env: The environment; its answers are checked.
            obs_queue: Takes `(qid, token_ids, gconfig)`.
            act_queue: Gives one bundle for each observation, in their order.

        Returns:
            `SequenceSample`s, or dicts of tensors as a token-level workflow returns them; an empty
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
        logprobs: Of every token of `seqs` but the first, 0 at prompt tokens; shape [P + T - 1].
        no_eos: Whether each answer was cut off.
        version_start: Updates that the weights had seen at each answer's first token.
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
    """Checks observations where they are put, and copies their ids, which agents go on with."""

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
    """Answer observations until cancelled: all at once, in their order.

    Raises:
        As `SessionEngine.agenerate`.
    """
    begun: asyncio.Queue[asyncio.Task[BundledGenerationOutputs]] = asyncio.Queue()

    async def answer(observation: Observation) -> BundledGenerationOutputs:
        qid, token_ids, gconfig = observation
        return _bundle(qid, token_ids, await engine.sample(token_ids, gconfig))

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


def _bundle(
    qid: str, prompt_ids: list[int], generations: Sequence[Generation]
) -> BundledGenerationOutputs:
    return BundledGenerationOutputs(
        qid=qid,
        prompt_ids=prompt_ids,
        output_ids=[list(g.completion_ids) for g in generations],
        seqs=[[*prompt_ids, *g.completion_ids] for g in generations],
        logprobs=[[0.0] * (len(prompt_ids) - 1) + list(g.logprobs) for g in generations],
        no_eos=[g.finish_reason == "length" for g in generations],
        version_start=[g.versions[0] for g in generations],
        version_end=[g.versions[-1] for g in generations],
    )


class CheckedEnvironment(EnvironmentService):
    """An environment whose answers are looked at before the agent sees them."""

    def __init__(self, environment: EnvironmentService) -> None:
        self._environment = environment
        self._name = type(environment).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As `EnvironmentService.reset`.

        Raises:
            EnvironmentFault: The answer is not two values.
        """
        answer = await self._environment.reset(seed=seed, options=options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(
                f"{self._name}.reset returned {answer!r:.80}; it returns (observation, info)"
            )
        return answer

    async def step(self, action: Any) -> Step:
        """As `EnvironmentService.step`.

        Raises:
            EnvironmentFault: The answer is not five values.
        """
        answer = await self._environment.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFault(
                f"{self._name}.step returned {answer!r:.80}; it returns (observation, reward, "
                "terminated, truncated, info)"
            )
        return answer
