"""False promotions and sessions needed to prove that a candidate is better, in simulations.

1,000 simulated deployments of each kind, session by session, the arm by a coin. False
promotions: where the candidate is no better, how many are ever promoted while one looks after every
session for four times as long as the test with one look takes; beside a z-test at 5 % that is
looked at as often. Sessions: until there is a verdict, both arms counted, where the candidate is
better by the planned effect and by twice that; beside the one-sided two-sample z-test with one
look, which is given the true variances: the stronger peer, as Fisher's and Barnard's tests take
more for the same power. Power is that of the same deployments.

    python benchmarks/promotion.py [--deployments 1000]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _report import Row, report
from numpy.typing import NDArray

from tuner.runs.statistics import Plan, evidence_of

LOOKS = 4.0  # times the sessions of the test with one look
GIVEN_UP = 40.0  # the same, after which a deployment counts with what it took
Z, FIRST_LOOK = 1.6449, 40  # of 5 %; before that a z-test means nothing
Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int, Array], Array]


@dataclass(frozen=True)
class Deployment:
    """A candidate and what serves.

    Attributes:
        name: Of the case.
        plan: What is to be proven.
        draw: Rewards at a session, given whether each deployment's is the candidate's.
        deviations: Standard deviations of the rewards of what serves and of the candidate.
        share: The coin at a session, where it is not the plan's.
        paired: Whether both are asked the same task, and `draw` gives differences.
    """

    name: str
    plan: Plan
    draw: Draw
    deviations: tuple[float, float]
    share: Callable[[int], float] | None = None
    paired: bool = False


def drawn(random: np.random.Generator, chance_D: Array) -> Array:
    """1 with such a chance, else 0."""
    return np.where(random.random(len(chance_D)) < chance_D, 1.0, 0.0)


def bernoulli(serving: float, candidate: float) -> tuple[Draw, tuple[float, float]]:
    """Rewards 0 and 1."""

    def draw(random: np.random.Generator, _: int, candidate_D: Array) -> Array:
        chance_D = np.where(candidate_D, candidate, serving)
        return drawn(random, chance_D)

    return draw, (math.sqrt(serving * (1 - serving)), math.sqrt(candidate * (1 - candidate)))


def drifting(effect: float) -> Draw:
    """Both arms get better and worse together, by 0.6."""

    def draw(random: np.random.Generator, session: int, candidate_D: Array) -> Array:
        level = 0.4 + 0.3 * np.sin(session / 150)
        return drawn(random, level + effect * candidate_D)

    return draw


def ties(random: np.random.Generator, _: int, candidate_D: Array) -> Array:
    """Nine of ten rewards are 0.5."""
    return np.where(
        random.random(len(candidate_D)) < 0.9, 0.5, random.integers(2, size=len(candidate_D))
    )


def skewed(random: np.random.Generator, _: int, candidate_D: Array) -> Array:
    """Mostly small, and large now and then: exponential with mean 0.05, up to 1."""
    return np.minimum(random.exponential(0.05, len(candidate_D)), 1.0)


def beta(shift: float) -> tuple[Draw, tuple[float, float]]:
    """Beta(2, 2) on [0, 0.8], and `shift` more for the candidate."""

    def draw(random: np.random.Generator, _: int, candidate_D: Array) -> Array:
        return 0.8 * random.beta(2, 2, len(candidate_D)) + shift * candidate_D

    return draw, (0.8 * float(np.sqrt(0.05)),) * 2


def pairs(better: float, worse: float) -> tuple[Draw, tuple[float, float]]:
    """Differences of binary rewards on one task."""

    def draw(random: np.random.Generator, _: int, candidate_D: Array) -> Array:
        found = random.random(len(candidate_D))
        return (found < better) * 1.0 - (found > 1 - worse) * 1.0

    deviation = float(np.sqrt(better + worse - (better - worse) ** 2))
    return draw, (deviation, deviation)


def without_effect() -> Iterator[Deployment]:
    """Candidates that are not to be promoted."""
    plan = Plan(effect=0.1)
    yield Deployment("no difference, 0.5", plan, *bernoulli(0.5, 0.5))
    yield Deployment("worse by 0.05", plan, *bernoulli(0.5, 0.45))
    yield Deployment("ties, 90 % of rewards 0.5", replace(plan, effect=0.05), ties, (0.158,) * 2)
    yield Deployment("both drift by 0.6", plan, drifting(0.0), (0.5,) * 2)
    canary = replace(plan, share=0.1)
    yield Deployment("10 % canary", canary, *bernoulli(0.5, 0.5))
    yield Deployment(
        "share 5 % to 50 %, both drift",
        canary,
        drifting(0.0),
        (0.5, 0.5),
        share=lambda session: min(0.5, 0.05 + session / 4000),
    )
    yield Deployment("rare, 0.02", replace(plan, effect=0.02), *bernoulli(0.02, 0.02))
    yield Deployment("skewed, mean 0.05", replace(plan, effect=0.02), skewed, (0.05,) * 2)
    yield Deployment("continuous", plan, *beta(0.0))
    yield Deployment(
        "better by half of the margin", replace(plan, margin=0.04), *bernoulli(0.5, 0.52)
    )
    yield Deployment("pairs, 20 % differ", plan, *pairs(0.1, 0.1), paired=True)


def with_effect(times: int) -> Iterator[Deployment]:
    """Candidates that are better by so many times the planned effect."""
    for serving, effect, share in (
        (0.5, 0.1, 0.5),
        (0.5, 0.05, 0.5),
        (0.2, 0.05, 0.5),
        (0.5, 0.1, 0.1),
    ):
        plan = Plan(effect=effect, share=share)
        name = f"{serving:g} to {serving + times * effect:g}"
        name += "" if share == 0.5 else f", {share:.0%} canary"
        yield Deployment(name, plan, *bernoulli(serving, serving + times * effect))
    rare = Plan(effect=0.02)
    yield Deployment(
        f"rare, 0.02 to {0.02 + times * 0.02:g}", rare, *bernoulli(0.02, 0.02 + times * 0.02)
    )
    yield Deployment(f"continuous, + {times * 0.05:g}", Plan(effect=0.05), *beta(times * 0.05))
    yield Deployment(
        f"both drift, + {times * 0.1:g}", Plan(effect=0.1), drifting(times * 0.1), (0.49, 0.5)
    )
    better = 0.1 + times * 0.05
    yield Deployment(
        f"pairs, {better + 0.1:.0%} differ, + {times * 0.05:g}",
        Plan(effect=0.05),
        *pairs(better, 0.1),
        paired=True,
    )


def one_look(deployment: Deployment) -> int:
    """Sessions of the z-test with one look."""
    plan = deployment.plan
    if deployment.paired:  # one deviation, of the differences
        return replace(plan, share=0.5).fixed_horizon(*deployment.deviations) // 4
    return plan.fixed_horizon(*deployment.deviations)


class Playing:
    """Deployments side by side, session by session.

    Attributes:
        won_D, lost_D: Whether each was promoted, and kept, at any look so far.
    """

    def __init__(self, deployment: Deployment, count: int) -> None:
        plan = deployment.plan
        hypotheses = np.array([plan.margin, plan.effect]) / plan.range
        self.deployment, self.random, self.count = deployment, np.random.default_rng(7), count
        self.evidence = evidence_of(plan, hypotheses, comparisons=count, paired=deployment.paired)

    def session(self, number: int) -> tuple[Array, Array]:
        """One more of each: whether it was the candidate's, and its reward."""
        plan, share = self.deployment.plan, self.deployment.share
        chance = plan.share if share is None else share(number)
        candidate_D = self.random.random(self.count) < chance
        reward_D = self.deployment.draw(self.random, number, candidate_D)
        if self.deployment.paired:
            self.evidence.add_pairs(reward_D)
        else:
            self.evidence.add_sessions(candidate_D, reward_D, chance)
        return candidate_D, reward_D

    @property
    def won_D(self) -> Array:
        won_D: Array = self.evidence.peak_DMS[:, 0, 0] >= 1 / self.deployment.plan.alpha
        return won_D

    @property
    def lost_D(self) -> Array:
        lost_D: Array = self.evidence.peak_DMS[:, 1, 1] >= 1 / (1 - self.deployment.plan.power)
        return lost_D

    def go_on_with(self, chosen_D: Array) -> None:
        """Only with some of them."""
        self.count = int(chosen_D.sum())
        for name in ("wealth_DMSB", "peak_DMS", "rewards_D", "scores_D", "squares_D"):
            setattr(self.evidence, name, getattr(self.evidence, name)[chosen_D])


