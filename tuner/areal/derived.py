"""The trajectories of a rollout whose workflow did not name any: those of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.areal.episodes import Episode
from tuner.areal.settle import Settled
from tuner.areal.tensors import Trajectory
from tuner.traces import Call, Trace, successors
from tuner.training import Row, Selection, build_batch
from tuner.training.batch import untrainable

ALL = Selection(needs_group=False, lone_rewards=True)


def left_out(call: Call) -> str | None:
    """Why a call is not trained here; tensors cannot say what form a call was held to."""
    return untrainable(call) or ("constrained_call" if call.constrained else None)


def derived(trace: Trace) -> Episode:
    """Its calls, joined where one goes on from another and both have the same reward."""
    ids: list[tuple[int, ...]] = []
    owners: list[list[int | None]] = []
    rewards: list[float] = []
    rollout_reward = trace.reward or 0.0
    for index, call in enumerate(trace.calls):
        if not call.completion_ids:
            continue
        reward = rollout_reward if call.reward is None else call.reward
        own: list[int | None] = [None] * len(call.completion_ids)
        for start, stop in () if call.excluded else call.stretches:
            own[start:stop] = [index] * (stop - start)
        row = next(
            (
                row
                for row, known in enumerate(ids)
                if rewards[row] == reward and call.prompt_ids[: len(known)] == known
            ),
            None,
        )
        if row is None:
            row = len(ids)
            ids.append(())
            owners.append([])
            rewards.append(reward)
        owners[row] += [None] * (len(call.prompt_ids) - len(ids[row])) + own
        ids[row] = call.prompt_ids + call.completion_ids
    return _episode(trace, ids, owners, rewards)


def derived_by_gain(trace: Trace, bias: float) -> Episode:
    """A trajectory for each call that gains something or that none goes on from, with the calls
    that led to it; for algorithms that add up what calls lead to. In all, a call gains what it
    does without trajectories (`tuner.training.scoring`).

    Args:
        bias: What is added to each reward that is given (`tuner.algorithm.reward_bias`).
    """
    calls = tuple(replace(c, excluded=left_out(c) is not None) for c in trace.calls)
    rows = build_batch([replace(trace, calls=calls)], selection=ALL).rows
    if not rows:
        return derived(trace)
    after = successors(rows, [0] * len(rows))
    index = {call.id: place for place, call in enumerate(calls)}
    told = any(call.gained is not None for call in calls)
    ids: list[tuple[int, ...]] = []
    owners: list[list[int | None]] = []
    rewards: list[float] = []
    trajectory: dict[int, int] = {}
    # What goes on from a row is longer than it.
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        row, follow = rows[place], after[place]
        call = calls[index[row.call_id]]
        given: list[float | None] = []
        if not any(rows[follower].call_id == row.call_id for follower in follow):
            given = [call.gained] if told else [call.reward, None if follow else trace.reward]
        gains = [gain for gain in given if gain is not None]
        if gains or not follow:
            trajectory[place] = len(ids)
            ids.append(row.prompt_ids + row.completion_ids)
            owners.append([None] * len(row))
            # Several rewards have the bias several times, as a trajectory's has it once.
            rewards.append(sum(gains) + (len(gains) - 1) * bias)
        else:
            trajectory[place] = trajectory[follow[0]]
        _own(owners[trajectory[place]], row, index[row.call_id])
    return _episode(trace, ids, owners, rewards)


def _own(owners: list[int | None], row: Row, call: int) -> None:
    start = len(row.prompt_ids)
    owners[start : start + len(row.completion_ids)] = [call] * len(row.completion_ids)


def _episode(
    trace: Trace,
    ids: Sequence[tuple[int, ...]],
    owners: Sequence[Sequence[int | None]],
    rewards: Sequence[float],
) -> Episode:
    trajectories = tuple(
        Trajectory(row, tuple(o is not None for o in own), (0.0,) * len(row), None, reward)
        for row, own, reward in zip(ids, owners, rewards, strict=True)
    )
    settled = Settled(tuple(map(tuple, owners)), (None,) * len(trace.calls))
    return Episode(trajectories, trace.calls, settled, trace.reward or 0.0)
