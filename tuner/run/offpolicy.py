"""What another policy would have earned, from what one policy did: importance weights.

A session that the serving policy q sampled counts for the candidate p with the weight

    w = prod over its calls of rho_t,      rho_t = prod over the call's tokens of p / q

whose mean is 1, whatever p is, as long as q could have sampled what p would. With V = mean of the
reward under p, and R the reward of a session that q sampled:

    plain            mean(w R)           no bias; heavy weights make it jump
    self-normalised  sum(w R) / sum(w)   bias of order 1 / sessions, towards what was logged
    clipped          mean(min(w, c) R)   rewards counted from the lowest; bias: too low by
                                         lost * range at most, lost = mean(w - min(w, c))
    doubly robust    mean(v_1 + sum_t rho_1..t (v_t+1 - v_t)), with R as the last v: no bias
                     whatever the v are; the better they foretell R, the smaller its variance

(Precup, Sutton and Singh 2000; Ionides 2008; Jiang and Li, "Doubly robust off-policy value
evaluation for reinforcement learning", ICML 2016, arXiv 1511.03722.) v_t is the value of the state
before call t, of a critic or, without one, the mean reward of the task's other sessions, with which
the sum is v + w (R - v).

The interval needs no shape of the weights and no clip. Of each task

    x = mean over its sessions of (w - 1) (R - low) / range,    y = ... (w - 1) (high - R) / range

are never below -1, their means are the difference of the policies and its negative, and a bet on
large values of each gives a bound (`tuner.run.betting.lower_bounds`): as in Karampatziakis, Mineiro
and Ramdas, "Off-policy confidence sequences", ICML 2021, and with no upper end of the weights as in
Waudby-Smith et al., arXiv 2210.10768. Tasks count as drawn independently, their sessions need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from tuner.errors import ProofError
from tuner.run.betting import Floats, lower_bounds
from tuner.run.proof import Plan, Verdict

LEAST_EFFECTIVE = 20.0
"""Below so many effective sessions nothing is said, if the user does not say otherwise."""
CLIP = 10.0
_LEAST_SEEN = 0.5
"""Of the candidate's sessions at least this part must be like logged ones."""
_FARTHEST = 60.0
"""Logarithms of weights are cut here; beyond it they say nothing in any case."""
_SEED = 0


@dataclass(frozen=True)
class LoggedSession:
    """A session that the serving policy sampled, as the candidate sees it.

    Attributes:
        task: What it was about; sessions of one task are not independent.
        reward: Its reward.
        log_ratios: Of each call, in order, the log-prob of its completion under the candidate less
            that under what sampled it.
        values: Expected reward of the states before each call, if something knows it (a critic).
    """

    task: str
    reward: float
    log_ratios: tuple[float, ...]
    values: tuple[float, ...] = ()


class OffPolicy(BaseModel):
    """What logged sessions say of a candidate that did not serve. Means are over tasks.

    Attributes:
        sessions, tasks, calls: How many there are.
        left_out: Sessions that say nothing of the candidate, by reason.
        effective_sessions: (sum w)^2 / sum w^2.
        effective_calls: The same of single calls, each with its own weight.
        mean_weight: Of sessions; 1 where all that the candidate does is among what was logged.
        log_ratio: Mean of log(q / p) of a session: how far the candidate has moved (KL).
        refused: Why the weights say nothing, or None; then all that follows but `serving` is None.
        serving: Mean reward that was logged.
        plain, self_normalised, clipped, doubly_robust: Four estimates of the candidate's.
        clip, lost: Where weights were clipped, and the part of the candidate's sessions that this
            took away: `clipped` is too low by lost * (high - low) at most.
        estimate: Difference of the candidate and what serves, doubly robust.
        lower, upper: It is between these with a chance of alpha to be wrong.
        verdict: "promote" where lower is above the margin, "keep" where upper is below the effect.
        text: The same in sentences.
    """

    sessions: int
    tasks: int
    calls: int
    left_out: dict[str, int]
    effective_sessions: float
    effective_calls: float
    mean_weight: float
    log_ratio: float
    refused: str | None
    serving: float
    plain: float | None = None
    self_normalised: float | None = None
    clipped: float | None = None
    clip: float | None = None
    lost: float | None = None
    doubly_robust: float | None = None
    estimate: float | None = None
    lower: float | None = None
    upper: float | None = None
    verdict: Verdict = "not yet"
    text: str = ""


