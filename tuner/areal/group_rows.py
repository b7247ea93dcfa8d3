"""Trajectories of a group's rollouts as tensors, with the reasons for dropped tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuner.areal.token_workflow import Episode
from tuner.areal.trajectories import Trajectory, concat_padded_tensors
from tuner.areal.trajectory_batch import SAMPLING_KEYS, Account
from tuner.engines.base import SamplingParams
from tuner.traces import Call, Outcome, Trace, successors, without_vote
from tuner.training.batch import Selection, build_batch, unreplayed

AcceptFunction = Callable[[Mapping[str, Tensor]], bool]

_ALL = Selection(needs_group=False, lone_rewards=True)


@dataclass
class _Made:
    """An incomplete trajectory: its ids, and the call that sampled each of them."""

    ids: tuple[int, ...]
    owners: list[int | None]
    reward: float


def derived(trace: Trace) -> Episode:
    """Trajectories from calls, joined if one continues another and both have the same reward."""
    made: list[_Made] = []
    rollout_reward = trace.reward or 0.0
    for index, call in enumerate(trace.calls):
        if not call.completion_ids:
            continue
        reward = rollout_reward if call.reward is None else call.reward
        own: list[int | None] = [None] * len(call.completion_ids)
        for start, stop in () if call.excluded else call.stretches:
            own[start:stop] = [index] * (stop - start)
        for row in made:
            if row.reward == reward and call.prompt_ids[: len(row.ids)] == row.ids:
                break
        else:
            row = _Made((), [], reward)
            made.append(row)
        row.owners += [None] * (len(call.prompt_ids) - len(row.ids)) + own
        row.ids = call.prompt_ids + call.completion_ids
    return _episode(trace, made)


def derived_by_gain(trace: Trace, bias: float) -> Episode:
    """A trajectory for each call that gains something or that no call continues, with the calls
    that led to it; for algorithms that sum up the returns of calls. In total, a call gains
    what it does without trajectories (`tuner.training.scoring`).

    Args:
        bias: Added to each given reward (`tuner.algorithm.reward_bias`).
    """
    calls = tuple(replace(c, excluded=unreplayed(c) is not None) for c in trace.calls)
    rows = build_batch([replace(trace, calls=calls)], selection=_ALL).rows
    if not rows:
        return derived(trace)
    after = successors(rows, [0] * len(rows))
    index = {call.id: place for place, call in enumerate(calls)}
    told = any(call.gained is not None for call in calls)
    made: list[_Made] = []
    of_row: dict[int, _Made] = {}
    # A continuation of a row is longer than it.
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        row, follow = rows[place], after[place]
        call = calls[index[row.call_id]]
        given: list[float | None] = []
        if not any(rows[follower].call_id == row.call_id for follower in follow):
            given = [call.gained] if told else [call.reward, None if follow else trace.reward]
        gains = [gain for gain in given if gain is not None]
        if gains or not follow:
            # Several rewards contain the bias several times; a trajectory's reward contains it
            # once.
            reward = sum(gains) + (len(gains) - 1) * bias
            of_row[place] = _Made(row.prompt_ids + row.completion_ids, [None] * len(row), reward)
            made.append(of_row[place])
        else:
            of_row[place] = of_row[follow[0]]
        own = [index[row.call_id]] * len(row.completion_ids)
        of_row[place].owners[len(row.prompt_ids) : len(row)] = own
    return _episode(trace, made)


def _episode(trace: Trace, made: Sequence[_Made]) -> Episode:
    owners = tuple(tuple(one.owners) for one in made)
    masks = [tuple(owner is not None for owner in own) for own in owners]
    trajectories = tuple(
        Trajectory(one.ids, mask, (0.0,) * len(mask), None, one.reward)
        for one, mask in zip(made, masks, strict=True)
    )
    return Episode(trajectories, owners, trace.reward or 0.0)


@dataclass(frozen=True)
class Group:
    """The rollouts of one task.

    Attributes:
        tensors: Its trajectories, padded; `rollout_ids` count from 0. None if it is dropped.
        account: Use of all sampled tokens.
        traces: Every attempt.
    """

    tensors: dict[str, Tensor] | None
    account: Account
    traces: tuple[Trace, ...]

    @property
    def rollouts(self) -> int:
        """Number of rollouts of its trajectories."""
        return 0 if self.tensors is None else int(self.tensors["rollout_ids"].max()) + 1


def group_of(
    rollouts: Sequence[Sequence[Trace]],
    episodes: Mapping[str, Episode],
    selection: Selection,
    accept: AcceptFunction | None = None,
    *,
    adds_up: bool = False,
) -> Group:
    """The selected trajectories of one task's rollouts, with the account of their tokens.

    Of several rollouts each counts once in the group, however many trajectories it has. Of a single
    rollout every trajectory counts: its workflow collected a group itself.

    Args:
        rollouts: The attempts at each, the last of them final.
        episodes: By session, if the workflow named trajectories itself.
        selection: Criteria for groups and their rollouts.
        accept: Decides from a group's tensors whether it is trained.
        adds_up: Whether the algorithm sums up the returns of calls. Trajectories of a single
            rollout then count as one if one continues the other.
    """
    rows: list[dict[str, Tensor]] = []
    members: dict[int, tuple[Trace, list[float]]] = {}
    numbers: list[int] = []
    dropped: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    errors: list[str] = []
    for number, (*before, trace) in enumerate(rollouts):
        dropped["retried_attempt"] += sum(attempt.sampled_tokens for attempt in before)
        outcomes[trace.outcome.value] += 1
        if trace.outcome is not Outcome.COMPLETED:
            dropped[trace.outcome.value] += trace.sampled_tokens
            errors.append(f"{trace.id}: {trace.outcome}: {trace.error}")
            continue
        named = episodes.get(f"{trace.id}-{trace.attempt}")
        episode = named or (derived_by_gain(trace, selection.bias) if adds_up else derived(trace))
        counted = [number] * len(episode.trajectories)
        if len(rollouts) == 1 and not (adds_up and named is None):
            counted = _gathered(episode, adds_up)
        trained: Counter[int] = Counter()
        for place, trajectory in enumerate(episode.trajectories):
            owners = [
                None if owner is None or unreplayed(trace.calls[owner]) else owner
                for owner in episode.owners[place]
            ]
            trained.update(owner for owner in owners if owner is not None)
            rows.append(_tensors(trajectory, owners, trace.calls))
            numbers.append(counted[place])
            members.setdefault(numbers[-1], (trace, []))[1].append(
                episode.reward if len(rollouts) > 1 else trajectory.reward
            )
        for index, call in enumerate(trace.calls):
            dropped[unreplayed(call) or "masked"] += len(call.completion_ids) - trained[index]
    traces = tuple(trace for attempts in rollouts for trace in attempts)
    voters = {n for n, row in zip(numbers, rows, strict=True) if bool(row["loss_mask"].any())}
    for number in sorted(members.keys() - voters):
        outcomes[without_vote(members[number][0], unreplayed) or "masked"] += 1
    # A group in which nothing is trained is kept for its rewards: greedy rollouts are evaluations.
    in_batch = voters or members.keys()
    members = {number: found for number, found in members.items() if number in in_batch}
    rows = [row for n, row in zip(numbers, rows, strict=True) if n in in_batch]
    tensors = concat_padded_tensors(rows) if rows else None
    if tensors is not None:
        numbers = [n for n in numbers if n in in_batch]
        tensors["rollout_ids"] = torch.tensor(numbers)
        found = [(trace, fmean(rewards)) for trace, rewards in members.values()]
        reason = selection.reason(found) if len(found) > 1 else None
        if reason is None and accept is not None and not accept(tensors):
            reason = "not_accepted"
        kept = dict(zip(members, selection.kept(found), strict=True))
        chosen_B = torch.tensor([reason is None and kept[number] for number in numbers])
        reason = reason or "not_best_of_group"
        dropped[reason] += int(tensors["loss_mask"][~chosen_B].sum())
        outcomes[reason] += len({n for n, c in zip(numbers, chosen_B, strict=True) if not c})
        chosen = {key: tensor[chosen_B] for key, tensor in tensors.items()}
        tensors = chosen if bool(chosen_B.any()) else None
    sampled = sum(trace.sampled_tokens for trace in traces)
    masked = 0 if tensors is None else int(tensors["loss_mask"].sum())
    if sampled != masked + dropped.total():
        raise AssertionError(
            f"{sampled} tokens sampled, {masked} to be trained and {dict(dropped)} dropped do not "
            "add up; this is a bug in tuner"
        )
    account = Account(
        sampled,
        {name: count for name, count in dropped.items() if count},
        {name: count for name, count in outcomes.items() if count},
        tuple(errors),
    )
    return Group(tensors, account, traces)


def _gathered(episode: Episode, adds_up: bool) -> list[int]:
    """Trajectories of a single rollout that count as one, by number. If rewards are summed up,
    these are trajectories of which one continues another: it contains the trained tokens of
    the other, and does not train them."""
    numbers = list(range(len(episode.trajectories)))
    if not adds_up:
        return numbers
    owners = episode.owners
    for before, trajectory in enumerate(episode.trajectories):
        first = next((i for i, owner in enumerate(owners[before]) if owner is not None), None)
        if first is None:
            continue
        begins = trajectory.input_ids[: first + 1]
        for after, other in enumerate(episode.trajectories):
            if other.input_ids[: first + 1] == begins and owners[after][first] is None:
                joined, gone = sorted((numbers[before], numbers[after]))
                numbers = [joined if number == gone else number for number in numbers]
    return [sorted(set(numbers)).index(number) for number in numbers]


def _tensors(
    trajectory: Trajectory, owners: Sequence[int | None], calls: Sequence[Call]
) -> dict[str, Tensor]:
    """One trajectory with the trace's data of its trained tokens, shape [1, L]."""
    length = len(trajectory.input_ids)
    logprobs, versions = [0.0] * length, [-1] * length
    calls_L = [-1 if owner is None else owner for owner in owners]
    settings: dict[str, list[Any]] = {
        key: [getattr(SamplingParams, name)] * length for key, (name, _) in SAMPLING_KEYS.items()
    }
    kept = [b""] * length
    for place, owner in enumerate(owners):
        if owner is None:
            continue
        call = calls[owner]
        inside = place - len(call.prompt_ids)
        logprobs[place], versions[place] = call.logprobs[inside], call.versions[inside]
        for key, (name, _) in SAMPLING_KEYS.items():
            settings[key][place] = getattr(call.sampling, name)
        kept[place] = call.kept[inside].encode() if call.kept else b""
    width = max(map(len, kept))
    packed = b"".join(one.ljust(width, b"\0") for one in kept)
    return {
        "input_ids": torch.tensor([trajectory.input_ids]),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "loss_mask": torch.tensor([[int(owner is not None) for owner in owners]]),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions]),
        "calls": torch.tensor([calls_L]),
        # In float64: the settings must be recovered exactly.
        **{
            key: torch.tensor([settings[key]], dtype=torch.float64 if kind is float else None)
            for key, (_, kind) in SAMPLING_KEYS.items()
        },
        "kept": torch.tensor(np.frombuffer(packed, np.uint8).reshape(1, length, width)),
        "rewards": torch.tensor([trajectory.reward], dtype=torch.float32),
    }