def wrong(deployment: Deployment, count: int, looks: int) -> tuple[float, float, float]:
    """Of deployments that are looked at so often, how many are ever promoted, how many are kept
    before that, and how many a z-test promotes at any look."""
    playing, z_D, kept_D = Playing(deployment, count), np.zeros(count, bool), np.zeros(count, bool)
    sums_AD, squares_AD, counts_AD = (np.zeros((2, count)) for _ in range(3))
    for session in range(1, looks + 1):
        candidate_D, reward_D = playing.session(session)
        kept_D |= playing.lost_D & ~playing.won_D
        arm_AD = np.stack([~candidate_D, candidate_D]) | deployment.paired
        counts_AD += arm_AD
        sums_AD += arm_AD * reward_D
        squares_AD += arm_AD * reward_D**2
        if session >= FIRST_LOOK:
            z_D |= z_scores(sums_AD, squares_AD, counts_AD, deployment) > Z
    return float(playing.won_D.mean()), float(kept_D.mean()), float(z_D.mean())


def verdicts(deployment: Deployment, count: int, most: int) -> tuple[Array, float]:
    """Sessions until each of D deployments has a verdict, and how many are promoted."""
    playing, sessions, promoted = Playing(deployment, count), list[int](), 0
    for session in range(1, most + 1):
        playing.session(session)
        if (decided_D := playing.won_D | playing.lost_D).any():
            sessions += [session] * int(decided_D.sum())
            promoted += int(playing.won_D.sum())
            playing.go_on_with(~decided_D)
        if not playing.count:
            break
    return np.array(sessions + [most] * playing.count), promoted / count