def off_policy(
    sessions: Sequence[LoggedSession],
    plan: Plan,
    *,
    least_effective: float = LEAST_EFFECTIVE,
    clip: float = CLIP,
    left_out: Mapping[str, int] | None = None,
) -> OffPolicy:
    """What logged sessions say of a candidate.

    Args:
        sessions: Two or more.
        plan: The range of rewards, alpha, margin and effect; of power and share nothing is used.
        least_effective: Effective sessions below which the answer is a refusal.
        clip: Largest weight of the clipped estimate.
        left_out: Sessions that were left out before, by reason.

    Raises:
        ProofError: There are no two sessions, a reward is outside of the plan's range, a log-ratio
            is nan, or a session has values, but not one for each call.
    """
    check_enough(len(sessions), left_out or {})
    for session in sessions:
        _check(session, plan)
    log_N = np.clip([sum(one.log_ratios) for one in sessions], -_FARTHEST, _FARTHEST)
    weights_N = np.exp(log_N)
    calls = np.clip([r for one in sessions for r in one.log_ratios], -_FARTHEST, _FARTHEST)
    tasks_N = _numbers([one.task for one in sessions])
    rewards_N = np.array([one.reward for one in sessions])
    parts_N = 1 / (np.bincount(tasks_N)[tasks_N] * (tasks_N.max() + 1))
    seen: dict[str, Any] = {
        "sessions": len(sessions),
        "tasks": int(tasks_N.max()) + 1,
        "calls": len(calls),
        "left_out": dict(left_out or {}),
        "effective_sessions": effective(log_N),
        "effective_calls": effective(calls),
        "mean_weight": float(parts_N @ weights_N),
        "log_ratio": float(-(parts_N @ log_N)),
        "serving": float(parts_N @ rewards_N),
    }
    if (refused := _refusal(seen, least_effective)) is not None:
        return OffPolicy(**seen, refused=refused, text=f"not yet: {refused}")
    return _estimated(sessions, plan, seen, weights_N, rewards_N, tasks_N, parts_N, clip)


def check_enough(sessions: int, left_out: Mapping[str, int]) -> None:
    """
    Raises:
        ProofError: There are no two sessions.
    """
    if sessions < 2:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
        raise ProofError(f"{sessions} logged sessions say nothing (left out: {reasons})")


def effective(log_weights: Floats) -> float:
    """Effective sample size (sum w)^2 / sum w^2 (Kish 1965), from logarithms of weights."""
    if not len(log_weights):
        return 0.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum())


def _check(session: LoggedSession, plan: Plan) -> None:
    plan.scaled(session.reward, "a logged session")
    if any(math.isnan(ratio) for ratio in session.log_ratios):
        raise ProofError(f"a session of task {session.task[:80]} has a log-ratio that is nan")
    if session.values and len(session.values) != len(session.log_ratios):
        raise ProofError(
            f"a session has {len(session.log_ratios)} calls and {len(session.values)} values"
        )


def _refusal(seen: Mapping[str, Any], least: float) -> str | None:
    effective_sessions, mean_weight = seen["effective_sessions"], seen["mean_weight"]
    if effective_sessions < least:
        why = (
            f"effective sample size {effective_sessions:.0f} of {seen['sessions']}, and "
            f"{least:g} are wanted"
        )
    elif mean_weight < _LEAST_SEEN:
        why = (
            f"their mean is {mean_weight:.2g} where it should be 1: most of what the candidate "
            "does is not among what was logged"
        )
    else:
        return None
    return f"the weights say nothing: {why}; collect live sessions"


def _numbers(tasks: Sequence[str]) -> np.ndarray:
    known: dict[str, int] = {}
    return np.array([known.setdefault(task, len(known)) for task in tasks])


