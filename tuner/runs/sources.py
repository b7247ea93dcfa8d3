"""Sources of training data for a step, and the rollouts of the run's own tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from tuner.config import RunConfig
from tuner.config.algorithms import ADVANTAGES, ALGORITHMS
from tuner.config.schema import HistorySection, Penalize, role_key
from tuner.errors import ConfigError, DatasetError
from tuner.rollouts import Rollouts
from tuner.rollouts.branching import branching_of
from tuner.rollouts.groups import BatchLog, TrainingGroups
from tuner.runs.history import Group, History, LeftOut, examples_of_history, other_role
from tuner.runs.metrics import (
    RECOMPUTED,
    batch_metrics,
    has_signal,
    metrics_by_field,
    reasoning_notice,
    rollout_metrics,
    staleness_metrics,
    time_split,
    tree_metrics,
)
from tuner.runs.models import load_settings, load_tokenizer
from tuner.runs.notices import CallSettings, Notices, diagnosis, quiet_warning, untrained
from tuner.runs.rebased import Rebased, sentences
from tuner.runs.record import RunRecord
from tuner.runs.recorded import Examples, examples_of
from tuner.runs.stack import chat_renderer, context_length, selection
from tuner.tasks.selection import Curriculum, batch_indices, planned_steps, rows_taken
from tuner.traces import Call, Outcome, RolloutId, Trace, untrainable, without_vote
from tuner.training.batch import (
    Batch,
    RoleBatches,
    Selection,
    TeacherPrompt,
    build_batch,
    reward_of,
)
from tuner.training.likelihood import (
    EffectiveSamples,
    OffPolicyBatch,
    RecordedBatch,
    held_out_loss,
    held_out_rewards,
)
from tuner.training.trainer import PolicyTrainer

# Training data of a step from recorded rollouts, by the configuration.


@dataclass(frozen=True)
class ComparableGroups:
    """Groups that give something to learn from. All are known before the run begins, unlike groups
    that are sampled during the run.

    Attributes:
        groups: The trained ones.
        held_out: Those that are not trained.
        left_out: Data removed by the filters, by the selection, because all rewards of a group are
            equal (if rewards are compared), and because no step reaches it.
        used: Number of other rollouts.
    """

    groups: tuple[Group, ...]
    held_out: tuple[Group, ...]
    left_out: LeftOut
    used: int


def comparable(config: RunConfig, history: History) -> ComparableGroups:
    """Recorded rollouts for an algorithm that learns from rewards or from a teacher."""
    name = config.algorithm.algorithm_type
    if logs := (*history.rows, *history.held_out_rows):
        raise ConfigError(
            f"tuner.history.sources: {logs[0].where} has no tokens, but algorithm.algorithm_type "
            f"{name} needs the log-probs of the sampled tokens: "
            "set it to sft or dpo, or remove that source"
        )
    check_same_tokenizer(config, history)
    left_out = history.left_out + LeftOut()
    groups = [group for found in history.groups if (group := _that_teach(config, found, left_out))]
    size, reasons = config.buffer.batch_size, sorted(left_out.rollouts.items())
    if len(groups) < size:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons) or "none"
        raise DatasetError(
            f"tuner.history: {len(groups)} tasks have rollouts to compare but batch_size is "
            f"{size}: no step can run; lower buffer.batch_size, or record more (rollouts dropped: "
            f"{why})"
        )
    taken, used = _taken(config, len(groups)), 0
    for index, group in enumerate(groups):
        used += len(group) * (index in taken)
        for trace in group if index not in taken else ():
            left_out.add(trace, "not_taken")
    return ComparableGroups(tuple(groups), history.held_out, left_out, used)


def without_late(config: RunConfig, examples: Examples) -> Examples:
    """The same examples; those that no step reaches are counted as dropped."""
    taken = _taken(config, len(examples.used))
    late = [one for index, one in enumerate(examples.used) if index not in taken]
    tokens = sum(len(turn.completion_ids) for one in late for turns in one for turn in turns)
    counted = {**examples.tokens_left_out, **({"not_taken": tokens} if late else {})}
    return replace(examples, tokens_left_out=counted, not_taken=len(late))


def _taken(config: RunConfig, rows: int) -> frozenset[int]:
    return rows_taken(
        planned_steps(config, rows),
        size=config.buffer.batch_size,
        rows=rows,
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )


def _that_teach(config: RunConfig, group: Group, left_out: LeftOut) -> Group:
    """The comparable rollouts of a group; none if they give nothing to learn from."""
    chosen, penalty, members = selection(config), penalty_of(config), list[tuple[Trace, float]]()
    unused = unused_call(config)
    for trace in group:
        reward = reward_of(trace, penalty, needed=chosen.needs_reward)
        if reward is not None and (silent := without_vote(trace, unused)) is not None:
            left_out.add(trace, silent)
        elif reward is not None:
            members.append((trace, reward))
        elif trace.outcome is Outcome.COMPLETED:
            left_out.add(trace, "no_reward")
        else:
            left_out.add(trace, trace.outcome.value)
    reason = _quiet(chosen, members) if members else None
    if reason is None:
        return tuple(trace for trace, _ in members)
    for trace, _ in members:
        left_out.add(trace, reason)
    return ()


def _quiet(chosen: Selection, members: Sequence[tuple[Trace, float]]) -> str | None:
    """Reason why a group gives nothing to learn from, or None."""
    reason = chosen.reason(members)
    calls = [call for trace, _ in members for call in trace.calls]
    own = any(call.reward is not None or call.gained is not None for call in calls)
    # With a discount per turn, equal rewards differ.
    compares = chosen.needs_group and not chosen.lone_rewards and not own
    if reason is None and compares and len({reward for _, reward in members}) == 1:
        reason = "equal_rewards"
    return reason


def off_policy_batch(
    config: RunConfig, groups: Sequence[Group], teacher_prompt: TeacherPrompt, *, step: int
) -> OffPolicyBatch:
    """Training data of step `step` from recorded rollouts."""
    indices = batch_indices(
        step,
        size=config.buffer.batch_size,
        rows=len(groups),
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )
    section = history_of(config)
    batch = build_batch(
        # If an epoch ends inside a step, a group may occur twice.
        [trace for index in dict.fromkeys(indices) for trace in groups[index]],
        penalty=penalty_of(config),
        selection=selection(config),
        left_out=unused_call(config),
        teacher_prompt=teacher_prompt,
    )
    return OffPolicyBatch.of(batch, least_effective=section.min_effective_samples)


def held_out_batch(config: RunConfig, groups: Sequence[Group]) -> Batch:
    """Held-out recorded rollouts as a batch; each counts by itself."""
    return build_batch(
        [trace for group in groups for trace in group],
        penalty=penalty_of(config),
        selection=Selection(needs_group=False, lone_rewards=True),
        left_out=unused_call(config),
    )


def unused_call(config: RunConfig) -> Callable[[Call], str | None]:
    """Reason why a recorded call is not trained, or None."""
    roles = frozenset(history_of(config).roles)
    return lambda call: untrainable(call) or other_role(call, roles)


def penalty_of(config: RunConfig) -> float | None:
    given = config.tuner.on_failure
    return given.penalize if isinstance(given, Penalize) else None


def history_of(config: RunConfig) -> HistorySection:
    """The settings of recorded rollouts, which must be set."""
    assert config.tuner.history is not None, "mode train without them is of rows"
    return config.tuner.history


# Number of calls whose text is compared.
SEEN = 8


def check_same_tokenizer(config: RunConfig, history: History) -> None:
    """Reject ids of another tokenizer: they would mean different text."""
    path = config.model.model_path
    vocabulary = load_settings(path).get_text_config().vocab_size
    calls = [
        call
        for group in (*history.groups, *history.held_out)
        for trace in group
        for call in trace.calls
    ]
    fix = "it was recorded with another model; set model.model_path to one with the same tokenizer"
    largest = max((max(c.prompt_ids + c.completion_ids, default=0) for c in calls), default=0)
    if largest >= vocabulary:
        raise DatasetError(
            f"tuner.history: a recorded call has the token id {largest}, but the model has "
            f"{vocabulary} tokens: {fix}"
        )
    renderer = chat_renderer(config, load_tokenizer(path))
    told = [(c, c.response.get("content")) for c in calls if c.invalid is None]
    texts = [(call, said.strip()) for call, said in told if isinstance(said, str) and said.strip()]
    seen = texts[:SEEN]
    other = [(c, said) for c, said in seen if said not in renderer.decode(list(c.completion_ids))]
    if len(other) > len(seen) / 2:  # the text of a single call may have been repaired
        call, said = other[0]
        raise DatasetError(
            f"tuner.history: a recorded answer is {said!r:.60}, but this model decodes its tokens "
            f"as {renderer.decode(list(call.completion_ids))!r:.60}: {fix}"
        )


Task = dict[str, Any]
Weigh = Callable[[Batch], Awaitable[EffectiveSamples]]
"""Effective sample sizes for the weights that train the batch."""


@dataclass(frozen=True)
class StepData:
    """Training data of a step, and its metrics before the update.

    Attributes:
        batch: Rows with rewards, or rows of recorded data; may have no rollouts.
        metrics: By name.
        traces: Every attempt of the rollouts; None for recorded data.
        worth: Effective sample size for the trained weights, if another run's weights sampled.
        recorded: Rollouts that were recorded before this process.
    """

    batch: Batch | RoleBatches | RecordedBatch
    metrics: dict[str, float]
    traces: Sequence[Trace] | None = None
    worth: EffectiveSamples | None = None
    recorded: frozenset[RolloutId] = frozenset()

    @property
    def replayed(self) -> bool:
        """Whether nothing was sampled for the step: its rollouts are those of an earlier process,
        which has shown them."""
        return bool(self.traces) and all(trace.id in self.recorded for trace in self.traces or ())

    def seconds(self, idle: float, training: float, sync: float) -> dict[str, float]:
        """Seconds of a step by use: waiting for data, the update, the transfer of weights to the
        engine. What was recorded before took none of them."""
        whole = idle + training + sync
        if self.replayed:
            return {"time/training": training, "time/sync": sync}
        if self.traces is None:
            return {
                "time/training": whole,
                "tokens_per_second": self.batch.trained_tokens / whole,
            }
        assert not isinstance(self.batch, RecordedBatch), "rows of recorded data are not rollouts"
        sampled, traces = self.batch.sampled_tokens, self.traces
        if self.recorded:
            traces = [trace for trace in traces if trace.id not in self.recorded]
            sampled = sum(trace.sampled_tokens for trace in traces)
        split = time_split(traces, idle, training, sync)
        return {**split, "tokens_per_second": sampled / whole}


class Source(Protocol):
    """Source of a step's training data."""

    rows: Mapping[str, int] = {}
    """For recorded data, number of rows that are used, and that are dropped, by reason."""

    async def take(self, step: int, version: int, weigh: Weigh) -> StepData:
        """Training data of step `step`; the weights have had `version` updates."""

    def advance(self, step: int) -> dict[str, float]:
        """Called after step `step` is trained; returns metrics of the rollouts in progress."""
        return {}

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        """Loss of the held-out recorded data; empty if nothing is held out."""
        return {}

    def nothing_left(self, metrics: Mapping[str, float]) -> str | None:
        """Reason why the run is complete before its last step; None if there is something to learn.

        Args:
            metrics: Those of a step that is not logged yet; empty if all are.
        """
        return None

    def diagnosis(self, *, without_update: bool) -> str | None:
        """Reason why the run has to stop, after a step is logged; None if it continues. Prints a
        warning if the latest steps had nothing to learn from.

        Args:
            without_update: The run is at its end, and the weights have not changed.
        """
        return None

    async def close(self) -> None:
        """Stop what is in progress."""


