"""Training data of a server: judged sessions, in groups, each used once.

Sessions of one `group` are compared with each other, like rollouts of a task. All others of an
update are compared with each other as one group, whatever their tasks. Its baseline (with `rloo`
the mean reward of the other sessions, with `grpo` proportional to that) does not depend on what the
session itself did, so it adds no bias; differences between tasks remain as noise. Sessions that
happen to have equal tasks are not grouped: the mean of one or two others is noisier than that of a
whole update, and users with several sessions of a task can set `group`. Algorithms without groups
(`ppo` with its critic) take each session alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean

from tuner.config import RunConfig
from tuner.config.algorithms import ADVANTAGES
from tuner.runs.metrics import batch_metrics, has_signal, rollout_metrics, staleness_metrics
from tuner.runs.sources import StepData
from tuner.runs.stack import selection
from tuner.serving.serving_store import DamagedSession, ServingStore, StoredSession
from tuner.traces import Call, RolloutId, Trace, untrainable
from tuner.training.batch import Batch, TeacherPrompt, build_batch, own_prompt

_MOST = 1000
"""Number of judged sessions considered together, the oldest; at least four updates of them."""
LOOK = 0.5
"""Seconds between two checks for judged sessions."""
_COUNT = "SELECT COUNT(*) FROM sessions WHERE judged AND trained IS NULL AND ended IS NOT NULL"


@dataclass(frozen=True)
class Groups:
    """State of the users' groups whose sessions are not all judged.

    Attributes:
        waiting: Numbers of groups with a session that is open, or has no reward yet.
        spent: Numbers of groups with a session that an earlier update trained.
    """

    waiting: Collection[int] = ()
    spent: Collection[int] = ()


def units(
    judged: Sequence[StoredSession], groups: Groups, *, batch: int, repeat: int, compared: bool
) -> list[list[StoredSession]]:
    """What an update would take, in the order of their last sessions; everything that is ready.

    A group is ready when all of its sessions are judged and there is more than one, or when
    `repeat` of them are, or when enough sessions for an update that were opened after its last one
    are judged: a missing reward does not block it for long. A session without a group, or left over
    from one, is alone.

    Args:
        judged: Ended sessions with a reward, in the order in which they were opened.
        batch: Units of an update (`buffer.batch_size`).
        repeat: Sessions of a complete group (`algorithm.repeat_times`).
        compared: Whether a session that is alone in its group teaches nothing.
    """
    members: dict[int, list[StoredSession]] = defaultdict(list)
    for session in judged:
        members[session.task_number].append(session)
    places = {session.id: place for place, session in enumerate(judged, 1)}
    found = []
    for number, group in members.items():
        more = compared and len(group) == 1 and number not in groups.spent
        whole = group[0].group is None or not (more or number in groups.waiting)
        later = len(judged) - places[group[-1].id]
        if whole or len(group) >= repeat or later >= batch:
            found.append(group)
    return sorted(found, key=lambda unit: unit[-1].id)


def chosen(
    ready: Sequence[list[StoredSession]], *, batch: int, compared: bool
) -> list[list[StoredSession]]:
    """The groups of the next update, none if there is too little data: the groups among the oldest
    units, and the single sessions as one more group at the end. A single session that would be
    alone even there waits for another."""
    taken = list(ready[:batch])
    if compared and sum(len(unit) == 1 for unit in taken) == 1:
        another = [unit for unit in ready[batch:] if len(unit) == 1][:1]
        taken = [*taken, *another] if another else [u for u in ready if len(u) > 1][:batch]
    if len(taken) < batch or not compared:
        return taken if len(taken) >= batch else []
    alone = [unit[0] for unit in taken if len(unit) == 1]
    groups = [unit for unit in taken if len(unit) > 1]
    return [*groups, alone] if alone else groups


@dataclass(frozen=True)
class SessionsData(StepData):
    """The data of an update, and its sessions."""

    _: KW_ONLY
    sessions: tuple[str, ...] = ()


class JudgedSource:
    """Judged sessions of a store, each taken once.

    Args:
        config: The effective configuration.
        store: The store of sessions.
        oldest: Minimum version of the weights of a trained token.
        teacher_prompt: A teacher's prompt of a call.
    """

    def __init__(
        self,
        config: RunConfig,
        store: ServingStore,
        *,
        oldest: Callable[[], int],
        teacher_prompt: TeacherPrompt = own_prompt,
    ) -> None:
        self._config = config
        self._store = store
        self._oldest = oldest
        self._teacher_prompt = teacher_prompt
        self._damaged = set[str]()
        self._compared = ADVANTAGES[config.algorithm.advantage_fn].needs_group

    @property
    def waiting(self) -> dict[str, float]:
        """Sessions and tokens that no update has taken: not judged, or judged but too few."""
        query = "SELECT COUNT(*), COALESCE(SUM(sampled_tokens), 0) FROM sessions WHERE {} AND calls"
        unjudged = self._store.ask(query.format("NOT judged"))[0]
        judged = self._store.ask(query.format("judged AND trained IS NULL"))[0]
        return {
            "sessions/unjudged": unjudged[0],
            "tokens/unjudged": unjudged[1],
            "sessions/waiting": judged[0],
            "tokens/waiting": judged[1],
        }

    def ready(self) -> list[list[StoredSession]]:
        """The groups of the next update; none if there is too little data."""
        batch, repeat = self._config.buffer.batch_size, self._config.algorithm.repeat_times
        if self._store.ask(_COUNT)[0][0] < batch:
            return []
        fresh, _ = self._judged()
        groups, compared = self._groups(), self._compared
        while True:
            found = units(fresh, groups, batch=batch, repeat=repeat, compared=compared)
            taken = chosen(found, batch=batch, compared=compared)
            readable = [self._readable(one) for group in taken for one in group]  # finds them all
            if all(readable):
                return taken
            fresh = [one for one in fresh if one.id not in self._damaged]

    def _readable(self, session: StoredSession) -> bool:
        """Whether the calls of a session can be read; a damaged one is logged and left out."""
        try:
            self._store.calls(session.id)
        except DamagedSession as error:
            self._store.leave_out(error)
            self._damaged.add(session.id)
        return session.id not in self._damaged

    def _judged(self) -> tuple[list[StoredSession], list[StoredSession]]:
        """Sessions that no update has taken: those that can be trained, and those whose tokens are
        all too old."""
        config, oldest = self._config, self._oldest()
        update = config.buffer.batch_size * config.algorithm.repeat_times
        found = self._store.untrained(limit=max(_MOST, 4 * update) + len(self._damaged))
        found = [one for one in found if one.id not in self._damaged]
        fresh = [one for one in found if one.highest is not None and one.highest >= oldest]
        known = {one.id for one in fresh}
        return fresh, [one for one in found if one.id not in known]

    def _groups(self) -> Groups:
        query = (
            'SELECT DISTINCT task_number FROM sessions WHERE "group" IS NOT NULL AND task_number '
            "IN (SELECT task_number FROM sessions WHERE judged AND trained IS NULL) AND {}"
        )

        def numbers(condition: str) -> set[int]:
            return {row[0] for row in self._store.ask(query.format(condition))}

        return Groups(
            waiting=numbers("trained IS NULL AND (ended IS NULL OR NOT judged)"),
            spent=numbers("trained IS NOT NULL"),
        )

    def taken(
        self, groups: Sequence[Sequence[StoredSession]], *, step: int, version: int
    ) -> SessionsData:
        """The data of an update, including sessions that are entirely too old.

        The sessions stay in the store until they are marked.

        Args:
            groups: As returned by `ready`.
            step: Number of the update.
            version: Number of updates that the weights have seen before it.
        """
        config = self._config
        stale = [one for one in self._judged()[1] if self._readable(one)]
        members = [(number, one) for number, group in enumerate(groups) for one in group]
        traces, silent = [], set[str]()
        for place, (number, one) in enumerate(members):
            trace = self._store.trace(one.id)
            if trace.reward is None:
                silent |= {call.id for call in trace.calls if call.reward is None}
            traces.append(replace(rewarded(trace), id=RolloutId(step, number, place)))

        def left_out(call: Call) -> str | None:
            return untrainable(call) or ("unjudged_call" if call.id in silent else None)

        batch = with_stale(
            build_batch(
                traces,
                selection=selection(config),
                oldest=self._oldest(),
                left_out=left_out,
                teacher_prompt=self._teacher_prompt,
            ),
            [self._store.trace(one.id) for one in stale],
        )
        advantage, discount = config.algorithm.advantage_fn, config.call_discount
        sessions = [*(one for _, one in members), *stale]
        metrics = {
            **rollout_metrics(traces),
            **batch_metrics(batch, advantage),
            **staleness_metrics(batch, version),
            "signal": float(has_signal(batch, advantage, discount)),
            "sessions/taken": len(sessions),
            "calls/redacted": sum(one.redacted for one in sessions),
        }
        return SessionsData(batch, metrics, traces, sessions=tuple(one.id for one in sessions))


def rewarded(trace: Trace) -> Trace:
    """A session with a reward for all of it; if only calls have one, their mean.

    Calls without a reward of their own are then not trained, because nobody judged them; the mean
    is what others of its group are compared with.
    """
    own = [call.reward for call in trace.calls if call.reward is not None]
    if trace.reward is not None or not own:
        return trace
    return replace(trace, reward=fmean(own))


def with_stale(batch: Batch, traces: Sequence[Trace]) -> Batch:
    """Add sessions that are entirely too old to the dropped ones of a batch."""
    tokens = sum(trace.sampled_tokens for trace in traces)
    if not traces:
        return batch
    dropped = Counter(batch.dropped_tokens) + Counter({"stale": tokens})
    rollouts = Counter(batch.dropped_rollouts) + Counter({"stale": len(traces)})
    return replace(
        batch,
        sampled_tokens=batch.sampled_tokens + tokens,
        dropped_tokens=dict(sorted(dropped.items())),
        dropped_rollouts=dict(sorted(rollouts.items())),
    )
