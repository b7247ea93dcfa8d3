"""Rollouts that were recorded before, as data: read, filtered, put together by their tasks.

    sources -> rollouts -> filters -> tasks -> held out
                                        |
                                        +----> groups of rollouts, for algorithms that read rewards
                                        +----> the best of each task, for sft
                                        +----> a better and a worse one of each task, for dpo

The ids are those that were sampled; text is not tokenized. What is not used is counted by reason,
rollouts and tokens both. Logs without tokens are conversations (`tuner.data.chat_logs`), beside the
rollouts, and for sft and dpo alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.config.history import HistorySection, unix_seconds
from tuner.data.dataset import described
from tuner.data.history_sources import LogRow, Stored, found_in
from tuner.errors import ConfigError, DatasetError
from tuner.traces import Outcome, RolloutId, Trace

Group = tuple[Trace, ...]
# Splits of rollouts that are no evaluation: of runs, and of sessions that were served.
LEARNED = ("train", "serve")


@dataclass
class LeftOut:
    """What is not used, by reason.

    Attributes:
        rollouts: How many rollouts, attempts and lines of logs.
        tokens: How many sampled tokens.
    """

    rollouts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, trace: Trace, reason: str) -> None:
        self.rollouts[reason] += 1
        self.tokens[reason] += trace.sampled_tokens

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.rollouts + other.rollouts, self.tokens + other.tokens)


@dataclass(frozen=True)
class History:
    """What is left of the sources behind the filters.

    Attributes:
        groups: The rollouts of each task that is trained. `RolloutId.task` is the index of the
            group, `rollout` that in the group.
        held_out: Those of each task that is not.
        rows: Conversations or pairs of logs, as rows of `tuner.data.recorded`, with the file and
            line of each.
        held_out_rows: Those that are not trained.
        left_out: What the filters took.
    """

    groups: tuple[Group, ...]
    held_out: tuple[Group, ...] = ()
    rows: tuple[LogRow, ...] = ()
    held_out_rows: tuple[LogRow, ...] = ()
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """What tells this data from other data, as rows of a dataset."""
        traces = (trace for group in (*self.groups, *self.held_out) for trace in group)
        return [
            *(
                {
                    "id": str(trace.id),
                    "task": trace.task,
                    "reward": trace.reward,
                    "calls": [[call.id, list(call.completion_ids)] for call in trace.calls],
                }
                for trace in traces
            ),
            *(one.row for one in (*self.rows, *self.held_out_rows)),
        ]


def read_history(section: HistorySection, given: Any = None) -> History:
    """Everything that was recorded, behind the filters.

    Args:
        section: Sources and filters.
        given: The training data that `tune()` was given: rollouts in memory, beside those of the
            sources, or None.

    Raises:
        DatasetError: A source does not exist, is nothing that was recorded, or is damaged; nothing
            is left; or what was given are no rollouts.
        ConfigError: A filter has no meaning for a source, or for any.
    """
    left_out, rows = LeftOut(), list[LogRow]()
    if given is not None and not all(isinstance(one, Trace) for one in given):
        raise DatasetError(
            f"train_dataset is {described(given)}, but with tuner.history what is learned from is "
            "in tuner.history.sources: remove one of them"
        )
    stored = {(one.source, one.trace.id, one.trace.attempt): one for one in _in_memory(given or ())}
    for source in section.sources:
        for one in found_in(Path(source)):
            if isinstance(one, Stored):
                key = one.source, one.trace.id, one.trace.attempt
                if key in stored:
                    left_out.rollouts["given_twice"] += 1
                stored[key] = one
            elif isinstance(one, LogRow):
                rows.append(one)
            else:
                left_out.rollouts[one] += 1
    if not stored and not rows:
        where = ", ".join(section.sources) or "train_dataset"
        raise DatasetError(f"tuner.history.sources: nothing is recorded in {where}")
    _check_filters(section, rows)
    kept = []
    for one in stored.values():
        reason = unwanted(one, section)
        if reason is None:
            kept.append(one)
        else:
            left_out.add(one.trace, reason)
    groups, held_out = _grouped(_with_beginnings(kept, left_out), section.held_out)
    trained, aside = _split_rows(rows, section, left_out)
    if aside:
        left_out.rollouts["held_out"] += len(aside)
    for group in held_out:
        for trace in group:
            left_out.add(trace, "held_out")
    if not groups and not trained:
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        raise DatasetError(
            f"tuner.history: nothing is left to learn from ({reasons}); docs/history.md says what "
            "these mean"
        )
    return History(groups, held_out, trained, aside, left_out)


def _in_memory(given: Iterable[Trace]) -> list[Stored]:
    """Rollouts of one run after the other: an id that comes again is another run's."""
    times: Counter[tuple[RolloutId, int]] = Counter()
    found = []
    for trace in given:
        times[trace.id, trace.attempt] += 1
        found.append(Stored(trace, f"run {times[trace.id, trace.attempt]}"))
    return found


