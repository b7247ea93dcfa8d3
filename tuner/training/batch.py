"""From traces to a training batch: groups, rewards, one row per call, and where every token went.

A call that the workflow masked in part has one row for each remaining stretch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from tuner.engines.base import SamplingParams
from tuner.errors import TrainingError
from tuner.traces import Call, Outcome, RolloutId, Trace, untrainable, without_vote
from tuner.training.forks import Point, trunk_of

# Selection of the groups and rollouts that are trained, by their rewards, and reward shaping.


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft punishment of long answers (arXiv 2503.14476, section 3.4).

    With T the tokens of an answer: 0 up to `longest - buffer`, from there linearly down to
    `-penalty` at `longest`. An answer that was cut off gets the full penalty.

    Attributes:
        longest: Maximum number of tokens of an answer.
        buffer: Length of the punished range.
        penalty: Penalty of an answer of `longest` tokens.
    """

    longest: int
    buffer: int
    penalty: float = 1.0

    def of(self, trace: Trace) -> float:
        """Change of a rollout's reward, at most 0: that of its worst answer."""
        worst = 0.0
        for call in trace.calls:
            excess = len(call.completion_ids) - (self.longest - self.buffer)
            share = 1.0 if call.finish_reason == "length" else min(1.0, excess / self.buffer)
            worst = min(worst, -self.penalty * share)
        return worst


@dataclass(frozen=True)
class Selection:
    """How the rewards of a step are filtered and shaped between judge and advantages.

    Filters see the rewards as given; those that remain become
    `(reward + bias) * scale + overlong`. Rewards of single calls become `(reward + bias) * scale`.

    Attributes:
        success_rate: Bounds, inclusive, on the share of rollouts with a reward above 0; groups
            outside them are dropped (AReaL's `success_rate_lb` and `_ub`).
        varied_only: Groups whose rewards are all equal are dropped (DAPO's dynamic sampling),
            unless their calls have rewards of their own.
        best_only: Only the rollouts of a group with the highest reward are kept, and none of a
            group whose rewards are all equal (RAFT, arXiv 2304.06767).
        lone_rewards: A call's own reward is used even if no other call of its group has one.
        needs_group: A rollout that is alone in its group teaches nothing.
        needs_reward: A rollout without a reward teaches nothing. If False, all rewards are ignored,
            those of single calls too.
    """

    success_rate: tuple[float, float] = (0.0, 1.0)
    varied_only: bool = False
    best_only: bool = False
    lone_rewards: bool = False
    scale: float = 1.0
    bias: float = 0.0
    overlong: Overlong | None = None
    needs_group: bool = True
    needs_reward: bool = True

    def reason(self, members: Sequence[tuple[Trace, float]]) -> str | None:
        """Why a whole group is dropped, or None.

        Args:
            members: Its trainable rollouts with their rewards.
        """
        if len(members) < 2 and self.needs_group:
            return "group_of_one"
        rewards = [reward for _, reward in members]
        rate = sum(reward > 0 for reward in rewards) / len(rewards)
        if rate < self.success_rate[0]:
            return "success_rate_too_low"
        if rate > self.success_rate[1]:
            return "success_rate_too_high"
        own = any(call.reward is not None for trace, _ in members for call in trace.calls)
        if own and self.best_only:
            raise TrainingError(
                "raft keeps the best rollouts of a group and cannot use rewards of single calls; "
                "give rewards to rollouts only, or set algorithm.algorithm_type to "
                "multi_step_grpo"
            )
        if (self.varied_only or self.best_only) and not own and len(set(rewards)) == 1:
            return "equal_rewards"
        return None

    def kept(self, members: Sequence[tuple[Trace, float]]) -> list[bool]:
        """Which rollouts of a used group are kept."""
        best = max(reward for _, reward in members)
        return [not self.best_only or reward == best for _, reward in members]

    def shaped(self, trace: Trace, reward: float) -> float:
        shaped = self.of_call(reward)
        return shaped + self.overlong.of(trace) if self.overlong is not None else shaped

    def of_call(self, reward: float) -> float:
        return (reward + self.bias) * self.scale


K = TypeVar("K", bound=Hashable)
# Outcomes that leave calls behind and may get a penalty instead of being dropped.
PENALIZABLE = (
    Outcome.WORKFLOW_ERROR,
    Outcome.JUDGE_ERROR,
    Outcome.JUDGE_TIMEOUT,
    Outcome.TIMEOUT,
    Outcome.INVALID_REWARD,
)