class RolloutSource(Source):
    """Rollouts of the run's own tasks, collected in advance if that is allowed.

    Args:
        context: Maximum number of tokens of prompt and answer together.
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
        """Resume after step `start` with the data on disk."""
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

    async def take(self, step: int, version: int, weigh: Weigh) -> StepData:
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

    async def _take(self, step: int, version: int) -> StepData:
        config, groups, record = self._config, self._groups, self._record
        size, repeat = config.buffer.batch_size, config.algorithm.repeat_times
        record.console.begin(f"step {step}", size * repeat, step=step)
        with record.timeline.span("waiting for rollouts", step=step):
            collected = await groups.take(step)
        self._latest = traces = collected.traces
        build = partial(
            build_batch,
            penalty=penalty_of(config),
            selection=selection(config),
            oldest=version - _oldest(config) if groups.ahead else 0,
            unfinished=collected.unfinished,
            teacher_prompt=self._teacher_prompt,
        )
        batch = by_role(config, traces, build)
        name = config.algorithm.advantage_fn
        metrics = {**rollout_metrics(traces), **batch_metrics(batch, name)}
        metrics["signal"] = float(has_signal(batch, name, config.call_discount))
        self._reasons = untrained(metrics)
        data = StepData(batch, metrics, traces, recorded=collected.recorded)
        cost = int(metrics.get(RECOMPUTED, 0))
        if cost and not self._costs_said and not data.replayed:
            self._costs_said = True
            record.console.note(reasoning_notice(step, cost))
        if groups.ahead:
            metrics |= staleness_metrics(batch, version)
        if self._curriculum is not None:
            metrics |= self._curriculum.metrics()
        selector = config.tuner.tasks.selector
        if selector is not None and selector.field is not None:
            metrics |= metrics_by_field(traces, selector.field)
        if not data.replayed:
            self._say_advice()
            signal = record.signal.after(metrics)
            for notice in self._notices.of(step, traces, signal, metrics):
                record.console.note(notice)
        if config.mode == "explore":
            data = replace(data, batch=(batch := _explored(batch)))
            metrics |= {"tokens/trained": 0} | _dropped(batch.dropped_tokens)
        return data

    def _say_advice(self) -> None:
        """Print advice: fixes for the selector, and where rollouts should begin; repeated when it
        changes."""
        notice = self._curriculum.notice() if self._curriculum is not None else None
        if notice is not None and not self._notice_said:
            self._notice_said = True
            self._record.console.note(notice)
        where = self._branching and self._branching.where
        advice = where.advice() if where and where.section.where == "best" else None
        if advice is not None and (advice.call, advice.ends) != self._advised:
            self._advised = advice.call, advice.ends
            self._record.console.note(f"branching: {advice}")

    def advance(self, step: int) -> dict[str, float]:
        groups = self._groups
        if not groups.ahead:
            return {}
        waiting, running = groups.schedule.complete, groups.schedule.running
        groups.schedule.advance(step)
        return {"groups/waiting": waiting, "rollouts/running": running}

    def nothing_left(self, metrics: Mapping[str, float]) -> str | None:
        # A step that trains nothing, as in `mode: explore` or without rewards, is not a solved one.
        patience = self._config.tuner.signal_patience
        return self._record.signal.after(metrics).nothing_left(patience)

    def diagnosis(self, *, without_update: bool) -> str | None:
        record, signal, latest = self._record, self._record.signal, self._latest
        completed = any(trace.outcome is Outcome.COMPLETED for trace in latest)
        if self._config.mode == "explore" and completed:  # the recorded rollouts are the result
            return None
        patience, settings = self._config.tuner.signal_patience, self._call_settings
        if signal.quiet < patience and not without_update:
            return None
        if signal.learned and signal.broken < patience and not without_update:
            if signal.quiet == patience:
                step = int(record.recent[-1]["step"])
                record.console.note(quiet_warning(latest, step, patience, settings))
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


def by_role(
    config: RunConfig, traces: Sequence[Trace], build: Callable[[Sequence[Trace]], Batch]
) -> Batch | RoleBatches:
    """The batch of a step, or those of the roles with adapters."""
    roles = config.model.adapters
    if not roles:
        return build(traces)
    trained = config.model.trained_roles
    return RoleBatches.of(traces, trained, lambda call: role_key(roles, call.role), build)


def _oldest(config: RunConfig) -> int:
    """Maximum age of a trained token, in updates."""
    limit = config.algorithm.sample_strategy_args.max_staleness
    return config.synchronizer.sync_offset if limit is None else limit


def _explored(batch: Batch | RoleBatches) -> Batch | RoleBatches:
    """A batch whose rollouts are recorded and not trained."""
    if isinstance(batch, RoleBatches):
        of_roles = {role: _explored_batch(one) for role, one in batch.of_roles.items()}
        return replace(batch, of_roles=of_roles)
    return _explored_batch(batch)


def _explored_batch(batch: Batch) -> Batch:
    tokens = {**batch.dropped_tokens, "explored": batch.trained_tokens}
    return replace(batch, rows=(), dropped_tokens=tokens)


def _dropped(tokens: Mapping[str, int]) -> dict[str, float]:
    return {f"tokens/dropped/{reason}": count for reason, count in tokens.items() if count}


# Training data of a step from recorded data: rows of conversations, or whole rollouts.


class RowSource(Source):
    """Rows of recorded conversations or pairs, in the order set by `data_selector`."""

    def __init__(self, config: RunConfig, record: RunRecord, examples: Examples) -> None:
        self._config = config
        self._record = record
        self._examples = examples
        self.rows = examples.rows
        of_rollouts = config.tuner.history is not None
        if examples.left_out:
            reasons = ", ".join(f"{count} {why}" for why, count in examples.left_out.items())
            used = len(examples.used)
            every = "" if of_rollouts else f" of {used + sum(examples.left_out.values())}"
            record.console.say(
                f"{used}{every} rows are trained; dropped: {reasons} (docs/recorded_data.md)"
            )

    async def take(self, step: int, version: int, weigh: Weigh) -> StepData:
        size = self._config.buffer.batch_size
        self._record.console.begin(f"step {step}", size, step=step, of="rows")
        batch = batch_of(self._config, self._examples, step=step)
        # Nothing is sampled, and used rows are trained completely.
        sampled = {"rows/trained": size, "tokens/sampled": batch.trained_tokens}
        metrics = {**sampled, **tree_metrics(batch.rows)}
        left_out = self._examples.tokens_left_out if step == 1 else {}
        return StepData(batch, _with_left_out(metrics, left_out))

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        talks = [turns for example in self._examples.held_out for turns in example]
        return _named(held_out_loss(trainer, RecordedBatch.of(talks)))

    async def close(self) -> None:
        pass


class TraceSource(Source):
    """Groups of recorded rollouts, in the order set by `data_selector`.

    Tokens of a step are those of the rollouts that it uses, so those of a second epoch count again.
    Tokens that no step uses count in the first step: those removed by the filters, and those of
    groups without anything to learn from (`comparable`).
    """

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        data: ComparableGroups,
        teacher_prompt: TeacherPrompt,
    ) -> None:
        self._config = config
        self._record = record
        self._teacher_prompt = teacher_prompt
        self._groups, left_out = data.groups, data.left_out
        self._aside = data.held_out
        self._tokens = dict(left_out.tokens)
        rollouts = data.used
        self.rows = {"used": rollouts, **dict(sorted(left_out.rollouts.items()))}
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        record.console.say(
            f"{rollouts} recorded rollouts of {len(self._groups)} tasks are trained"
            + (f"; dropped: {reasons} (docs/recorded_data.md)" if reasons else "")
        )

    async def take(self, step: int, version: int, weigh: Weigh) -> StepData:
        config = self._config
        self._record.console.begin(f"step {step}", config.buffer.batch_size, step=step, of="groups")
        batch = off_policy_batch(config, self._groups, self._teacher_prompt, step=step)
        metrics = batch_metrics(batch, config.algorithm.advantage_fn)
        metrics["history/reward"] = float(batch.rewards_R.mean()) if batch.ids else 0.0
        return StepData(batch, _with_left_out(metrics, self._tokens if step == 1 else {}))

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        batch = held_out_batch(self._config, self._aside)
        return _named(held_out_rewards(trainer, batch))

    def diagnosis(self, *, without_update: bool) -> str | None:
        if not without_update:
            return None
        return (
            "No step gave anything to learn from: no call of the recorded rollouts could be "
            "trained; see tokens/dropped in metrics.jsonl for the reasons"
        )

    async def close(self) -> None:
        pass


def _with_left_out(metrics: dict[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """The metrics of a step, with the sampled tokens that no step uses."""
    found = dict(metrics)
    for reason, count in tokens.items():
        name = f"tokens/dropped/{reason}"
        found[name] = found.get(name, 0) + count
        found["tokens/sampled"] += count
    return found


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"held_out/{name}": value for name, value in metrics.items()}


def batch_of(config: RunConfig, examples: Examples, *, step: int) -> RecordedBatch:
    """Training data of step `step` from recorded data."""
    indices = batch_indices(
        step,
        size=config.buffer.batch_size,
        rows=len(examples.used),
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )
    return RecordedBatch.of([turns for index in indices for turns in examples.used[index]])


# Training data of a run: tasks, rows or pairs as token ids, or groups of recorded rollouts.
Data = Sequence[Task] | Examples | ComparableGroups


def training_data(config: RunConfig, rows: Sequence[Task], history: History | None) -> Data:
    """Read and check the training data of a run."""
    if config.mode != "train":
        return rows
    if history is not None and ALGORITHMS[config.algorithm.algorithm_type].recorded is None:
        return comparable(config, history)
    return read_examples(config, rows, history)


def units(data: Data) -> int:
    """Number of tasks, rows or groups, of which a step uses `buffer.batch_size`."""
    if isinstance(data, Examples):
        return len(data.used)
    return len(data.groups if isinstance(data, ComparableGroups) else data)


def read_examples(
    config: RunConfig, rows: Sequence[Task], history: History | None = None
) -> Examples:
    """Rows of recorded data as token ids of the trained model.

    Args:
        config: The effective configuration.
        rows: A dataset.
        history: Recorded rollouts, in its place.
    """
    recorded = ALGORITHMS[config.algorithm.algorithm_type].recorded
    assert recorded is not None, "other algorithms learn from rewards"
    path = config.model.model_path
    renderer, settings = chat_renderer(config, load_tokenizer(path)), load_settings(path)
    longest = context_length(config.model.max_model_len, settings, "model.max_model_len")
    if history is None:
        form = config.buffer.trainer_input.experience_buffer.format
        examples = examples_of(rows, renderer, form, recorded=recorded, longest=longest)
    else:
        check_same_tokenizer(config, history)
        section = config.tuner.history
        assert section is not None, "read_history() was given it"
        found = examples_of_history(history, section, renderer, recorded=recorded, longest=longest)
        examples = without_late(config, found)
    size, many = config.buffer.batch_size, sum(examples.rows.values())
    if len(examples.used) < size:
        what = "train_dataset" if history is None else "tuner.history"
        raise DatasetError(
            f"{what}: {len(examples.used)} of {many} rows can be trained but "
            f"batch_size is {size}: no step can run; lower buffer.batch_size "
            "(AlgorithmConfig.batch_size)"
        )
    return examples
