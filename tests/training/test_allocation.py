"""What is advised from what was seen, against bandits whose variances are known or measured."""

import json
import random

import numpy as np
import pytest

from tuner.rollouts.allocation import POSITIONS, Fork, Positions, RolloutSummary, score


class Chain:
    """Binary calls, each 1 with probability p; the reward says what they came to.

    Args:
        costs: Tokens of each call.
        reward: Of the actions.
        p: How often an action is 1.
    """

    def __init__(self, costs, reward, p=0.5):
        self.costs, self.reward, self.p = costs, reward, p

    def seen(self, actions):
        scores = [score([float(np.log(self.p if one else 1 - self.p))]) for one in actions]
        return RolloutSummary(float(self.reward(actions)), self.costs[: len(actions)], scores)

    def task(self, dice, trunks=3, ends=2):
        """Trunks, each forked once at a call that was drawn beforehand."""
        played = [self.play(dice) for _ in range(trunks)]
        seen, forks = [self.seen(one) for one in played], []
        for number, actions in enumerate(played):
            call = dice.randrange(1, len(self.costs))
            if call < len(actions):
                others = [self.seen(self.play(dice, actions[:call])) for _ in range(ends - 1)]
                forks.append(Fork(call, [seen[number], *others], number))
        return seen, forks

    def play(self, dice, given=()):
        given = list(given)
        return given + [int(dice.random() < self.p) for _ in self.costs[len(given) :]]

    def positions(self, tasks=400, seed=0, **how):
        found, dice = Positions(), random.Random(seed)
        for _ in range(tasks):
            found.add(*self.task(dice, **how))
        return found

    def loss(self, trunks, call, ends, seeds=20_000):
        """Mean squared error of the gradient, one logit a call, times tokens: measured."""
        dice, size = np.random.default_rng(0), len(self.costs)
        call = call if ends > 1 else size
        before = dice.random((seeds, trunks, 1, call)) < self.p
        behind = dice.random((seeds, trunks, ends, size - call)) < self.p
        shared = np.broadcast_to(before, (seeds, trunks, ends, call))
        actions = np.concatenate([shared, behind], -1)
        returns = np.apply_along_axis(self.reward, -1, actions.astype(int)).astype(float)
        values = returns.mean(-1)
        early = ((values - values.mean(1, keepdims=True)) / (trunks - 1))[..., None]
        late = (returns - values[..., None])[..., None] / max(ends - 1, 1) / trunks
        found = np.concatenate(
            [
                (early * (before[:, :, 0] - self.p)).sum(1),
                (late * (behind - self.p)).sum((1, 2)),
            ],
            -1,
        )
        cost = trunks * (sum(self.costs[:call]) + ends * sum(self.costs[call:]))
        return ((found - found.mean(0)) ** 2).sum(-1).mean() * cost


def last_two(actions):
    return actions[-1] * actions[-2]


LATE = Chain([9, 9, 1, 1], last_two)
EARLY = Chain([1, 1, 9, 9], lambda actions: actions[0] * actions[1])


def test_branches_are_advised_where_the_beginning_costs_and_the_end_decides():
    advice = LATE.positions().best(tokens=160)
    assert advice.call == 2
    assert advice.ends > 4
    assert advice.gain > 2.5
    assert advice.open == pytest.approx(1, abs=0.05)
    assert sum(advice.decided[2:]) == pytest.approx(1, abs=0.05)
    assert advice.cost == (9, 9, 1, 1)


def test_flat_rollouts_are_advised_where_the_beginning_decides_and_the_end_is_nothing():
    chain = Chain([1, 1, 9], lambda actions: actions[0] + actions[1])
    scoreless = Positions()
    dice = random.Random(0)
    for _ in range(400):
        trunks, forks = chain.task(dice)
        for seen in [*trunks, *(end for fork in forks for end in fork.ends)]:
            seen.scores[2] = 0.0
        scoreless.add(trunks, forks)
    advice = scoreless.best(rollouts=8)
    assert (advice.call, advice.trunks, advice.ends, advice.gain) == (None, 8, 1, 1.0)
    assert "no fork is expected to gain anything" in str(advice)


