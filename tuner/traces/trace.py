"""A rollout's calls, reward, metrics and outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tuner.traces.call import Call, Usage
from tuner.traces.reading import Count, Name


class Outcome(StrEnum):
    """How a rollout ended. None of these means reward 0."""

    COMPLETED = "completed"
    WORKFLOW_ERROR = "workflow_error"
    JUDGE_ERROR = "judge_error"
    JUDGE_TIMEOUT = "judge_timeout"
    TIMEOUT = "timeout"
    NO_CALLS = "no_calls"
    INVALID_REWARD = "invalid_reward"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    DIVERGED = "diverged"
    WORKER_DIED = "worker_died"


@dataclass(frozen=True, order=True)
class RolloutId:
    """Which run of which task this is; the order of a batch, whatever the order of arrival.

    Attributes:
        step: Training step, counted from 1; for an evaluation the step it belongs to.
        task: Index of the task within the step's batch.
        rollout: Index within the group.
        split: "train" or the name of an evaluation set.
    """

    step: Count
    task: Count
    rollout: Count
    split: Name = "train"

    def __str__(self) -> str:
        return f"{self.split}-{self.step}-{self.task}-{self.rollout}"


@dataclass(frozen=True)
class Origin:
    """Where a rollout that begins inside another one begins.

    Attributes:
        rollout, attempt: What it repeats up to the point.
        calls: How many calls of that, in order of commitment, lie before the point.
        token: How many sampled tokens of the call at the point do.
        diverged: How the agent left the script before the point, or None.
        left_at: The call of the other rollout at which that was.
    """

    rollout: RolloutId
    attempt: Count
    calls: Count
    token: Count = 0
    diverged: str | None = None
    left_at: Count | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Up to which call, and which of its tokens, it is the other rollout."""
        planned = self.calls, self.token
        return planned if self.left_at is None else min(planned, (self.left_at, 0))


@dataclass(frozen=True)
class FunctionResult:
    """What a function that is decorated with `tuner.recorded` returned in a rollout.

    Attributes:
        function: Its file's name without the ending, and its qualified name.
        arguments: By name, as JSON; what is no JSON is "<not JSON>".
        occurrence: How often the rollout had called it with these arguments before.
        value: What it returned.
        calls: How many calls of the rollout were committed when it did.
    """

    function: str
    arguments: dict[str, Any]
    occurrence: Count
    value: Any
    calls: Count


@dataclass(frozen=True)
class Trace:
    """Everything that one attempt at a rollout left behind.

    Attributes:
        id: Which rollout this is.
        task: The dataset row.
        calls: Committed calls of this attempt, in order of commitment.
        outcome: How the rollout ended.
        reward: The score, or None when the outcome gives none.
        metrics: The user's numbers from the workflow and the judge.
        response: The workflow's response as text, for people.
        feedback: What the judge said of it in words, or None.
        error: One line on what went wrong, or None.
        attempt: Which start of the workflow this was, from 1; one attempt, one session.
        final: False for an attempt that a retry replaced; its calls are kept, never trained.
        seconds: Time by part: "queue" (until there was room for it), "workflow", "judge",
            "generation" (time spent inside calls).
        started: Unix time at which the attempt began; 0 where nothing was begun.
        origin: Where it begins, if inside another rollout. The calls before that are there, as
            they were given back (`Call.replayed`).
        results: What recorded functions returned, in the order in which they did.
        foreign_from: Where another run recorded it, from whose samples this one goes on (`tuner
            rebase`), the first version of the weights that the two do not share: from there on
            `Call.versions` count the updates of the other run. None: this run sampled it.
    """

    id: RolloutId
    task: dict[str, Any]
    calls: tuple[Call, ...]
    outcome: Outcome
    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    response: str = ""
    feedback: str | None = None
    error: str | None = None
    attempt: Count = 1
    final: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    origin: Origin | None = None
    results: tuple[FunctionResult, ...] = ()
    foreign_from: Count | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled for this attempt."""
        return sum(call.sampled_tokens for call in self.calls)

    @property
    def replayed_tokens(self) -> int:
        """Tokens of its calls that another rollout's script gave."""
        return sum(call.replayed for call in self.calls)

    def is_foreign(self, versions: Sequence[int]) -> bool:
        """Whether weights that this run never had sampled one of some tokens with these versions,
        which rise."""
        return self.foreign_from is not None and versions[-1] >= self.foreign_from

    @property
    def usage(self) -> Usage:
        """What all calls read and wrote."""
        return sum((call.usage for call in self.calls), Usage())
