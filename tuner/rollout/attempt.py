"""One start of a workflow: what is known of it so far, and the trace that it leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.errors import FunctionError
from tuner.functions.outputs import response_text
from tuner.gateway.script import Divergence, Script
from tuner.traces import Call, FunctionResult, Origin, Outcome, RolloutId, Trace


@dataclass(frozen=True)
class Again:
    """Another rollout, inside of which one begins.

    Attributes:
        trace: That rollout.
        root: The rollout and the attempt of which its beginning is, whose seed its functions get.
        calls: How many of its calls, in order of commitment, lie before the point.
        token: How many sampled tokens of the next one do.
        ends: Whether it ends where it diverges.
    """

    trace: Trace
    root: tuple[RolloutId, int]
    calls: int
    token: int = 0
    ends: bool = False

    def script(self) -> Script:
        """What one attempt is answered from; raises TunerError where there is no such point."""
        return Script(self.trace, self.calls, self.token, ends=self.ends)

    def origin(self, left: Divergence | None) -> Origin:
        """As a trace has it."""
        return Origin(
            self.trace.id,
            self.trace.attempt,
            self.calls,
            self.token,
            diverged=None if left is None else str(left),
            left_at=None if left is None else left.call,
        )


@dataclass
class Attempt:
    """What is known of an attempt so far.

    Args:
        id, task: Which rollout it is of.
        number: Which attempt, from 1.
    """

    id: RolloutId
    task: dict[str, Any]
    number: int
    outcome: Outcome = Outcome.COMPLETED
    reward: float | None = None
    error: str | None = None
    response: Any = None
    feedback: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    workflow_seconds: float = 0.0
    judge_seconds: float = 0.0
    origin: Origin | None = None
    started: float = field(default_factory=time.time)

    def check_reward(self, *, judged: bool, needed: bool) -> None:
        """Whether there is one that can be trained.

        Raises:
            FunctionError: There is none, and nobody is left to give one.
        """
        if self.reward is None:
            if not needed:
                return
            # `as_judge_output` refuses a judge without a reward, so only the workflow gets here.
            raise FunctionError(
                "there is no reward: no judge was given and the workflow returned WorkflowOutput("
                "reward=None); set `reward` in the workflow or pass judge_func"
            )
        if not math.isfinite(self.reward):
            who = "judge" if judged else "workflow"
            self.outcome = Outcome.INVALID_REWARD
            self.error = f"the {who} gave reward {self.reward}; a reward must be a finite number"

    def follow(self, again: Again, script: Script) -> None:
        """Note where it began, and whether it left the script before the point."""
        found = script.end()
        self.origin = again.origin(found)
        if found is not None and again.ends:
            self.outcome = Outcome.DIVERGED
            self.error = f"it repeats {again.trace.id} and left it {found}"

    def trace(
        self,
        calls: Sequence[Call],
        *,
        results: Sequence[FunctionResult],
        generation: float,
        needs_calls: bool,
    ) -> Trace:
        """What it leaves, once its session is sealed.

        Args:
            calls, results: The session's.
            generation: Seconds spent inside them.
            needs_calls: Whether it has failed where it read no answer.
        """
        unread = all(call.undelivered for call in calls) and needs_calls
        if self.outcome is Outcome.COMPLETED and unread:
            self.outcome = Outcome.NO_CALLS
            self.error = (
                "the workflow read no answer of `model` to its end: there is nothing to train"
                if calls
                else "the workflow never called `model`: there is nothing to train"
            )
        return Trace(
            id=self.id,
            task=self.task,
            calls=tuple(calls),
            outcome=self.outcome,
            reward=self.reward if self.outcome is Outcome.COMPLETED else None,
            metrics=self.metrics,
            response=response_text(self.response),
            feedback=self.feedback,
            error=self.error,
            attempt=self.number,
            started=self.started,
            seconds={
                "workflow": self.workflow_seconds,
                "judge": self.judge_seconds,
                "generation": generation,
            },
            origin=self.origin,
            results=tuple(results),
        )