def unwanted(one: Stored, section: HistorySection) -> str | None:
    """Why the filters leave a rollout out, or None."""
    trace = one.trace
    if not trace.final:
        return "retried_attempt"
    if trace.id.split not in (LEARNED if section.split is None else (section.split,)):
        return "other_split"
    if not _within(trace.id.step, section.min_step, section.max_step):
        return "other_step"
    if section.outcomes and trace.outcome not in section.outcomes:
        return "other_outcome"
    if section.after is not None and trace.started < unix_seconds(section.after):
        return "too_early"
    if section.before is not None and trace.started >= unix_seconds(section.before):
        return "too_late"
    versions = [version for call in trace.calls for version in call.versions]
    if not all(_within(v, section.min_version, section.max_version) for v in versions):
        return "other_version"
    known = {**trace.task, **one.metadata}
    if not set(section.tags) <= one.tags:
        return "other_tags"
    if any(known.get(key) != value for key, value in section.metadata.items()):
        return "other_metadata"
    if section.min_reward is not None or section.max_reward is not None:
        if trace.reward is None:
            return "no_reward"
        if not _within(trace.reward, section.min_reward, section.max_reward):
            return "other_reward"
    return None


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _check_filters(section: HistorySection, rows: Sequence[LogRow]) -> None:
    """
    Raises:
        ConfigError: An outcome is none, or a filter is about what logs do not have.
    """
    for name in section.outcomes:
        if name not in set(Outcome):
            raise ConfigError(
                f"tuner.history.outcomes has {name!r}, which is no outcome: use "
                f"{', '.join(outcome.value for outcome in Outcome)}"
            )
    if not rows:
        return
    of_logs = {"sources", "held_out", "after", "before", "best", "pairs", "min_gap"}
    if section.after is not None or section.before is not None:
        for row in rows:
            if row.started is None:
                raise ConfigError(
                    f"tuner.history.after or before is set, but {row.where} does not say when it "
                    "was: remove it, or that source"
                )
    plain = HistorySection()
    for name in sorted(set(HistorySection.model_fields) - of_logs):
        if getattr(section, name) == getattr(plain, name):
            continue
        raise ConfigError(
            f"tuner.history.{name} is {getattr(section, name)}, but {rows[0].where} is in a log "
            "without tokens, which does not say that: remove it, or that source"
        )


def _with_beginnings(stored: Iterable[Stored], left_out: LeftOut) -> list[Stored]:
    """Those whose beginning is there: the rollout that they begin inside of is kept, too."""
    kept = list(stored)
    while True:
        there = {(one.source, one.trace.id) for one in kept}
        orphans = [
            one
            for one in kept
            if one.trace.origin is not None and (one.source, one.trace.origin.rollout) not in there
        ]
        if not orphans:
            return kept
        for one in orphans:
            left_out.add(one.trace, "begins_in_one_left_out")
        gone = {id(one) for one in orphans}
        kept = [one for one in kept if id(one) not in gone]


def _grouped(
    stored: Sequence[Stored], held_out: float
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """The rollouts of each task in the order in which these first come, numbered anew."""
    tasks: dict[str, list[Stored]] = defaultdict(list)
    for one in stored:
        tasks[one.task].append(one)
    aside = [name for name in tasks if is_held_out(name, held_out)]
    names = [*(name for name in tasks if name not in set(aside)), *aside]
    numbers: dict[tuple[str, RolloutId], RolloutId] = {}
    for index, name in enumerate(names):
        for place, one in enumerate(tasks[name]):
            numbers[one.source, one.trace.id] = RolloutId(1, index, place)
    groups = [tuple(_numbered(one, numbers) for one in tasks[name]) for name in names]
    trained = len(names) - len(aside)
    return tuple(groups[:trained]), tuple(groups[trained:])


def _numbered(one: Stored, numbers: Mapping[tuple[str, RolloutId], RolloutId]) -> Trace:
    origin = one.trace.origin
    if origin is not None:
        origin = replace(origin, rollout=numbers[one.source, origin.rollout])
    return replace(one.trace, id=numbers[one.source, one.trace.id], origin=origin)


def is_held_out(task: str, share: float) -> bool:
    """Whether a task is among the share that is not trained: the same in every run."""
    digest = hashlib.blake2b(task.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _split_rows(
    rows: Iterable[LogRow], section: HistorySection, left_out: LeftOut
) -> tuple[tuple[LogRow, ...], tuple[LogRow, ...]]:
    """Rows of logs that are trained, and those that are held out, by what the model was asked."""
    trained, aside = list[LogRow](), list[LogRow]()
    for row in rows:
        started = row.started or 0.0
        if section.after is not None and started < unix_seconds(section.after):
            left_out.rollouts["too_early"] += 1
        elif section.before is not None and started >= unix_seconds(section.before):
            left_out.rollouts["too_late"] += 1
        else:
            (aside if is_held_out(row.task, section.held_out) else trained).append(row)
    return tuple(trained), tuple(aside)
