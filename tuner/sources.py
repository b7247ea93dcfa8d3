"""What a step trains on, wherever it comes from; and the rollouts of the run's own tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tuner.algorithms.spec import ADVANTAGES
from tuner.assembly.history_batches import (
    penalty_of,
)
from tuner.assembly.parameters import selection
from tuner.config import RunConfig
from tuner.data.curriculum import Curriculum
from tuner.rollout import Rollouts
from tuner.rollout.batch_log import BatchLog
from tuner.rollout.branching import branching_of
from tuner.rollout.groups import TrainingGroups
from tuner.run.metrics import (
    RECOMPUTED,
    batch_metrics,
    has_signal,
    metrics_by_field,
    reasoning_notice,
    rollout_metrics,
    staleness_metrics,
    time_split,
)
from tuner.run.notices import CallSettings, Notices, diagnosis, quiet_warning, untrained
from tuner.run.rebased import Rebased, sentences
from tuner.run.record import RunRecord
from tuner.traces import Outcome, Trace
from tuner.training import (
    Batch,
    Effective,
    PolicyTrainer,
    RecordedBatch,
    TeacherPrompt,
    build_batch,
)

Task = dict[str, Any]
Weigh = Callable[[Batch], Awaitable[Effective]]
"""What the samples of a batch are worth to the weights that it trains."""


@dataclass(frozen=True)
class Found:
    """What a step trains on, and what there is to say of it before it is trained.

    Attributes:
        batch: Rows with rewards, or rows of recorded data; may be empty of rollouts.
        metrics: By name.
        traces: Of rollouts every attempt; None for recorded data.
        worth: Of samples of another run's weights, what they are worth to those that are trained.
    """

    batch: Batch | RecordedBatch
    metrics: dict[str, float]
    traces: Sequence[Trace] | None = None
    worth: Effective | None = None

    def seconds(self, idle: float, training: float, sync: float) -> dict[str, float]:
        """Where the time of a step went: waiting for it, its update, giving the engine weights."""
        whole = idle + training + sync
        if self.traces is None:
            return {
                "time/training": whole,
                "tokens_per_second": self.batch.trained_tokens / whole,
            }
        assert isinstance(self.batch, Batch), "rows of recorded data are not rollouts"
        split = time_split(self.traces or (), idle, training, sync)
        return {**split, "tokens_per_second": self.batch.sampled_tokens / whole}


class Source(Protocol):
    """Where a step's training data comes from."""

    rows: Mapping[str, int] = {}
    """Of recorded data how many rows are used, and how many are left out by which reason."""

    async def take(self, step: int, version: int, weigh: Weigh) -> Found:
        """What step `step` trains, whose weights have seen `version` updates."""

    def advance(self, step: int) -> dict[str, float]:
        """Step `step` is trained; metrics of what is under way."""
        return {}

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        """The loss of what is recorded and not trained; none where nothing is held out."""
        return {}

    def nothing_left(self, metrics: Mapping[str, float]) -> str | None:
        """Why the run is complete before its last step; None where there is something to learn.

        Args:
            metrics: Those of a step that is not logged yet; empty: all are.
        """
        return None

    def diagnosis(self, *, without_update: bool) -> str | None:
        """Why the run has to stop, after a step is logged; None where it continues, which is said
        where the latest steps had nothing to learn from.

        Args:
            without_update: The run has come to its end, and the weights are what they were.
        """
        return None

    async def close(self) -> None:
        """End what is under way."""


