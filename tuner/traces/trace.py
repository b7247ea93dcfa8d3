"""A rollout's calls, reward, metrics and outcome."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
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
    """Identifies a rollout; also its position in a batch, whatever the order of arrival.

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
    """The point of another rollout at which a rollout begins.

    Attributes:
        rollout, attempt: The rollout that it repeats up to this point.
        calls: Number of its calls before the point, in order of commitment.
        token: Number of sampled tokens before the point in the call there.
        diverged: How the agent left the script before the point, or None.
        left_at: The call of the other rollout at which it did.
    """

    rollout: RolloutId
    attempt: Count
    calls: Count
    token: Count = 0
    diverged: str | None = None
    left_at: Count | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Number of shared calls, and of shared tokens in the next call."""
        planned = self.calls, self.token
        return planned if self.left_at is None else min(planned, (self.left_at, 0))


@dataclass(frozen=True)
class FunctionResult:
    """Result of a function decorated with `tuner.recorded` in a rollout.

    Attributes:
        function: Its file's name without the ending, and its qualified name.
        arguments: By name, as JSON; other values are "<not JSON>".
        occurrence: Number of earlier calls with these arguments in the rollout.
        value: The returned value.
        calls: Number of the rollout's calls that were committed by then.
    """

    function: str
    arguments: dict[str, Any]
    occurrence: Count
    value: Any
    calls: Count


@dataclass(frozen=True)
class Trace:
    """Complete record of one attempt at a rollout.

    Attributes:
        id: The rollout.
        task: The dataset row.
        calls: Committed calls of this attempt, in order of commitment.
        outcome: How the rollout ended.
        reward: The score, or None when the outcome gives none.
        metrics: The user's numbers from the workflow and the judge.
        response: The workflow's response as text, for people.
        feedback: The judge's comment, or None.
        error: The error in one line, or None.
        attempt: Number of this start of the workflow, from 1; one attempt, one session.
        final: False for an attempt that a retry replaced; its calls are kept, never trained.
        seconds: Time by part: "queue" (until there was a free slot), "workflow", "judge",
            "generation" (time spent inside calls).
        started: Unix time at which the attempt began; 0 if nothing began.
        origin: The point of another rollout at which it begins, or None. It includes the calls
            before that (`Call.replayed`).
        results: Results of recorded functions, in order of return.
        foreign_from: For an attempt recorded by the run that this one continues (`tuner rebase`),
            the first version of the weights that the two runs do not share: from there on
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
        """Number of tokens that the engine sampled for this attempt."""
        return sum(call.sampled_tokens for call in self.calls)

    @property
    def replayed_tokens(self) -> int:
        """Number of tokens of its calls that another rollout's script gave."""
        return sum(call.replayed for call in self.calls)

    def is_foreign(self, versions: Sequence[int]) -> bool:
        """Whether one of these versions, which rise, belongs to weights that this run never had."""
        return self.foreign_from is not None and versions[-1] >= self.foreign_from

    @property
    def usage(self) -> Usage:
        """Number of prompt and completion tokens of all calls."""
        return sum((call.usage for call in self.calls), Usage())


def untrainable(call: Call) -> str | None:
    """Why a call of a rollout that is used is not trained, or None."""
    if call.invalid is not None:
        return "invalid_call"
    if call.undelivered:
        return "undelivered_call"
    if call.excluded:
        return "excluded_call"
    if call.sampling.temperature == 0:
        return "greedy_call"
    return None


def without_vote(trace: Trace, left_out: Callable[[Call], str | None] = untrainable) -> str | None:
    """Why the reward of a rollout is compared with no other, or None: a token of it can be trained.

    Args:
        left_out: Why a call is not trained, or None.

    Returns:
        The reason why most of its tokens are not trained.
    """
    tokens: Counter[str] = Counter()
    for call in trace.calls:
        reason = left_out(call)
        if reason is None and call.stretches:
            return None
        tokens[reason or "masked"] += call.sampled_tokens
    (reason, count), *_ = tokens.most_common(1) or [("", 0)]
    return reason if count else "nothing_sampled"


# Beginnings of tool results that frameworks use for failures.
_FAILED = ("error", "an error occurred", "traceback (most recent call last)", "exception:")


def failed_result(text: str) -> bool:
    """Whether a tool's result says that the tool failed: it begins like an error of agent
    frameworks, or is a JSON object with an `error`."""
    start = text.lstrip()
    if start.startswith("{"):
        try:
            return bool(json.loads(start).get("error"))
        except ValueError:
            return False
    return start[:40].lower().startswith(_FAILED)
