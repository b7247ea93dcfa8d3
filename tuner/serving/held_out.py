"""The held-out tasks, tried with what serves and with a candidate: the same tasks and seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console

from tuner.assembly.stack import Stack
from tuner.config import RunConfig
from tuner.config.serving import PromotionSection
from tuner.engines import TrainingEngine
from tuner.errors import TrainingError
from tuner.gateway import Gateway
from tuner.loop import evaluate_set
from tuner.rollout import RolloutRunner, Rollouts
from tuner.run.console import ConsoleMonitor
from tuner.run.directory import RunDirectory
from tuner.run.metrics import evaluation_metrics
from tuner.run.proof import Decision
from tuner.serving.canary import comparison_of
from tuner.traces import Trace, TraceStore


@dataclass(frozen=True)
class Pairs:
    """What serves and a candidate on the same tasks.

    Attributes:
        rewards: Of each task, by evaluation set and in order, the mean reward of what serves and of
            the candidate; only tasks of which no rollout failed.
        failed: Tasks left out because a rollout of what serves failed, or of the candidate.
        metrics: The candidate's, as an evaluation of a run has them.
    """

    rewards: Sequence[tuple[float, float]]
    failed: tuple[int, int]
    metrics: Mapping[str, float]

    def decision(self, rules: PromotionSection) -> Decision:
        """What they prove. A candidate with which more tasks fail is not promoted whatever its
        rewards on the others are: a failure has no reward that could count against it."""
        comparison = comparison_of(rules)
        # The order of the rows may say how hard they are.
        for serving, candidate in random.Random(len(self.rewards)).sample(
            list(self.rewards), len(self.rewards)
        ):
            comparison.add_pair(serving, candidate)
        found, (before, now) = comparison.decision(), self.failed
        if found.verdict != "promote" or now <= before:
            return found
        why = f"not yet: {now} held-out tasks failed with the candidate, {before} with what serves"
        return replace(found, verdict="not yet", text=f"{why}; else {found.text}")


class HeldOut:
    """Evaluations by version, each done once: its traces are in the run directory.

    Args:
        config: The effective configuration.
        stack: Has a workflow, whose runner generates with what serves.
        tasks: Rows of each evaluation set, by name.
        directory: Where traces go.
    """

    def __init__(
        self,
        config: RunConfig,
        stack: Stack,
        tasks: Mapping[str, Sequence[dict[str, Any]]],
        directory: RunDirectory,
    ) -> None:
        assert stack.runner is not None, "there is no evaluation without a workflow"
        self._config = config
        self._stack = stack
        self._tasks = tasks
        self._store = TraceStore(directory.traces, stack.model.config.get_text_config().vocab_size)
        self._console = ConsoleMonitor(1, Console(quiet=True))
        self._running = config.explorer.runner_per_model
        self._serving = Rollouts(stack.runner, self._store, max_running=self._running)

    async def compare(self, serving: int, candidate: int, engine: TrainingEngine) -> Pairs:
        """Both versions on every task.

        Args:
            serving: The version that serves.
            candidate: The version that `engine` generates with.
        """
        gateway = self._gateway(engine)
        try:
            tried = self._rollouts(gateway)
            mine = {name: await self._try(name, candidate, tried) for name in self._tasks}
            theirs = {name: await self._try(name, serving, self._serving) for name in self._tasks}
        finally:
            await gateway.aclose()
        if engine.failure is not None:
            raise TrainingError(f"held-out tasks: {engine.failure}")
        pairs, failed = [], (0, 0)
        for name in self._tasks:
            before, now = _by_task(theirs[name]), _by_task(mine[name])
            both = [(before[task], now[task]) for task in sorted(before)]
            pairs += [(a, b) for a, b in both if a is not None and b is not None]
            failed = (
                failed[0] + sum(a is None for a, _ in both),
                failed[1] + sum(b is None for _, b in both),
            )
        metrics: dict[str, float] = {}
        for name, traces in mine.items():
            passed = self._config.tuner.pass_reward
            metrics |= evaluation_metrics(name, traces, pass_reward=passed)
        return Pairs(pairs, failed, metrics)

    def forget(self, versions: Iterable[int]) -> None:
        """Weights of these numbers are new or gone, or what was tried was not theirs alone."""
        for version in versions:
            for name in self._tasks:
                self._store.path(name, version).unlink(missing_ok=True)

    def _gateway(self, engine: TrainingEngine) -> Gateway:
        service = self._stack.gateway.service
        return Gateway(
            engine, service.renderer, model_name=service.model_name, reasoning=service.reasoning
        )

    def _rollouts(self, gateway: Gateway) -> Rollouts:
        runner: RolloutRunner | None = self._stack.runner
        assert runner is not None
        own = replace(runner, gateway=gateway)
        return Rollouts(own, self._store, max_running=self._running)

    async def _try(self, name: str, version: int, rollouts: Rollouts) -> list[Trace]:
        return await evaluate_set(
            self._config, name, self._tasks[name], rollouts, self._console, step=version
        )


def _by_task(traces: Sequence[Trace]) -> dict[int, float | None]:
    """Of each task the mean reward of its rollouts; None where one of them has none."""
    rewards: dict[int, list[float | None]] = {}
    for trace in traces:
        if trace.final:
            rewards.setdefault(trace.id.task, []).append(trace.reward)
    return {
        task: None if None in of_task else fmean(one for one in of_task if one is not None)
        for task, of_task in rewards.items()
    }
