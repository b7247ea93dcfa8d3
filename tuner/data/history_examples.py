"""What of recorded rollouts is imitated, and what compared: rows for sft, pairs for dpo."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations

from tuner.algorithms.table import Recorded
from tuner.config.buffer import FormatSection
from tuner.config.history import HistorySection
from tuner.data.history_sources import LogRow
from tuner.data.recorded import Example, Examples, Turn, Unusable, conversation, pair, trained_turns
from tuner.data.recorded_traces import Group, History, LeftOut
from tuner.errors import DatasetError
from tuner.gateway import ChatRenderer
from tuner.traces import Call, Outcome, Trace


def examples_of_history(
    history: History,
    section: HistorySection,
    renderer: ChatRenderer,
    *,
    recorded: Recorded,
    longest: int,
) -> Examples:
    """The best rollouts of each task, or a better and a worse one, as the ids that were sampled.

    Args:
        history: What was recorded.
        section: How many of a task, and which pairs.
        renderer: The chat form of the model that is trained; for logs.
        recorded: Which of the two.
        longest: The most tokens of a prompt and its completion; longer rollouts are left out.

    Raises:
        DatasetError: A line of a log is not of the form that the algorithm needs, or nothing can be
            used.
    """
    choose = _best if recorded == "conversations" else _pairs
    left_out = LeftOut(Counter(history.left_out.rollouts), Counter(history.left_out.tokens))
    turns = _Turns(frozenset(section.roles), longest)
    used = [one for group in history.groups for one in choose(group, section, turns, left_out)]
    tokens = left_out.tokens + turns.inside
    used += _of_logs(history.rows, renderer, recorded, longest, left_out)
    unseen = LeftOut()  # of what is held out, everything is
    held_out = [one for group in history.held_out for one in choose(group, section, turns, unseen)]
    held_out += _of_logs(history.held_out_rows, renderer, recorded, longest, unseen)
    if not used:
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        raise DatasetError(
            f"tuner.history: nothing is left to learn from ({reasons}); docs/history.md says what "
            "these mean"
        )
    return Examples(
        tuple(used),
        dict(sorted(left_out.rollouts.items())),
        tokens_left_out={reason: n for reason, n in sorted(tokens.items()) if n},
        held_out=tuple(held_out),
    )


class _Turns:
    """The calls of rollouts as turns.

    Attributes:
        inside: Sampled tokens of rollouts that are used which are not trained, by reason.
    """

    def __init__(self, roles: frozenset[str], longest: int) -> None:
        self._roles = roles
        self._longest = longest
        self.inside: Counter[str] = Counter()

    def of(self, trace: Trace) -> tuple[Turn, ...]:
        """Those of a rollout that is used."""
        turns: list[Turn] = []
        for call in trace.calls:
            reason = self.unused(call)
            if reason is not None:
                self.inside[reason] += call.sampled_tokens
                continue
            self.inside["masked"] += call.sampled_tokens - _trained(call)
            turns += _stretches(call)
        return tuple(turns)

    def unusable(self, trace: Trace) -> str | None:
        """Why a rollout has no place among those that are ranked, or None."""
        if trace.outcome is not Outcome.COMPLETED:
            return trace.outcome.value
        if trace.reward is None:
            return "no_reward"
        calls = [call for call in trace.calls if self.unused(call) is None and _trained(call)]
        if not calls:
            return "no_call_to_train"
        most = max(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
        return "too_long" if most > self._longest else None

    def unused(self, call: Call) -> str | None:
        """Why a call is not imitated, or None. Unlike where log-probs are compared, it may have
        been greedy, or held to a form."""
        if call.invalid is not None:
            return "invalid_call"
        if call.undelivered:
            return "undelivered_call"
        if call.excluded:
            return "excluded_call"
        return other_role(call, self._roles)


def other_role(call: Call, roles: frozenset[str]) -> str | None:
    """Why a call is not trained where only those of some roles are, or None."""
    return "other_role" if roles and call.role not in roles else None


def _trained(call: Call) -> int:
    return sum(stop - start for start, stop in call.stretches)


def _stretches(call: Call) -> list[Turn]:
    return [
        Turn(
            array("I", call.prompt_ids + call.completion_ids[:start]),
            array("I", call.completion_ids[start:stop]),
        )
        for start, stop in call.stretches
    ]


def _ranked(group: Group, turns: _Turns, left_out: LeftOut) -> list[tuple[float, Trace]]:
    """Its rollouts that can be used with their rewards, the best first."""
    found = []
    for trace in group:
        reason = turns.unusable(trace)
        if reason is not None:
            left_out.add(trace, reason)
        else:
            assert trace.reward is not None, "unusable() leaves out what has none"
            found.append((trace.reward, trace))
    return sorted(found, key=lambda one: (-one[0], one[1].id))


def _best(
    group: Group, section: HistorySection, turns: _Turns, left_out: LeftOut
) -> Iterator[Example]:
    for place, (_, trace) in enumerate(_ranked(group, turns, left_out)):
        if place < section.best:
            yield (turns.of(trace),)
        else:
            left_out.add(trace, "not_best_of_task")


def _pairs(
    group: Group, section: HistorySection, turns: _Turns, left_out: LeftOut
) -> Iterator[Example]:
    ranked = _ranked(group, turns, left_out)
    chosen: Iterator[tuple[int, int]] = combinations(range(len(ranked)), 2)
    if section.pairs == "best":
        chosen = iter([(0, len(ranked) - 1)] if len(ranked) > 1 else [])
    of_trace: dict[int, tuple[Turn, ...]] = {}
    for better, worse in chosen:
        gap = ranked[better][0] - ranked[worse][0]
        if gap > 0 and gap >= section.min_gap:
            for place in (better, worse):
                if place not in of_trace:
                    of_trace[place] = turns.of(ranked[place][1])
            yield of_trace[better], of_trace[worse]
    for place, (_, trace) in enumerate(ranked):
        if place not in of_trace:
            left_out.add(trace, "not_in_a_pair")


def _of_logs(
    rows: Iterable[LogRow],
    renderer: ChatRenderer,
    recorded: Recorded,
    longest: int,
    left_out: LeftOut,
) -> Iterator[Example]:
    """Rows of logs, whose ids the chat template makes."""
    form = FormatSection(prompt_type="messages")
    for one in rows:
        where, row = one.where, one.row
        has_pair = row.get("chosen") is not None and row.get("rejected") is not None
        if has_pair != (recorded == "pairs"):
            wanted = "one conversation in a line" if recorded == "conversations" else "pairs"
            raise DatasetError(
                f"{where}: it is {'a pair' if has_pair else 'one conversation'}, and the algorithm "
                f"wants {wanted}: set algorithm.algorithm_type to {'dpo' if has_pair else 'sft'}"
            )
        try:
            both = pair(row, form) if has_pair else (conversation(row, form),)
            yield tuple(trained_turns(renderer, talk, longest=longest) for talk in both)
        except Unusable as unusable:
            left_out.rollouts[unusable.reason] += 1
        except DatasetError as error:
            raise DatasetError(f"{where}: {error}") from None
