"""Token-level workflows: their requests to an engine, and the results of their episodes."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

from tuner.areal.hyperparameters import GenerationHyperparameters
from tuner.areal.trajectories import Owners, Trajectory, read_trajectories, settle
from tuner.engines.base import Generation
from tuner.errors import ConfigError, FunctionError
from tuner.gateway.sessions import Access
from tuner.rollouts.without_framework import SessionHandle
from tuner.tasks.functions import Rejected, WorkflowOutput, is_async
from tuner.traces import untrainable

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ModelRequest:
    """A request for one answer.

    Attributes:
        input_ids: The prompt, shape [P]. Copied: the list may grow afterwards.
        gconfig: Sampling settings.
        rid: The trajectory of the request. AReaL keeps requests of one trajectory on one server;
            here there is one engine, whose prefix cache finds the earlier turns by their ids.
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", list(self.input_ids))


@dataclass(frozen=True)
class ModelResponse:
    """One answer, exactly as sampled.

    Attributes:
        input_tokens: The prompt, shape [P].
        output_tokens: Sampled ids with the end-of-sequence token, shape [T].
        output_logprobs: Log-probs of the sampled ids under the distribution that was sampled
            from, shape [T].
        output_versions: Version (number of updates) of the weights that sampled each token, shape
            [T].
        stop_reason: "length" if the answer was cut off, else "stop".
        latency: Seconds from request to answer.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float = 0.0

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class InferenceEngine(Protocol):
    """The engine of a token-level workflow."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer."""


class SessionEngine:
    """The engine of an episode: the gateway's, through the rollout's own session.

    Args:
        session: Records the answers as calls.

    Attributes:
        tokenizer: The model's.
    """

    def __init__(self, session: Access) -> None:
        self._session = session

    @property
    def tokenizer(self) -> Any:
        return self._session.tokenizer

    def get_version(self) -> int:
        """Version (number of updates) of the weights that sample the next token."""
        return self._session.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer and record it.

        Raises:
            ConfigError: A setting is out of its range, or not supported.
            RequestError: The prompt is empty, unknown to the model or too long; or the rollout has
                ended or used up its limits.
            EngineError: The engine failed.
        """
        if req.gconfig.n_samples != 1:
            raise ConfigError(
                f"gconfig.n_samples is {req.gconfig.n_samples}, but agenerate gives one answer: "
                "use gconfig.new(n_samples=1) and gather, or group_size"
            )
        started = time.perf_counter()
        (generation,) = await self.sample(req.input_ids, req.gconfig)
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=list(generation.completion_ids),
            output_logprobs=list(generation.logprobs),
            output_versions=list(generation.versions),
            stop_reason=generation.finish_reason,
            latency=time.perf_counter() - started,
        )

    async def sample(
        self, prompt_ids: list[int], gconfig: GenerationHyperparameters
    ) -> tuple[Generation, ...]:
        """Sample `gconfig.n_samples` answers to one prompt, each a call of the trace.

        Raises:
            ConfigError, RequestError, EngineError: Like `agenerate`.
        """
        wanted = set(gconfig.stop_token_ids)
        if wanted and (unknown := wanted - self._session.end_ids):
            ends = sorted(self._session.end_ids)
            raise ConfigError(
                f"gconfig.stop_token_ids has {sorted(unknown)}, but this engine ends an answer "
                f"only at {ends}; remove them, or put their text into gconfig.stop"
            )
        room = gconfig.max_tokens - len(prompt_ids)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens and gconfig.max_tokens is "
                f"{gconfig.max_tokens}: no room for an answer"
            )
        return await self._session.complete_tokens(
            prompt_ids,
            n=gconfig.n_samples,
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k,
            max_tokens=min(gconfig.max_new_tokens, room),
            stop=gconfig.stop,
        )


class RolloutWorkflow(ABC):
    """A workflow that manages its tokens. Deriving from it is optional: any object with
    `arun_episode` works."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        """Run one episode.

        Args:
            engine: Generates, and records what it samples.
            data: One row of the dataset.

        Returns:
            The tensors of `tuner.areal.trajectories`, or None to reject the episode.
        """


@dataclass(frozen=True)
class Episode:
    """Result of one episode.

    Attributes:
        trajectories: Those returned by the workflow.
        reward: The rollout's.
    """

    trajectories: tuple[Trajectory, ...]
    owners: Owners
    reward: float


class EpisodeWorkflow(ABC):
    """A workflow function whose episodes name their trajectories: `tune()` calls it, and an
    explicit training loop requests its episodes."""

    @abstractmethod
    async def episode(self, task: dict[str, Any], session: Access) -> Episode:
        """Run one episode and give its calls the credit of its trajectories.

        Raises:
            Rejected: The agent rejects it.
            FunctionError: Its result cannot be trained as declared.
        """

    async def __call__(self, task: dict[str, Any], model: SessionHandle) -> WorkflowOutput:
        """Run one episode as a rollout; raises like `episode`."""
        return WorkflowOutput(reward=(await self.episode(task, model.session)).reward)


class TokenWorkflow(EpisodeWorkflow):
    """A token-level workflow as a workflow function: `tune(TokenWorkflow(mine), dataset=...)`.

    The reward of a single trajectory is the rollout's. With several trajectories each has the
    reward of its calls, and the rollout's is their mean; if one rollout of a group has several,
    a rollout with one is also compared by its calls. Sampled tokens that no trajectory trains are
    in the trace and counted as dropped: `masked`, or `excluded_call` for a whole call.

    Args:
        workflow: An object with `async arun_episode(engine, data)`.

    Raises:
        FunctionError: It has none.
    """

    def __init__(self, workflow: Any) -> None:
        self._run = getattr(workflow, "arun_episode", None)
        self._source = f"{type(workflow).__name__}.arun_episode"
        if isinstance(workflow, type):
            raise FunctionError(f"{workflow.__name__} is a class: pass an instance of it")
        if self._run is None or not is_async(self._run):
            raise FunctionError(
                f"{type(workflow).__name__} has no async arun_episode(engine, data): a token-level "
                "workflow needs one"
            )

    async def episode(self, task: dict[str, Any], session: Access) -> Episode:
        """Like `EpisodeWorkflow.episode`; None rejects."""
        assert self._run is not None
        value = await self._run(SessionEngine(session), task)
        if value is None:
            raise Rejected(f"{self._source} returned None")
        return settled_episode(read_trajectories(value, self._source), session, self._source)


def settled_episode(trajectories: Sequence[Trajectory], session: Access, source: str) -> Episode:
    """Give a session's calls the credit of the trajectories.

    Raises:
        FunctionError: There are no trajectories, or they cannot be trained as declared.
    """
    if not trajectories:
        raise FunctionError(f"{source} returned no trajectory; return None to reject the episode")
    recorded = session.calls_so_far()
    calls = tuple(record.call for record in recorded)
    all_owners, trained = settle(trajectories, calls, source)
    for record, entry in zip(recorded, trained, strict=True):
        if entry is None:
            record.exclude()
            continue
        index, places = entry
        edges = [-1, *sorted(places), len(record.call.completion_ids)]
        for before, after in pairwise(edges):
            if after - before > 1:
                record.mask(before + 1, after)
        if len(trajectories) > 1:
            record.reward = trajectories[index].reward
    if len(trajectories) > 1:
        for trajectory, owners in zip(trajectories, all_owners, strict=True):
            own = [call for call in owners if call is not None and untrainable(calls[call]) is None]
            if own:
                recorded[own[-1]].gained = trajectory.reward
    mean = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
    return Episode(tuple(trajectories), all_owners, mean)
