"""Whether a candidate is better than the serving weights: on held-out tasks, and with live
sessions.

Held-out tasks run with both: the same tasks and seeds. Each new live session gets an arm, and keeps
it while the trial lasts:

    candidate   the share `tuner.serving.canary`, on an engine with the candidate's weights
    serving     the others

Only sessions that were opened during the trial are compared, by the reward that they have when they
are first found ended and judged. After the trial, the candidate's sessions continue with the
serving weights.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any
from weakref import WeakValueDictionary

from rich.console import Console
from torch import Tensor

from tuner.config import RunConfig
from tuner.config.schema import PromotionSection
from tuner.engines import TrainingEngine
from tuner.errors import TrainingError
from tuner.gateway import Gateway, Session
from tuner.gateway.service import Service
from tuner.loop import evaluate_set
from tuner.rollouts import RolloutRunner, Rollouts
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory
from tuner.runs.metrics import evaluation_metrics
from tuner.runs.stack import Stack
from tuner.runs.statistics import Arm, Comparison, Decision, Plan
from tuner.serving.learning.ledger import Judgement, Ledger
from tuner.serving.learning.versions import Versions
from tuner.serving.serving_store import ServingStore
from tuner.traces import Trace, TraceStore


def comparison_of(rules: PromotionSection, *, share: float = 0.5) -> Comparison:
    """A comparison of a candidate with the serving weights, without rewards yet.

    Args:
        rules: Definition of a proof.
        share: The candidate's share of the sessions.
    """
    low, high = rules.reward_range
    return Comparison(
        Plan(
            effect=rules.effect,
            low=low,
            high=high,
            alpha=rules.level,
            margin=rules.margin,
            share=share,
        )
    )


@dataclass(frozen=True)
class Pairs:
    """The serving weights and a candidate on the same tasks.

    Attributes:
        rewards: For each task, by evaluation set and in order, the mean reward of the serving
            weights and of the candidate; only tasks without a failed rollout.
        failed: Number of tasks dropped because a rollout of the serving weights failed, or of the
            candidate.
        metrics: The candidate's, as in an evaluation of a run.
    """

    rewards: Sequence[tuple[float, float]]
    failed: tuple[int, int]
    metrics: Mapping[str, float]

    def decision(self, rules: PromotionSection) -> Decision:
        """The verdict. A candidate with which more tasks fail is not promoted whatever its
        rewards on the others are: a failure has no reward that could count against it."""
        comparison = comparison_of(rules)
        # The order of the rows may correlate with their difficulty.
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
        stack: Has a workflow, whose runner generates with the serving weights.
        tasks: Rows of each evaluation set, by name.
        directory: The directory for traces.
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
        self._running = config.concurrent_rollouts
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
        """Drop results of versions whose weights changed or were deleted, or were mixed with
        others."""
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
    """The mean reward of each task's rollouts; None if one of them has none."""
    rewards: dict[int, list[float | None]] = {}
    for trace in traces:
        if trace.final:
            rewards.setdefault(trace.id.task, []).append(trace.reward)
    return {
        task: None if None in of_task else fmean(one for one in of_task if one is not None)
        for task, of_task in rewards.items()
    }


class Canary:
    """The current trial, if there is one.

    Args:
        ledger, store: The server's.
        versions: Loads the candidate's weights.
        service: The serving engine and settings.
        rules: Definition of a proof.
        share: The candidate's share of new sessions.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: ServingStore,
        versions: Versions,
        service: Service,
        rules: PromotionSection,
        *,
        share: float,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._versions = versions
        self._service = service
        self._share = share
        self._rules = rules
        self._live: Comparison | None = None
        self._tried: Service | None = None
        self._given: WeakValueDictionary[str, Session] = WeakValueDictionary()  # the candidate's
        self._unsaid: dict[str, tuple[int, Arm]] = {}  # arms of sessions without a call
        self.candidate: int | None = None

    async def begin(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Start the trial of a version, or resume it with the counts of before."""
        engine = await self._versions.try_out(version, tensors)
        self._tried = self._tried or replace(self._service, engine=engine)
        self._live = comparison_of(self._rules, share=self._share)
        for one in self._ledger.counted(version):
            self._live.add(one.arm, one.reward)
        self.candidate = version

    def end(self) -> None:
        """Let the candidate's sessions continue with the serving weights."""
        self._live = self.candidate = None
        for session in self._given.values():
            session.service = self._service
        self._given.clear()
        self._unsaid.clear()

    def placed(self, session: Session, *, new: bool) -> None:
        """Give a session its arm, before its first call or when it is restored.

        Args:
            new: Whether it has no call yet; a session that began before the trial has no arm.
        """
        found = self._ledger.arm(session.id)
        if found is None and new and self.candidate is not None:
            arm: Arm = "candidate" if _place(session.id) < self._share else "serving"
            found = self._unsaid[session.id] = self.candidate, arm
        if found == (self.candidate, "candidate"):
            assert self._tried is not None, "begin() makes it"
            session.service = self._tried
            self._given[session.id] = session

    def noted(self, session_id: str) -> None:
        """A call of a session was stored; with its first call its arm is, too."""
        found = self._unsaid.pop(session_id, None)
        if found is not None and found[0] == self.candidate:
            self._ledger.assign(session_id, *found)

    def look(self) -> Decision | None:
        """Count newly judged sessions, once each; returns the verdict if there were any."""
        if self._live is None or self.candidate is None:
            return None
        found = self._judged(self.candidate)
        if not found:
            return None
        self._ledger.count(found)
        for one in found:
            self._live.add(one.arm, one.reward)
        return self._live.decision()

    @property
    def decision(self) -> Decision | None:
        """The verdict of what was counted, if there is a trial."""
        return None if self._live is None else self._live.decision()

    def _judged(self, candidate: int) -> list[Judgement]:
        found = []
        for id_, arm in self._ledger.uncounted(candidate).items():
            try:
                session = self._store.session(id_)
            except LookupError:  # it was deleted
                continue
            if session.ended is not None and session.reward is not None:
                found.append(Judgement(id_, arm, session.reward))
        return found


def _place(session_id: str) -> float:
    """A number in [0, 1) from a session's id, evenly distributed."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
