"""Token-level workflows as the workflow functions that everything else runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.areal.engine import InferenceEngine, SessionEngine
from tuner.areal.settle import Settled, settle
from tuner.areal.tensors import Trajectory, read_trajectories
from tuner.chat_models.plain import SessionHandle
from tuner.errors import FunctionError
from tuner.functions.calling import is_async
from tuner.functions.outputs import Rejected, WorkflowOutput
from tuner.gateway import Session
from tuner.traces import Call
from tuner.training.batch import untrainable


class RolloutWorkflow(ABC):
    """A workflow that owns its tokens. Deriving from it is a matter of taste: any object with
    `arun_episode` is taken."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        """Run one episode.

        Args:
            engine: Generates; what it samples is recorded.
            data: One row of the dataset.

        Returns:
            The tensors of `tuner.areal.tensors`, or None to reject the episode.
        """


@dataclass(frozen=True)
class Episode:
    """What one episode left behind.

    Attributes:
        trajectories: As the workflow returned them.
        calls: Everything that was sampled, in order of commitment.
        settled: Which call sampled which trained token.
        reward: The rollout's.
    """

    trajectories: tuple[Trajectory, ...]
    calls: tuple[Call, ...]
    settled: Settled
    reward: float


class TokenWorkflow:
    """A token-level workflow as a workflow function: `tune(TokenWorkflow(mine), dataset=...)`.

    One trajectory's reward is the rollout's. Of several trajectories each has the reward of its
    own calls, and the rollout's is their mean; in a group in which one rollout has several, a
    rollout with one is compared by its calls as well. Sampled tokens that no trajectory trains are
    in the trace and counted as dropped: `masked`, or `excluded_call` where it is a whole call.

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

    async def __call__(self, task: dict[str, Any], model: SessionHandle) -> WorkflowOutput:
        """Run one episode as a rollout.

        Raises:
            Rejected: The workflow returned None.
            FunctionError: What it returned cannot be trained as it says.
        """
        episode = await self.episode(task, model.session)
        return WorkflowOutput(reward=episode.reward)

    async def episode(self, task: dict[str, Any], session: Session) -> Episode:
        """Run one episode and give its calls the credit that its trajectories name.

        Raises:
            As `__call__`.
        """
        assert self._run is not None
        value = await self._run(SessionEngine(session), task)
        if value is None:
            raise Rejected(f"{self._source} returned None")
        return settled_episode(read_trajectories(value, self._source), session, self._source)


def settled_episode(trajectories: Sequence[Trajectory], session: Session, source: str) -> Episode:
    """Give a session's calls the credit that trajectories name.

    Raises:
        FunctionError: There are no trajectories, or they cannot be trained as they say.
    """
    if not trajectories:
        raise FunctionError(f"{source} returned no trajectory; return None to reject the episode")
    recorded = session.recorded_calls()
    calls = tuple(record.call for record in recorded)
    settled = settle(trajectories, calls, source)
    for record, entry in zip(recorded, settled.trained, strict=True):
        if entry is None:
            record.exclude()
            continue
        index, places = entry
        for start, stop in _gaps(places, len(record.call.completion_ids)):
            record.mask(start, stop)
        if len(trajectories) > 1:
            record.reward = trajectories[index].reward
    if len(trajectories) > 1:
        for call, reward in _ends(trajectories, settled, calls):
            recorded[call].gained = reward
    mean = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
    return Episode(tuple(trajectories), calls, settled, mean)


def _ends(
    trajectories: Sequence[Trajectory], settled: Settled, calls: Sequence[Call]
) -> list[tuple[int, float]]:
    """The last call of each trajectory that can be trained, and the trajectory's reward."""
    ends: list[tuple[int, float]] = []
    for trajectory, owners in zip(trajectories, settled.owners, strict=True):
        own = [call for call in owners if call is not None and untrainable(calls[call]) is None]
        if own:
            ends.append((own[-1], trajectory.reward))
    return ends


def _gaps(places: frozenset[int], length: int) -> list[tuple[int, int]]:
    """The stretches [from, to) of 0 .. length - 1 that are not in `places`."""
    gaps: list[tuple[int, int]] = []
    for place in range(length):
        if place in places:
            continue
        if gaps and gaps[-1][1] == place:
            gaps[-1] = (gaps[-1][0], place + 1)
        else:
            gaps.append((place, place + 1))
    return gaps
