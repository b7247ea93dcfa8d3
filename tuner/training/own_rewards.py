"""One kind of reward inside a group, where rollouts of one agent may come with two kinds.

An agent that returns trajectories rewards each of them: where there are several, their calls have
rewards of their own, where there is one its reward is the rollout's. The same holds for an agent
that returns rewards by call or a number. In a group that has both

    rollout 0   one trajectory      1.0
    rollout 1   three trajectories  0.25  0.5  1.0

all are compared by rewards of calls, so that both have the same baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.traces import Trace


def alike(members: Sequence[tuple[Trace, float]]) -> list[tuple[Trace, float]]:
    """The rollouts of a group: where some say what each of their calls gained (`Call.gained`), the
    calls of one without any rewards of calls get the rollout's for their own.

    Args:
        members: Rollouts with their rewards.
    """
    if not any(call.gained is not None for trace, _ in members for call in trace.calls):
        return list(members)
    return [
        (trace if _has_own(trace) else _with_own(trace, reward), reward)
        for trace, reward in members
    ]


def _has_own(trace: Trace) -> bool:
    return any(call.reward is not None for call in trace.calls)


def _with_own(trace: Trace, reward: float) -> Trace:
    return replace(trace, calls=tuple(replace(call, reward=reward) for call in trace.calls))
