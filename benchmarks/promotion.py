"""Is a candidate better: how often that is said wrongly, how many sessions it takes, what logs say.

**Live.** 1,000 simulated deployments of each kind, session by session, the arm by a coin. False
promotions: where the candidate is no better, how many are ever promoted while one looks after every
session for four times as long as the test with one look takes; beside a z-test at 5 % that is
looked at as often. Sessions: until there is a verdict, both arms counted, where the candidate is
better by the planned effect and by twice that; beside the one-sided two-sample z-test with one
look, which is given the true variances: the stronger peer, as Fisher's and Barnard's tests take
more for the same power. Power is that of the same deployments.

**From logs.** Policies choose six times between two actions in a tree whose leaves have known
chances of a reward. The candidate is moved along the gradient of its value, by growing steps; 500
sessions of the other policy are logged, 200 times. How wide the interval is, how often it holds the
true difference, how often nothing is said, and how far off the estimates are.

**The tiny model.** A short run; the sessions that one checkpoint sampled on the held-out problems
are logged, and later checkpoints judged from them, beside what these do when they are sampled.

    python benchmarks/promotion.py [--deployments 1000] [--logs 200] [--without-model]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _report import Row, report
from numpy.typing import NDArray

from tuner.run.offpolicy import LoggedSession, OffPolicy, off_policy
from tuner.run.proof import Plan, evidence_of

ROOT = Path(__file__).parents[1]
LOOKS = 4.0  # times the sessions of the test with one look
GIVEN_UP = 40.0  # the same, after which a deployment counts with what it took
Z, FIRST_LOOK = 1.6449, 40  # of 5 %; before that a z-test means nothing
DECISIONS, SESSIONS = 6, 500
MOVED = (0.0, 0.3, 1.0, 2.0, 4.5, 10.0, 30.0, 100.0)
LATER = (3, 5, 8)  # checkpoints of the tiny model; the first that logs is that of step 2
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


class Tree:
    """Six decisions between two actions; a leaf has a chance of reward 1."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.leaves = np.array(list(product((0, 1), repeat=DECISIONS)))
        self.places = np.array(
            [[self._state(leaf[:t]) for t in range(DECISIONS)] for leaf in self.leaves]
        )
        self.chances = random.beta(0.7, 0.7, len(self.leaves))
        self.logits = 0.5 * random.standard_normal(2**DECISIONS)

    @staticmethod
    def _state(actions: Array) -> int:
        """Number of the state after some actions: those of one depth beside each other."""
        return int("1" + "".join(map(str, actions)), 2) - 1

    def log_probs(self, logits: Array) -> Array:
        """Of each leaf, of each decision on its way."""
        right = logits[self.places]
        found: Array = -np.logaddexp(0, np.where(self.leaves == 1, -right, right))
        return found

    def value(self, logits: Array) -> float:
        return float(np.exp(self.log_probs(logits).sum(1)) @ self.chances)

    def direction(self) -> Array:
        """In which the value rises fastest; its largest part is 1."""
        small = 1e-5
        gradient: Array = np.array(
            [
                self.value(self.logits + small * one) - self.value(self.logits - small * one)
                for one in np.eye(len(self.logits))
            ]
        )
        gradient /= np.abs(gradient).max()
        return gradient

    def values(self, logits: Array) -> Array:
        """Of each leaf the value of the state before each decision."""
        chance = np.exp(self.log_probs(logits).sum(1))
        found = np.empty((len(self.leaves), DECISIONS))
        for t in range(DECISIONS):
            state = self.places[:, t]
            total = np.bincount(state, weights=chance, minlength=len(self.logits))
            reward = np.bincount(state, weights=chance * self.chances, minlength=len(self.logits))
            found[:, t] = reward[state] / total[state]
        return found


def logged(tree: Tree, moved: float, logs: int) -> Iterator[tuple[OffPolicy, OffPolicy | None]]:
    """What logs say, and every fourth of them also with the values that states have for the policy
    that logged."""
    random, candidate = np.random.default_rng(11), tree.logits + moved * tree.direction()
    chance, plan = np.exp(tree.log_probs(tree.logits).sum(1)), Plan(effect=0.05)
    ratios = tree.log_probs(candidate) - tree.log_probs(tree.logits)
    values = tree.values(tree.logits)
    for log in range(logs):
        leaves = random.choice(len(chance), p=chance, size=SESSIONS)
        rewards = (random.random(SESSIONS) < tree.chances[leaves]) * 1.0
        sessions = [
            LoggedSession(str(number), float(reward), tuple(ratios[leaf]), tuple(values[leaf]))
            for number, (leaf, reward) in enumerate(zip(leaves, rewards, strict=True))
        ]
        plain = off_policy([replace(one, values=()) for one in sessions], plan)
        yield plain, None if log % 4 else off_policy(sessions, plan)


