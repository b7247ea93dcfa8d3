"""A group whose rollouts are judged together, once the last of them has ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.functions.outputs import JudgeOutput
from tuner.rollout.failures import JudgeFailure
from tuner.rollout.runner import RolloutRunner
from tuner.traces import Outcome, RolloutId, Trace


@dataclass(eq=False)
class Panel:
    """Waits for the rollouts of a group, and has those judged that completed.

    Args:
        runner: Its judge takes groups.
        task: The group's.
        ids: The group's rollouts.
    """

    runner: RolloutRunner
    task: dict[str, Any]
    ids: Sequence[RolloutId]
    _ended: dict[RolloutId, tuple[list[Trace], Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._judged: asyncio.Future[dict[RolloutId, Trace]] = loop.create_future()

    async def run(self, id: RolloutId, make: Callable[..., Any]) -> list[Trace]:
        """All attempts at one rollout, the last with its verdict.

        Args:
            id: Which of the group's.
            make: Makes them, and gives `keep` the response.

        Raises:
            FunctionError: The judge returned something else than an output for each response.
        """
        responses: list[Any] = []
        attempts: list[Trace] = await make(keep=responses.append)
        self._ended[id] = attempts, responses[-1] if responses else None
        if len(self._ended) == len(self.ids):
            try:
                self._judged.set_result(await self._verdicts())
            except Exception as error:
                self._judged.set_exception(error)
        judged = (await self._judged).get(id)
        return attempts if judged is None else [*attempts[:-1], judged]

    async def _verdicts(self) -> dict[RolloutId, Trace]:
        """The last attempts of the rollouts that are judged."""
        last = {id: self._ended[id][0][-1] for id in sorted(self.ids)}
        completed = [id for id, trace in last.items() if trace.outcome is Outcome.COMPLETED]
        if not completed:
            return {}
        started = time.perf_counter()
        responses = [self._ended[id][1] for id in completed]
        found = await self.runner.judge_group(self.task, completed[0], responses)
        seconds = time.perf_counter() - started
        if isinstance(found, JudgeFailure):
            outputs: Sequence[JudgeOutput | JudgeFailure] = [found] * len(completed)
        else:
            outputs = found
        return {
            id: self._judged_trace(last[id], output, seconds)
            for id, output in zip(completed, outputs, strict=True)
        }

    def _judged_trace(
        self, trace: Trace, output: JudgeOutput | JudgeFailure, seconds: float
    ) -> Trace:
        took = {**trace.seconds, "judge": seconds}
        if isinstance(output, JudgeFailure):
            outcome, error = output
            return replace(trace, outcome=outcome, error=error, reward=None, seconds=took)
        metrics = {**trace.metrics, **self.runner.noted(output.metrics)}
        given = replace(trace, metrics=metrics, feedback=output.feedback, seconds=took)
        if math.isfinite(output.reward):
            return replace(given, reward=output.reward)
        error = f"the judge gave reward {output.reward}; a reward must be a finite number"
        return replace(given, outcome=Outcome.INVALID_REWARD, error=error, reward=None)


def panels_of(
    runner: RolloutRunner, wanted: Mapping[RolloutId, dict[str, Any]]
) -> dict[tuple[int, int], Panel]:
    """The groups among rollouts that are judged together, by step and task; none where each is
    judged alone."""
    if not runner.judges_groups:
        return {}
    groups = defaultdict[tuple[int, int], list[RolloutId]](list)
    for id in wanted:
        groups[id.step, id.task].append(id)
    return {key: Panel(runner, wanted[ids[0]], ids) for key, ids in groups.items()}