class RolloutSource(Source):
    """Rollouts of the run's own tasks, collected ahead where that is allowed.

    Args:
        context: Tokens of prompt and answer together, at most.
    """

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        tasks: Sequence[Task],
        rollouts: Rollouts,
        teacher_prompt: TeacherPrompt,
        context: int,
    ) -> None:
        self._config = config
        self._teacher_prompt = teacher_prompt
        self._record = record
        self._latest: Sequence[Trace] = ()
        self._reasons = ""
        self._advantage = ADVANTAGES[config.algorithm.advantage_fn]
        self._call_settings = CallSettings.of(config, context)
        self._notices = Notices(self._call_settings, compared=self._advantage.needs_group)
        self._costs_said = any(row.get(RECOMPUTED) for row in record.recent)
        self._notice_said = False
        self._advised: tuple[int | None, int] | None = None
        self._tasks, self._rollouts = tasks, rollouts
        self._rebased = Rebased.of(record.directory, batch=config.buffer.batch_size)
        self._begin(record.start)

    def _begin(self, start: int) -> None:
        """Go on after step `start` with what is on disk."""
        config, directory = self._config, self._record.directory
        self._branching = branching_of(config, self._rollouts.runner, directory.branching)
        self._curriculum = None
        if config.tuner.tasks.selector is not None:
            self._curriculum = Curriculum(config, self._tasks, notes=directory.tasks, start=start)
        self._groups = TrainingGroups(
            config,
            BatchLog(directory.batches),
            self._tasks,
            start=start,
            total_steps=self._record.total_steps,
            rollouts=self._rollouts,
            on_rollout=self._record.console.rollout_done,
            branching=self._branching,
            whole=self._rebased.whole() if self._rebased is not None else (),
            curriculum=self._curriculum,
        )

    async def take(self, step: int, version: int, weigh: Weigh) -> Found:
        found, rebased = await self._take(step, version), self._rebased
        if rebased is None:
            return found
        worth = None
        if rebased.asks(step, found.traces or ()):
            assert isinstance(found.batch, Batch), "recorded rows have no traces"
            worth = await weigh(found.batch) if found.batch.rows else None
            if not rebased.goes_on(step, worth):
                await self._groups.cancel()
                rebased.set_aside(step)
                self._record.console.say(sentences(rebased.record)[-1])
                self._begin(step - 1)
                found, worth = await self._take(step, version), None
        elif rebased.record.first_changed == step:
            rebased.goes_on(step, None)
        metrics = found.metrics | rebased.metrics(step, found.traces or ())
        return replace(found, metrics=metrics, worth=worth)

    async def _take(self, step: int, version: int) -> Found:
        config, groups, record = self._config, self._groups, self._record
        size, repeat = config.buffer.batch_size, config.algorithm.repeat_times
        record.console.begin(f"step {step}", size * repeat, step=step)
        with record.timeline.span("waiting for rollouts", step=step):
            collected = await groups.take(step)
        self._latest = traces = collected.traces
        batch = build_batch(
            traces,
            penalty=penalty_of(config),
            selection=selection(config),
            oldest=version - _oldest(config) if groups.ahead else 0,
            unfinished=collected.unfinished,
            teacher_prompt=self._teacher_prompt,
        )
        compared = self._advantage.needs_group
        metrics = {**rollout_metrics(traces), **batch_metrics(batch, compared=compared)}
        discount = config.tuner.algorithm.turn_discount
        metrics["signal"] = float(has_signal(batch, config.algorithm.advantage_fn, discount))
        self._reasons = untrained(metrics)
        cost = int(metrics.get(RECOMPUTED, 0))
        if cost and not self._costs_said:
            self._costs_said = True
            record.console.say(reasoning_notice(step, cost))
        if groups.ahead:
            metrics |= staleness_metrics(batch, version)
        if self._curriculum is not None:
            metrics |= self._curriculum.metrics()
        selector = config.tuner.tasks.selector
        if selector is not None and selector.field is not None:
            metrics |= metrics_by_field(traces, selector.field)
        self._say_advice()
        for notice in self._notices.of(step, traces, record.signal.after(metrics)):
            record.console.say(notice)
        if config.mode == "explore":
            batch = _explored(batch)
            metrics |= {"tokens/trained": 0} | _dropped(batch.dropped_tokens)
        return Found(batch, metrics, traces)

    def _say_advice(self) -> None:
        """What to mend of the selector; and where rollouts should begin by what was seen, whenever
        that changes."""
        notice = self._curriculum.notice() if self._curriculum is not None else None
        if notice is not None and not self._notice_said:
            self._notice_said = True
            self._record.console.say(notice)
        where = self._branching and self._branching.where
        advice = where.advice() if where and where.section.where == "best" else None
        if advice is not None and (advice.call, advice.ends) != self._advised:
            self._advised = advice.call, advice.ends
            self._record.console.say(f"branching: {advice}")

    def advance(self, step: int) -> dict[str, float]:
        groups = self._groups
        if not groups.ahead:
            return {}
        waiting, running = groups.schedule.complete, groups.schedule.running
        groups.schedule.advance(step)
        return {"groups/waiting": waiting, "rollouts/running": running}

    def nothing_left(self, metrics: Mapping[str, float]) -> str | None:
        # A step that trains nothing, as in `mode: explore` or without rewards, is no solved one.
        patience = self._config.tuner.signal_patience
        return self._record.signal.after(metrics).nothing_left(patience)

    def diagnosis(self, *, without_update: bool) -> str | None:
        record, signal, latest = self._record, self._record.signal, self._latest
        completed = any(trace.outcome is Outcome.COMPLETED for trace in latest)
        if self._config.mode == "explore" and completed:  # what is recorded is the result
            return None
        patience, settings = self._config.tuner.signal_patience, self._call_settings
        if signal.quiet < patience and not without_update:
            return None
        if signal.learned and signal.broken < patience and not without_update:
            if signal.quiet == patience:
                step = int(record.recent[-1]["step"])
                record.console.say(quiet_warning(latest, step, patience, settings))
            return None
        return diagnosis(
            latest,
            record.total_steps if without_update else patience,
            of_rewards=self._advantage.needs_reward,
            reasons=self._reasons,
            settings=settings,
        )

    async def close(self) -> None:
        await self._groups.cancel()


def _oldest(config: RunConfig) -> int:
    """Updates by which a token that is trained may be older than the weights it trains."""
    limit = config.algorithm.sample_strategy_args.max_staleness
    return config.synchronizer.sync_offset if limit is None else limit


def _explored(batch: Batch) -> Batch:
    """A batch whose rollouts are recorded and not trained."""
    tokens = {**batch.dropped_tokens, "explored": batch.trained_tokens}
    return replace(batch, rows=(), dropped_tokens=tokens)


def _dropped(tokens: Mapping[str, int]) -> dict[str, float]:
    return {f"tokens/dropped/{reason}": count for reason, count in tokens.items() if count}