def from_logs(logs: int) -> Iterator[Row]:
    """Intervals, estimates and refusals against how far the candidate has moved."""
    tree = Tree()
    serving = tree.value(tree.logits)
    for moved in MOVED:
        candidate = tree.logits + moved * tree.direction()
        difference = tree.value(candidate) - serving
        found = list(logged(tree, moved, logs))
        distance = float(np.mean([plain.log_ratio for plain, _ in found]))
        said = [(plain, robust) for plain, robust in found if plain.refused is None]
        case = f"candidate + {difference:.3f}, KL {distance:.2g}"
        share = float(np.mean([plain.effective_sessions for plain, _ in found])) / SESSIONS
        yield Row(case, "effective sample size, of a session", share)
        yield Row(case, "refused", 1 - len(said) / len(found))
        ends = np.array([(p.lower, p.upper) for p, _ in said], float).reshape(-1, 2)
        missed = float(((ends[:, 0] > difference) | (ends[:, 1] < difference)).sum()) / len(found)
        what = "intervals that miss the difference"
        yield Row(case, what, missed, "allowed", 0.05, target=1.0, more_is_better=False)
        if len(said) < len(found) / 2:
            continue
        yield Row(case, "interval, width", float(np.diff(ends).mean()))
        yield Row(case, "promoted", float(np.mean([p.verdict == "promote" for p, _ in said])))
        truth = serving + difference

        def off(estimates: list[float | None], truth: float = truth) -> float:
            return float(np.sqrt(np.mean((np.array(estimates, float) - truth) ** 2)))

        plain = off([p.plain for p, _ in said])
        for name, estimates in (
            ("self-normalised", [p.self_normalised for p, _ in said]),
            ("clipped", [p.clipped for p, _ in said]),
            ("doubly robust, mean of others", [p.doubly_robust for p, _ in said]),
            ("doubly robust, values", [r.doubly_robust for _, r in said if r is not None]),
        ):
            yield Row(
                case,
                f"{name}, off by",
                off(estimates),
                "plain weights",
                plain,
                more_is_better=False,
            )


def of_tiny_model(folder: str) -> Iterator[Row]:
    """Later checkpoints of a short run from the sessions of an earlier one, and as they are."""
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    sys.path.insert(0, str(ROOT / "examples" / "gsm8k"))
    import main as example

    from tuner import evaluate, tune
    from tuner.serving.logged import compare_logged

    settings: dict[str, Any] = {
        "config_path": ROOT / "config.yaml",
        "overrides": [
            f"checkpoint_root_dir={folder}",
            f"buffer.total_steps={LATER[-1]}",
            "trainer.save_interval=1",
            f"explorer.eval_interval={LATER[-1]}",
        ],
    }
    functions = example.run_react_agent, example.judge_function
    run = tune(*functions, **settings).run_dir
    checkpoints = {step: run / "checkpoints" / f"step_{step:06d}" for step in (2, *LATER)}
    tried = evaluate(
        *functions,
        candidates=[str(path) for path in checkpoints.values()],
        k=4,
        limit=100,
        temperature=1.0,
        output=f"{folder}/tried",
        **settings,
    )
    means = [one.sets["test"].reward.mean for one in tried.candidates]  # type: ignore[union-attr]
    (traffic,) = Path(folder, "tried").glob("1-*")
    for (step, path), mean in zip(list(checkpoints.items())[1:], means[1:], strict=True):
        began = time.perf_counter()
        found = compare_logged(traffic, path, Plan(effect=0.1), split="test").found
        seconds = time.perf_counter() - began
        case = f"tiny model, step {step} from sessions of step 2"
        yield Row(
            case, "effective sample size, of a session", found.effective_sessions / found.sessions
        )
        if found.refused is not None:
            yield Row(case, "refused", 1.0, "difference when sampled", mean - means[0])
            continue
        sampled = mean - means[0]
        for what, value in (
            ("difference", found.estimate),
            ("lower end", found.lower),
            ("upper end", found.upper),
        ):
            yield Row(case, what, float(value or 0.0), "when sampled", sampled)
        yield Row(case, "s for 400 sessions", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--deployments", type=int, default=1000)
    parser.add_argument("--logs", type=int, default=200)
    parser.add_argument("--without-model", action="store_true", help="leave the tiny model out")
    arguments = parser.parse_args()
    rows = [*live(arguments.deployments), *from_logs(arguments.logs)]
    if not arguments.without_model:
        with tempfile.TemporaryDirectory() as folder:
            rows += of_tiny_model(folder)
    report("promotion", rows, ["numpy", "torch", "transformers"])


if __name__ == "__main__":
    main()