@dataclass(frozen=True)
class Row:
    """One call as training data: `prompt_ids + completion_ids`, trained on the completion.

    If part of the call is masked, `completion_ids` is one of the remaining stretches, and
    `prompt_ids` is everything before it.

    Attributes:
        rollout: Index of its rollout in the batch.
        reward: The call's own reward, or None: then its rollout's counts.
        gained: The gain at the end of the call, if it does not follow from `reward` and the
            rollout's reward (`Call.gained`); else None.
        kept: Tokens kept by cuts where each completion token was sampled, as in `Call.kept`.
        begun: Number of tokens at the end of `prompt_ids` that the call itself sampled.
        state: The call's role and state (`Call.state`), or None: then its prompt is its state.
        peers: Set of the rows of its group with rewards of their own and the same role, which its
            reward is compared with; None if it has no reward of its own.
        logprobs: Log-probs that the completion was sampled with; empty if it was not sampled.
        versions: Version of the weights that sampled each token; empty: the current weights.
        teacher_prompt_ids: Prompt for a teacher in place of `prompt_ids`; empty: the same.
        place: Index of its call among its rollout's, in order of commitment.
        foreign: Whether weights of another run sampled some of it (`Trace.foreign_from`); its
            `versions` then do not tell its age.
    """

    call_id: str
    rollout: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: SamplingParams
    reward: float | None = None
    peers: int | None = None
    versions: tuple[int, ...] = ()
    gained: float | None = None
    state: tuple[str | None, str] | None = None
    kept: tuple[str, ...] = ()
    begun: int = 0
    teacher_prompt_ids: tuple[int, ...] = ()
    place: int = 0
    foreign: bool = False

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def of_teacher(self) -> Row:
        """The row with the teacher's prompt."""
        return replace(self, prompt_ids=self.teacher_prompt_ids or self.prompt_ids)


@dataclass(frozen=True)
class Batch:
    """The rows of one step with the rewards of their rollouts.

    Attributes:
        rows: In order of rollout and call, whatever the order of arrival.
        rewards_R: Reward of each of the R rollouts used; 0 if it has none and needs none.
        group_R: Index of each rollout's group, 0 .. G-1.
        ids: Ids of these rollouts, R of them.
        sampled_tokens: Tokens sampled in all attempts of the step.
        dropped_tokens: Sampled tokens that are not trained, by reason.
        dropped_rollouts: Rollouts that are not trained, by reason.
        replayed_tokens: Tokens of branches that were sampled by the rollouts they branch from.
        origins: Where branches begin, including branches that are not used.
    """

    rows: tuple[Row, ...]
    rewards_R: Tensor
    group_R: Tensor
    ids: tuple[RolloutId, ...]
    sampled_tokens: int
    dropped_tokens: dict[str, int]
    dropped_rollouts: dict[str, int]
    replayed_tokens: int = 0
    origins: Mapping[RolloutId, Point[RolloutId]] = field(default_factory=dict)

    @property
    def trained_tokens(self) -> int:
        return sum(len(row.completion_ids) for row in self.rows)

    @property
    def foreign(self) -> bool:
        """Whether weights of another run sampled some of it."""
        return any(row.foreign for row in self.rows)

    def stale(self, step: int) -> bool:
        """Whether any of it was sampled by weights other than those after `step` updates."""
        return self.foreign or any(v != step for row in self.rows for v in row.versions)

    @property
    def call_N(self) -> Tensor:
        """Which call each row is of, 0 .. C-1 in order: a mask cuts one into several rows."""
        calls: dict[tuple[int, str], int] = {}
        of_rows = [calls.setdefault((row.rollout, row.call_id), len(calls)) for row in self.rows]
        return torch.tensor(of_rows, dtype=torch.long)


