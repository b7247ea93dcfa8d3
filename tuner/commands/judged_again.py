"""Recorded rollouts judged again, by another judge, as a run judges those that it makes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner.config import RunConfig
from tuner.data.order import derive_seed
from tuner.errors import FunctionError
from tuner.functions.calling import call_group_judge, call_judge, judges_groups
from tuner.functions.outputs import JudgeOutput, StoredResponse
from tuner.rollout.failures import JudgeFailure, describe, of_judge
from tuner.traces import Outcome, Trace
from tuner.viewer.replay import JUDGED, MAX_RUNNING

if TYPE_CHECKING:
    from tuner.assembly.auxiliary import AuxiliaryModels

logger = logging.getLogger("tuner")


def was_judged(trace: Trace) -> bool:
    """Whether a judge was asked of a rollout, or had its turn. A reward function that failed inside
    the workflow has the judge's outcomes, and there is no response."""
    if not trace.final or trace.outcome is Outcome.COMPLETED:
        return trace.final
    asked = trace.outcome in JUDGED and bool(trace.seconds.get("judge"))
    return asked and not all(call.undelivered for call in trace.calls)


def asks_for_models(judge: Callable[..., Any]) -> bool:
    """Whether a judge is given the auxiliary models."""
    parameters = inspect.signature(judge).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "auxiliary_models" in parameters


@dataclass(eq=False)
class JudgeAgain:
    """Asks a judge of recorded rollouts, some of them at a time.

    Args:
        judge: Takes single responses, or those of a group.
        config: The run's: limits, retries, seed.
        auxiliary: The models that the judge gets.
    """

    judge: Callable[..., Any]
    config: RunConfig
    auxiliary: AuxiliaryModels

    def __post_init__(self) -> None:
        self._running = asyncio.Semaphore(MAX_RUNNING)

    async def of(self, traces: Sequence[Trace]) -> list[Trace]:
        """The traces, in order, with new rewards where a judge was asked before.

        Raises:
            FunctionError: The judge returned something else than an output, asked for a field that
                the task does not have, or for a model that the run does not have.
        """
        groups = defaultdict[tuple[int, int, int], list[int]](list)
        for place, trace in enumerate(traces):
            if was_judged(trace):
                alone = 0 if judges_groups(self.judge) else place
                groups[trace.id.step, trace.id.task, alone].append(place)
        found = list(traces)

        async def judge(places: Sequence[int]) -> None:
            mine = sorted((traces[place] for place in places), key=lambda trace: trace.id)
            given = dict(zip((t.id for t in mine), await self._verdicts(mine), strict=True))
            for place in places:
                found[place] = with_verdict(traces[place], given[traces[place].id])

        try:
            async with asyncio.TaskGroup() as group:
                for places in groups.values():
                    group.create_task(judge(places))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found

    async def _verdicts(self, traces: Sequence[Trace]) -> Sequence[JudgeOutput | JudgeFailure]:
        """Of rollouts of one task, or of one."""
        first, seed = traces[0], self.config.tuner.seed
        task, responses = dict(first.task), [StoredResponse(trace.response) for trace in traces]
        if judges_groups(self.judge):
            ask = partial(call_group_judge, self.judge, task=task, responses=responses)
            session, seed = f"{first.id}-judge", derive_seed(seed, first.id, "judge")
            found = await self._asked(ask, session, seed)
            return [found] * len(traces) if isinstance(found, JudgeFailure) else found
        alone = partial(call_judge, self.judge, task=task, response=responses[0])
        session = f"{first.id}-{first.attempt}"
        return [await self._asked(alone, session, derive_seed(seed, first.id, first.attempt))]

    async def _asked(
        self, ask: Callable[..., Coroutine[Any, Any, Any]], session: str, seed: int
    ) -> Any:
        """What the judge says, or how it failed as often as a rollout may be tried."""
        limit, tries = self.config.explorer.max_timeout, self.config.explorer.max_retry_times + 1
        async with self._running:
            for _ in range(tries):
                try:
                    with self.auxiliary.opened(session, seed) as models:
                        async with asyncio.timeout(limit) as deadline:
                            return await ask(auxiliary_models=models, logger=logger)
                except FunctionError:
                    raise
                except Exception as error:
                    failure = JudgeFailure(of_judge(error), describe(error, None))
                    if deadline.expired():
                        text = f"no verdict within {limit:g} s (explorer.max_timeout)"
                        failure = JudgeFailure(Outcome.JUDGE_TIMEOUT, text)
        return failure


def with_verdict(trace: Trace, verdict: JudgeOutput | JudgeFailure) -> Trace:
    """A trace as the run would have left it with this verdict; with the old one it is the same."""
    if isinstance(verdict, JudgeFailure):
        outcome, error = verdict
        return replace(trace, outcome=outcome, error=error, reward=None, feedback=None)
    numbers = (verdict.metrics or {}).items()
    given = replace(
        trace,
        metrics=trace.metrics | {name: value for name, value in numbers if math.isfinite(value)},
        feedback=verdict.feedback,
    )
    if not math.isfinite(verdict.reward):
        error = f"the judge gave reward {verdict.reward}; a reward must be a finite number"
        return replace(given, outcome=Outcome.INVALID_REWARD, error=error, reward=None)
    if trace.outcome is Outcome.COMPLETED:
        return replace(given, reward=verdict.reward)
    return replace(given, outcome=Outcome.COMPLETED, error=None, reward=verdict.reward)