@pytest.mark.long
@pytest.mark.parametrize(
    "chain", [Chain([3, 3, 1, 1], last_two), EARLY, Chain([3, 3, 3, 3], sum, 0.3)]
)
def test_the_gain_that_is_predicted_is_the_one_that_is_measured(chain):
    budget = 8 * sum(chain.costs)
    advice = chain.positions(1500, seed=2).best(tokens=budget)
    assert advice.tokens <= budget
    flat = chain.loss(8, None, 1)
    measured = flat / chain.loss(advice.trunks, advice.call, advice.ends)
    assert advice.gain == pytest.approx(measured, rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize(("trunks", "ends"), [(2, 2), (3, 4)])
def test_few_rollouts_in_a_task_give_the_same_shares_as_many(trunks, ends):
    """What a mean of few adds to distances is taken off again."""
    decided = Chain([1] * 3, lambda actions: actions[0] + actions[1] * actions[2])
    advice = decided.positions(3000, trunks=trunks, ends=ends).best(tokens=30)
    # Variances: 1/4 by the first, 1/16 by the second, 1/8 by the third.
    assert advice.decided == pytest.approx([4 / 7, 1 / 7, 2 / 7], abs=0.03)


def test_an_advice_says_why_in_a_sentence():
    said = str(LATE.positions(100).best(tokens=160))
    assert said.startswith(
        "4 rollouts from the beginning, 11 ends from before call 2 of each, 160 tokens a task: 3.8 "
        "times as much from a token as without branches. Getting there takes 18 tokens and the "
        "rest 2, 97% of the return's variance is decided after it, and 100% of the rollouts get "
    )
    assert said.endswith("(learned from 300 rollouts and 300 forks, 3% of it still unknown)")


def test_a_budget_of_rollouts_is_kept():
    for rollouts in (4, 8, 13):
        advice = LATE.positions(100).best(rollouts=rollouts)
        assert advice.trunks * advice.ends <= rollouts


def test_what_was_kept_advises_the_same_and_does_not_grow():
    one, other = LATE.positions(10), LATE.positions(1000)
    sizes = [len(json.dumps(found.state()["sums"]["reached"])) for found in (one, other)]
    assert sizes[1] - sizes[0] < 3 * POSITIONS
    again = Positions.restored(json.loads(json.dumps(other.state())))
    assert again.best(tokens=160) == other.best(tokens=160)
    for found in (again, other):
        found.fade(0.5)
        found.add(*EARLY.task(random.Random(3)))
    assert again.best(tokens=160) == other.best(tokens=160)


def test_what_fades_counts_less_than_what_is_new():
    found = EARLY.positions(400)
    late = LATE.positions(400)
    for _ in range(40):
        found.fade(0.8)
    for name, one in late.sums.items():
        found.sums[name] += one
    found.totals = {name: value + late.totals[name] for name, value in found.totals.items()}
    assert found.best(tokens=160).call == late.best(tokens=160).call


def test_rollouts_that_end_early_cost_and_reach_less():
    found = Positions()
    long = [RolloutSummary(float(reward), [2, 4], [0.25, 0.25]) for reward in (0, 1)]
    found.add([*long, RolloutSummary(0.0, [2], [0.25]), RolloutSummary(1.0, [2], [0.25])])
    assert found.reach == (1.0, 0.5)
    advice = found.best(rollouts=4)
    assert advice.cost == (2.0, 2.0)
    assert advice.tokens == 16


@pytest.mark.long
def test_what_is_open_counts_for_those_that_get_there_alone():
    class Ends(Chain):
        """Whoever takes 0 first has won, and ends; who goes on wins or does not."""

        def play(self, dice, given=()):
            actions = super().play(dice, given)
            return actions if actions[0] else actions[:1]

    chain = Ends([1, 1], lambda actions: 1.0 if len(actions) == 1 else float(actions[1]))
    # Of the variance, 3/16, half of 1/4 is open before the second call.
    decided = chain.positions(3000).best(tokens=30).decided
    assert decided == pytest.approx([1 / 3, 2 / 3], abs=0.04)


def test_calls_beyond_the_last_position_count_there_and_nothing_forks_there():
    found = Positions()
    count = POSITIONS + 10
    seen = [RolloutSummary(float(reward), [1] * count, [0.25] * count) for reward in (0, 1, 0, 1)]
    forks = [Fork(call, seen[:2]) for call in range(POSITIONS - 1, count) for _ in range(20)]
    found.add(seen, forks)
    advice = found.best(rollouts=4)
    assert len(advice.cost) == POSITIONS
    assert sum(advice.cost) == count
    assert advice.forks == 0


def test_nothing_is_advised_of_a_position_where_no_fork_could_begin():
    found, dice = Positions(), random.Random(0)
    for _ in range(100):
        seen, forks = LATE.task(dice)
        found.add(seen, [fork for fork in forks if fork.call != 2])
    assert found.best(tokens=160).call == 3


def test_few_forks_are_enough_where_the_end_decides():
    advised = [LATE.positions(6, seed=seed).best(tokens=160) for seed in range(20)]
    assert sum(one.call == 2 and one.gain > 1.5 for one in advised) > 14


@pytest.mark.long
@pytest.mark.parametrize("chain", [EARLY, Chain([3, 3, 3, 3], sum, 0.3)])
def test_few_forks_do_little_harm_where_the_end_does_not(chain):
    budget = 8 * sum(chain.costs)
    advised = [chain.positions(6, seed=seed).best(tokens=budget) for seed in range(12)]
    losses = [chain.loss(one.trunks, one.call, one.ends, 2000) for one in advised]
    assert np.mean(losses) < 1.15 * chain.loss(8, None, 1)


def test_it_is_known_how_much_is_known():
    unknown = [LATE.positions(tasks).best(tokens=160).unknown for tasks in (1, 10, 300)]
    assert unknown == sorted(unknown, reverse=True)
    assert unknown[0] > 0.5
    assert unknown[-1] < 0.05
    alike = Positions()
    for _ in range(50):
        alike.add(
            [RolloutSummary(0.0, [1] * 3, [0.25] * 3)] * 4,
            [Fork(1, [RolloutSummary(0.0, [1] * 3, [0.25] * 3)] * 2)],
        )
    assert alike.best(rollouts=8).unknown == pytest.approx(1, abs=0.03)


def test_returns_that_are_all_alike_advise_flat_rollouts():
    same = Chain([9, 9, 1, 1], lambda actions: 1.0)
    advice = same.positions(50).best(tokens=160)
    assert (advice.call, advice.gain, advice.decided) == (None, 1.0, (0.0, 0.0, 0.0, 0.0))


def test_what_cannot_be_answered_is_refused():
    with pytest.raises(ValueError, match="no task with two trunks was seen yet"):
        Positions().best(rollouts=8)
    found = LATE.positions(20)
    with pytest.raises(ValueError, match="39 tokens are too few: two rollouts need 20 tokens"):
        found.best(tokens=39)
    with pytest.raises(ValueError, match="1 rollouts are too few"):
        found.best(rollouts=1)


def test_a_certain_token_has_no_score():
    assert score([0.0, 0.0]) == 0
    assert score([float(np.log(0.25)), float(np.log(0.5))]) == pytest.approx(0.75**2 + 0.5**2)


def test_what_may_be_chance_decides_little():
    """Nothing is decided before the last two; forks of few tasks say a little is, by chance."""
    found = [LATE.positions(60, seed=seed).best(tokens=160).decided for seed in range(12)]
    assert np.mean([sum(decided[:2]) for decided in found]) < 0.1
    assert min(min(decided) for decided in found) > -1e-9