def z_scores(sums_AD: Array, squares_AD: Array, counts_AD: Array, deployment: Deployment) -> Array:
    """Of the z-test with the variances that were seen."""
    counts_AD = np.maximum(counts_AD, 2)
    means_AD = sums_AD / counts_AD
    variances_AD = np.maximum(squares_AD / counts_AD - means_AD**2, 1e-9) / counts_AD
    difference_D = means_AD[0] if deployment.paired else means_AD[1] - means_AD[0]
    variance_D = variances_AD[0] if deployment.paired else variances_AD.sum(0)
    z_D: Array = (difference_D - deployment.plan.margin) / np.sqrt(variance_D)
    return z_D


def live(count: int) -> Iterator[Row]:
    """False promotions, and sessions until a verdict."""
    for deployment in without_effect():
        looks, alpha = int(LOOKS * one_look(deployment)), deployment.plan.alpha
        ever, kept, by_z = wrong(deployment, count, looks)
        case, what = f"{deployment.name}, {looks:,} looks", "promoted wrongly"
        yield Row(case, what, ever, "allowed", alpha, target=1.0, more_is_better=False)
        yield Row(case, what, ever, "z-test as often", by_z, more_is_better=False)
        yield Row(case, "kept before that", kept)
    for times, least in ((1, round(1 / 1.2, 3)), (2, 2.0)):
        for planned, deployment in zip(with_effect(1), with_effect(times), strict=True):
            one = one_look(planned)
            sessions_D, promoted = verdicts(deployment, count, int(GIVEN_UP * one))
            case = f"{times} x the effect: {deployment.name}"
            yield Row(
                case,
                "sessions to a verdict",
                float(sessions_D.mean()),
                "z-test with one look",
                one,
                target=least,
                more_is_better=False,
            )
            yield Row(case, "95 % of verdicts within", float(np.quantile(sessions_D, 0.95)))
            power = deployment.plan.power
            yield Row(case, "promoted", promoted, "planned power", power, target=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--deployments", type=int, default=1000)
    arguments = parser.parse_args()
    report("promotion", list(live(arguments.deployments)), ["numpy"])


if __name__ == "__main__":
    main()