@dataclass(frozen=True)
class RoleBatches:
    """The batches of one step if roles have their own adapters.

    Attributes:
        of_roles: The batch of each role that is trained: what it would be if the rollouts had the
            calls of this role only.
        frozen_tokens: Tokens sampled in the calls of all other roles.
    """

    of_roles: Mapping[str, Batch]
    frozen_tokens: int

    @staticmethod
    def of(
        traces: Sequence[Trace],
        trained: Iterable[str],
        role_of: Callable[[Call], str | None],
        build: Callable[[Sequence[Trace]], Batch],
    ) -> RoleBatches:
        """Divide the calls of a step's rollouts.

        Args:
            trained: The roles that are trained.
            role_of: The role of a call.
            build: Makes the batch of the calls of a role.
        """

        def with_calls(role: str) -> list[Trace]:
            return [
                replace(trace, calls=tuple(call for call in trace.calls if role_of(call) == role))
                for trace in traces
            ]

        of_roles = {role: build(with_calls(role)) for role in trained}
        sampled = sum(trace.sampled_tokens for trace in traces)
        return RoleBatches(of_roles, sampled - sum(b.sampled_tokens for b in of_roles.values()))

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all roles."""
        return tuple(row for batch in self.of_roles.values() for row in batch.rows)

    @property
    def trained_tokens(self) -> int:
        return sum(batch.trained_tokens for batch in self.of_roles.values())

    @property
    def sampled_tokens(self) -> int:
        return self.frozen_tokens + sum(b.sampled_tokens for b in self.of_roles.values())

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """As in `Batch`; those of roles that are not trained are `frozen_role`."""
        dropped = Counter({"frozen_role": self.frozen_tokens})
        for batch in self.of_roles.values():
            dropped.update(batch.dropped_tokens)
        return {reason: count for reason, count in sorted(dropped.items()) if count}

    @property
    def dropped_rollouts(self) -> dict[str, int]:
        """Rollouts that no role is trained on, by the reason that all of them have."""
        every = [batch.dropped_rollouts for batch in self.of_roles.values()]
        least = {reason: min(one.get(reason, 0) for one in every) for reason in every[0]}
        return {reason: count for reason, count in least.items() if count}


def unreplayed(call: Call) -> str | None:
    """As `untrainable`, where no grammar, penalty or bias is replayed to compare like with like."""
    held = "edited_call" if call.sampling.edits_logits else None
    return untrainable(call) or ("constrained_call" if call.constrained else held)


TeacherPrompt = Callable[[Call], tuple[int, ...] | str]
"""The prompt that a teacher reads before a call, or why the call is not trained."""


def own_prompt(call: Call) -> tuple[int, ...]:
    """None: a teacher reads what the student reads."""
    return ()


@dataclass(frozen=True)
class CallUse:
    """Use of a call's sampled tokens.

    Attributes:
        stretches: Stretches [from, to) of `completion_ids` that are trained.
        lost: Number of the other sampled tokens, by reason.
        teacher_prompt_ids: As in `Row`.
    """

    stretches: Sequence[tuple[int, int]]
    lost: Mapping[str, int]
    teacher_prompt_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        call: Call,
        left_out: Callable[[Call], str | None] = untrainable,
        teacher_prompt: TeacherPrompt = own_prompt,
        oldest: int = 0,
    ) -> CallUse:
        """The arguments are those of `build_batch`."""
        reason = left_out(call)
        taught = teacher_prompt(call) if reason is None else reason
        if isinstance(taught, str):
            return cls((), {taught: call.sampled_tokens})
        stretches, stale = fresh(call, oldest)
        masked = call.sampled_tokens - sum(b - a for a, b in call.stretches)
        return cls(stretches, {"masked": masked, "stale": stale}, taught)

    @property
    def reason(self) -> str | None:
        """Why its rollout has no vote by it, or None: a token is trained, or is too old."""
        votes = self.stretches or self.lost.get("stale")
        return None if votes else max(self.lost, key=self.lost.__getitem__)


def _voters(
    members: Sequence[tuple[Trace, float]],
    uses: dict[tuple[RolloutId, str], CallUse],
    selection: Selection,
) -> tuple[list[tuple[Trace, float]], list[tuple[Trace, str]], dict[str | None, int]]:
    """The rollouts of a group whose rewards are compared; the others, with the reason; and the
    roles whose calls' own rewards are compared, numbered.

    Args:
        uses: Uses of calls; a call whose own reward has no peer loses its use.
    """

    def silence(trace: Trace) -> str | None:
        return without_vote(trace, lambda call: uses[trace.id, call.id].reason)

    voters = [one for one in members if silence(one[0]) is None]
    if not selection.lone_rewards:
        voters = alike(voters)
    roles: dict[str | None, int] = {}
    if selection.needs_reward and not selection.best_only:  # which refuses rewards of calls
        rewarded = [
            ((trace.id, call.id), call)
            for trace, _ in voters
            for call in trace.calls
            if call.reward is not None and uses[trace.id, call.id].stretches
        ]
        least = 1 if selection.lone_rewards else 2
        roles = peer_sets(((call.role, key[0]) for key, call in rewarded), least=least)
        for key, call in rewarded:
            if call.role not in roles:
                uses[key] = CallUse((), {"reward_without_peer": call.sampled_tokens})
    reasons = ((trace, silence(trace)) for trace, _ in members)
    silent = [(trace, reason) for trace, reason in reasons if reason is not None]
    return [one for one in voters if silence(one[0]) is None], silent, roles


def build_batch(
    traces: Iterable[Trace],
    *,
    penalty: float | None = None,
    selection: Selection = Selection(),  # it is frozen
    oldest: int = 0,
    unfinished: Collection[tuple[int, int]] = (),
    left_out: Callable[[Call], str | None] = untrainable,
    teacher_prompt: TeacherPrompt = own_prompt,
) -> Batch:
    """Choose what is trained; count, by reason, what is not.

    A group is used while at least two of its rollouts are, or one where that is enough. A rollout
    is used when it completed with a reward, or without where none is needed, or failed after at
    least one call and `penalty` is given; and when a token of it is trained or is only too old. The
    rewards of all others are compared with none.

    Args:
        traces: Every attempt of one step, in any order.
        penalty: Reward of a failed rollout (`tuner.on_failure: {penalize: value}`); None drops it.
        selection: Filters of groups, and what is done with rewards.
        oldest: Tokens that were sampled by earlier weights than this version are not trained; the
            rewards of their rollouts count all the same.
        unfinished: Groups, as (step, task), that were ended early and are not to be used.
        left_out: Why a call of a rollout that is used is not trained, or None.
        teacher_prompt: What a teacher reads before a call.

    Returns:
        The batch. `sampled_tokens == trained_tokens + sum(dropped_tokens.values())` holds.

    Raises:
        TrainingError: Calls have rewards of their own, and the selection has no use for them.
    """
    attempts = sorted(traces, key=lambda trace: (trace.id, trace.attempt))
    tokens: Counter[str] = Counter()
    rollouts: Counter[str] = Counter()
    groups: dict[tuple[int, int], list[tuple[Trace, float]]] = defaultdict(list)
    origins = {
        trace.id: Point(trace.origin.rollout, *trace.origin.position)
        for trace in attempts
        if trace.final and trace.origin is not None
    }
    for trace in attempts:
        reward = reward_of(trace, penalty, needed=selection.needs_reward)
        if not trace.final:
            tokens["retried_attempt"] += trace.sampled_tokens
        elif reward is None:
            tokens[trace.outcome.value] += trace.sampled_tokens
            rollouts[trace.outcome.value] += 1
        else:
            groups[trace.id.step, trace.id.task].append((trace, reward))

    uses = {
        (trace.id, call.id): CallUse.of(call, left_out, teacher_prompt, oldest)
        for members in groups.values()
        for trace, _ in members
        for call in trace.calls
    }

    used: list[tuple[Trace, float, int]] = []
    peers: dict[tuple[int, str | None], int] = {}
    kept_groups = 0
    for key, members in groups.items():
        voters, silent, roles = _voters(members, uses, selection)
        for trace, reason in silent:
            rollouts[reason] += 1
            for call in trace.calls:
                tokens.update(uses[trace.id, call.id].lost)
        if not voters:
            continue
        unused = "unfinished_group" if key in unfinished else selection.reason(voters)
        if unused is None and len({trunk_of(trace.id, origins) for trace, _ in voters}) == 1:
            unused = "one_tree" if selection.needs_group else None
        if unused is not None:
            tokens[unused] += sum(trace.sampled_tokens for trace, _ in voters)
            rollouts[unused] += len(voters)
            continue
        for (trace, reward), kept in zip(voters, selection.kept(voters), strict=True):
            if kept:
                used.append((trace, selection.shaped(trace, reward), kept_groups))
            else:
                tokens["not_best_of_group"] += trace.sampled_tokens
                rollouts["not_best_of_group"] += 1
        peers |= {(kept_groups, role): len(peers) + place for role, place in roles.items()}
        kept_groups += 1

    rows: list[Row] = []
    for index, (trace, _, group) in enumerate(used):
        before = len(rows)
        told = selection.needs_reward and any(c.gained is not None for c in trace.calls)
        for place, call in enumerate(one.compared for one in trace.calls):
            use = uses[trace.id, call.id]
            tokens.update(use.lost)
            reward = call.reward if selection.needs_reward else None
            gained = 0.0 if call.gained is None else selection.of_call(call.gained)
            taught = use.teacher_prompt_ids
            rows += [
                Row(
                    call_id=call.id,
                    rollout=index,
                    prompt_ids=call.prompt_ids + call.completion_ids[:start],
                    completion_ids=call.completion_ids[start:stop],
                    logprobs=call.logprobs[start:stop],
                    sampling=call.sampling,
                    reward=None if reward is None else selection.of_call(reward),
                    peers=None if reward is None else peers[group, call.role],
                    versions=call.versions[start:stop],
                    gained=gained if told else None,
                    state=None if call.state is None else (call.role, call.state),
                    kept=call.kept[start:stop],
                    begun=start,
                    teacher_prompt_ids=taught and taught + call.completion_ids[:start],
                    place=place,
                    foreign=trace.is_foreign(call.versions[start:stop]),
                )
                for start, stop in use.stretches
            ]
        rollouts["stale"] += len(rows) == before
    batch = Batch(
        rows=tuple(rows),
        rewards_R=torch.tensor([reward for _, reward, _ in used], dtype=torch.float64),
        group_R=torch.tensor([group for _, _, group in used], dtype=torch.long),
        ids=tuple(trace.id for trace, _, _ in used),
        sampled_tokens=sum(trace.sampled_tokens for trace in attempts),
        replayed_tokens=sum(trace.replayed_tokens for trace in attempts),
        origins=origins,
        dropped_tokens={reason: count for reason, count in sorted(tokens.items()) if count},
        dropped_rollouts={reason: count for reason, count in sorted(rollouts.items()) if count},
    )
    if batch.sampled_tokens != batch.trained_tokens + sum(batch.dropped_tokens.values()):
        raise AssertionError(
            f"{batch.sampled_tokens} tokens sampled, {batch.trained_tokens} trained and "
            f"{batch.dropped_tokens} dropped do not add up; this is a bug in tuner"
        )
    return batch


def alike(members: Sequence[tuple[Trace, float]]) -> list[tuple[Trace, float]]:
    """The rollouts of a group with comparable rewards: if some have gains of calls (`Call.gained`),
    each call of a rollout without rewards of calls gets the rollout's reward.

    An agent that returns several trajectories rewards each of them, so its calls have rewards of
    their own; with one trajectory the rollout has it. A group with both compares those of calls.

    Args:
        members: Rollouts with their rewards.
    """
    if all(call.gained is None for trace, _ in members for call in trace.calls):
        return list(members)
    found = []
    for trace, reward in members:
        if all(call.reward is None for call in trace.calls):
            trace = replace(trace, calls=tuple(replace(c, reward=reward) for c in trace.calls))
        found.append((trace, reward))
    return found


def fresh(call: Call, oldest: int) -> tuple[list[tuple[int, int]], int]:
    """The stretches of a call sampled by weights of version `oldest` or later, and the number of
    tokens in stretches of older ones. Versions never decrease within a call."""
    first = bisect_left(call.versions, oldest)
    stretches = [(max(start, first), stop) for start, stop in call.stretches if stop > first]
    kept = sum(stop - start for start, stop in stretches)
    return stretches, sum(stop - start for start, stop in call.stretches) - kept


def peer_sets(calls: Iterable[tuple[K, Hashable]], *, least: int = 2) -> dict[K, int]:
    """An index for each set of calls whose own rewards are compared. A set needs such calls of at
    least `least` rollouts.

    Args:
        calls: The set of each call (its group and role), and its rollout.
    """
    rollouts: dict[K, set[Hashable]] = defaultdict(set)
    for key, rollout in calls:
        rollouts[key].add(rollout)
    shared = [key for key, members in rollouts.items() if len(members) >= least]
    return {key: index for index, key in enumerate(shared)}


def reward_of(trace: Trace, penalty: float | None, *, needed: bool = True) -> float | None:
    """The reward that a rollout counts with, or None to drop it: its own if it completed, or the
    penalty if it failed after at least one call.

    Args:
        trace: Its last attempt.
        penalty: Reward of a failed rollout; None drops it.
        needed: Whether a rollout that completed without a reward is dropped, or gets 0.
    """
    if trace.outcome is Outcome.COMPLETED:
        return 0.0 if trace.reward is None and not needed else trace.reward
    return penalty if trace.outcome in PENALIZABLE and trace.calls else None