def _estimated(
    sessions: Sequence[LoggedSession],
    plan: Plan,
    seen: Mapping[str, Any],
    weights_N: Floats,
    rewards_N: Floats,
    tasks_N: np.ndarray,
    parts_N: Floats,
    clip: float,
) -> OffPolicy:
    """The estimates and the interval, where weights say something."""
    clipped_N = np.minimum(weights_N, clip)
    baselines_N = _others(rewards_N, tasks_N)
    robust_N = baselines_N + weights_N * (rewards_N - baselines_N)
    for place, session in enumerate(sessions):
        if session.values:
            robust_N[place] = _robust(session)
    estimate = float(parts_N @ (robust_N - rewards_N))
    lower, upper = interval(weights_N, rewards_N, tasks_N, plan)
    verdict: Verdict = "not yet"
    if lower > plan.margin:
        verdict = "promote"
    elif upper < plan.effect:
        verdict = "keep"
    found = OffPolicy(
        **seen,
        refused=None,
        plain=float(parts_N @ (weights_N * rewards_N)),
        self_normalised=float(parts_N @ (weights_N * rewards_N) / (parts_N @ weights_N)),
        clipped=float(parts_N @ (clipped_N * (rewards_N - plan.low))) + plan.low,
        clip=clip,
        lost=float(parts_N @ (weights_N - clipped_N)),
        doubly_robust=float(parts_N @ robust_N),
        estimate=estimate,
        lower=lower,
        upper=upper,
        verdict=verdict,
    )
    return found.model_copy(update={"text": _text(found, plan)})


def _robust(session: LoggedSession) -> float:
    """v_1 + sum_t rho_1..t (v_t+1 - v_t), with the reward as the last value; where the values are
    one value v it is v + w (R - v)."""
    values = [*session.values, session.reward]
    weights = np.exp(np.clip(np.cumsum(session.log_ratios), -_FARTHEST, _FARTHEST))
    return float(values[0] + weights @ np.diff(values))


def _others(rewards_N: Floats, tasks_N: np.ndarray) -> Floats:
    """Of each session the mean reward of the others of its task; where there are none, of all."""
    counts_N = np.bincount(tasks_N)[tasks_N]
    sums_N = np.bincount(tasks_N, weights=rewards_N)[tasks_N]
    of_all_N = (rewards_N.sum() - rewards_N) / (len(rewards_N) - 1)
    others: Floats = np.where(
        counts_N > 1, (sums_N - rewards_N) / np.maximum(counts_N - 1, 1), of_all_N
    )
    return others


def interval(
    weights_N: Floats, rewards_N: Floats, tasks_N: np.ndarray, plan: Plan
) -> tuple[float, float]:
    """What the difference is between, with a chance of `plan.alpha` to be wrong.

    Args:
        weights_N: Of sessions.
        rewards_N: Their rewards.
        tasks_N: The tasks' numbers, from 0.
    """
    moved_N = weights_N - 1
    scores_SN = np.stack([moved_N * (rewards_N - plan.low), moved_N * (plan.high - rewards_N)])
    sums_ST = np.stack([np.bincount(tasks_N, weights=scores_N) for scores_N in scores_SN])
    scores_ST = sums_ST / np.bincount(tasks_N) / plan.range
    order_T = np.random.default_rng(_SEED).permutation(scores_ST.shape[1])
    lower, below = lower_bounds(scores_ST[:, order_T], alpha=plan.alpha / 2) * plan.range
    return float(lower), float(-below)


def _text(found: OffPolicy, plan: Plan) -> str:
    said = {
        "promote": f"the candidate is better by more than {plan.margin:g}",
        "keep": f"the candidate is not better by {plan.effect:g}",
        "not yet": "nothing is proven; collect live sessions",
    }[found.verdict]
    return (
        f"{found.verdict}: {said}. Difference {found.estimate:+.4f}, between {found.lower:+.4f} "
        f"and {found.upper:+.4f} ({1 - plan.alpha:.0%} sure); effective sample size "
        f"{found.effective_sessions:.0f} of {found.sessions} sessions of {found.tasks} tasks"
    )
