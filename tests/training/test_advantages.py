"""Advantages and weights against formulas written out in plain Python."""

import math
import random
from statistics import mean, stdev

import pytest
import torch

from tuner.config.algorithms import GRPOAdvantage, OPMDAdvantage, ReinforcePlusPlusAdvantage
from tuner.training.advantages import (
    call_normalized,
    leave_one_out,
    mirror_descent,
    shifted_mean,
    whitened_returns,
)
from tuner.training.losses import row_weights

# (set, rollout, reward): rollouts with one call or more in a set, in no order.
CALLS = [
    (0, 0, 0.9),
    (1, 3, -0.4),
    (0, 1, 0.2),
    (0, 0, 0.5),
    (1, 4, 0.8),
    (0, 2, 0.1),
    (1, 3, 0.6),
    (2, 0, 1.0),
    (2, 4, 0.3),
]


def expected_of(formula, calls=CALLS):
    """`formula(reward, own mean, means of the set's rollouts)` for each call."""
    found = []
    for where, rollout, reward in calls:
        cells = cells_of(calls, where)
        means = {key: mean(values) for key, values in cells.items()}
        found.append(formula(reward, means[rollout], list(means.values())))
    return found


def cells_of(calls, where):
    """The rewards of each rollout in a set."""
    cells = {}
    for other_where, other, value in calls:
        if other_where == where:
            cells.setdefault(other, []).append(value)
    return cells


def spread(cells):
    """The unbiased standard deviation where each cell counts once, around the mean of the means."""
    center = mean(mean(values) for values in cells)
    squares = [mean((value - center) ** 2 for value in values) for values in cells]
    return math.sqrt(sum(squares) / (len(squares) - 1))


def tensors(calls=CALLS):
    sets, rollouts, rewards = zip(*calls, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(rollouts), torch.tensor(sets)


def expected_grpo(std_of):
    return [
        (reward - mean(mean(values) for values in cells_of(CALLS, where).values()))
        / (std_of(where) + 1e-6)
        for where, _, reward in CALLS
    ]


TAU = 0.5
FORMULAS = {
    "rloo": (
        leave_one_out,
        lambda r, own, means: r - (sum(means) - own) / (len(means) - 1),
    ),
    "opmd": (mirror_descent, lambda r, own, means: r - mean(means)),
    "opmd, logavgexp": (
        lambda *given: mirror_descent(*given, OPMDAdvantage(opmd_baseline="logavgexp", tau=TAU)),
        lambda r, own, means: r - TAU * math.log(mean(math.exp(m / TAU) for m in means)),
    ),
    "asymre": (shifted_mean, lambda r, own, means: r - mean(means) + 0.1),
    "Dr.GRPO": (
        lambda *given: call_normalized(*given, GRPOAdvantage(std_cal_level="none")),
        lambda r, own, means: r - mean(means),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_rollout_counts_once_in_what_its_rewards_are_compared_with(name):
    function, formula = FORMULAS[name]
    expected = expected_of(formula)
    assert function(*tensors()).tolist() == pytest.approx(expected, rel=1e-9)


def test_a_rollout_counts_once_in_the_standard_deviation():
    of_set = expected_grpo(lambda where: spread(cells_of(CALLS, where).values()))
    assert call_normalized(*tensors()).tolist() == pytest.approx(of_set, rel=1e-9)
    everything = [cell for where in range(3) for cell in cells_of(CALLS, where).values()]
    of_batch = expected_grpo(lambda where: spread(everything))
    got = call_normalized(*tensors(), GRPOAdvantage(std_cal_level="batch")).tolist()
    assert got == pytest.approx(of_batch, rel=1e-9)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_rewards_that_differ_only_inside_rollouts_are_not_divided_by_nothing(std):
    calls = [(0, rollout, reward) for rollout in range(3) for reward in (0.81, 0.9, 1.0)]
    assert call_normalized(*tensors(calls), GRPOAdvantage(std_cal_level=std)).abs().max() < 2


FUNCTIONS = {name: function for name, (function, _) in FORMULAS.items()} | {
    "grpo": call_normalized,
    "grpo, batch": lambda *given: call_normalized(*given, GRPOAdvantage(std_cal_level="batch")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_order_does_not_change_advantages(name):
    function = FUNCTIONS[name]
    order = list(range(len(CALLS)))
    random.Random(3).shuffle(order)
    straight = function(*tensors()).tolist()
    shuffled = function(*tensors([CALLS[i] for i in order])).tolist()
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_set_of_one_rollout_has_no_baseline(name):
    with pytest.raises(ValueError, match="no baseline"):
        FUNCTIONS[name](
            torch.tensor([1.0, 2.0]).double(), torch.tensor([0, 0]), torch.tensor([0, 0])
        )


def test_group_without_std_is_the_distance_to_the_mean():
    rewards = torch.tensor([0.0, 1.0, 5.0, 7.0]).double()
    result = call_normalized(
        rewards, torch.arange(4), torch.tensor([0, 0, 1, 1]), GRPOAdvantage(std_cal_level="none")
    )
    assert result.tolist() == [-0.5, 0.5, -1.0, 1.0]


def test_large_rewards_do_not_overflow_the_soft_maximum():
    rewards = torch.tensor([5000.0, 4000.0]).double()
    result = mirror_descent(
        rewards,
        torch.arange(2),
        torch.zeros(2).long(),
        OPMDAdvantage(opmd_baseline="logavgexp"),
    )
    assert result.tolist() == pytest.approx([math.log(2), math.log(2) - 1000])


def test_returns_are_discounted_charged_and_whitened_over_tokens():
    penalties = [[0.1, 0.2, 0.3], [0.5], [0.0, -0.4]]
    rewards, gamma = [1.0, 0.25, -1.0], 0.9
    returns = []
    for reward, charges in zip(rewards, penalties, strict=True):
        gained = [-charge for charge in charges]
        gained[-1] += reward
        for t in range(len(gained)):
            returns.append(sum(gamma ** (k - t) * gained[k] for k in range(t, len(gained))))
    centre, spread = mean(returns), math.sqrt(stdev(returns) ** 2 + 1e-8)
    result = whitened_returns(
        torch.tensor(rewards, dtype=torch.float64),
        [3, 1, 2],
        ReinforcePlusPlusAdvantage(gamma=gamma),
        penalties=[torch.tensor(p, dtype=torch.float64) for p in penalties],
    )
    assert [len(one) for one in result] == [3, 1, 2]
    expected = [(value - centre) / spread for value in returns]
    assert torch.cat(result).tolist() == pytest.approx(expected, rel=1e-9)


TOKENS, ROLLOUTS = [3, 1, 4, 2], [5, 5, 0, 2]
WEIGHTS = {
    "token-mean": [1 / 10] * 4,
    "seq-mean-token-mean": [1 / 12, 1 / 4, 1 / 16, 1 / 8],
    "seq-mean-token-sum": [1 / 4] * 4,
    "seq-mean-token-sum-norm": [1 / 80] * 4,
    "rollout-mean": [1 / 12, 1 / 12, 1 / 12, 1 / 6],
}


@pytest.mark.parametrize("mode", WEIGHTS)
def test_weights_of_tokens_are_those_of_the_aggregation(mode):
    result = row_weights(mode, torch.tensor(TOKENS), torch.tensor(ROLLOUTS), longest=20)
    assert result.tolist() == pytest.approx(WEIGHTS[mode], rel=1e-12)


@pytest.mark.parametrize("mode", WEIGHTS)
def test_a_call_in_several_rows_weighs_what_it_weighs_in_one(mode):
    """The first call's three tokens as one row and two."""
    whole = row_weights(mode, torch.tensor(TOKENS), torch.tensor(ROLLOUTS), longest=20)
    tokens, rollouts = torch.tensor([1, *TOKENS[1:], 2]), torch.tensor([*ROLLOUTS, ROLLOUTS[0]])
    parts = row_weights(mode, tokens, rollouts, torch.tensor([7, 1, 2, 3, 7]), longest=20)
    assert parts.tolist() == pytest.approx([*whole.tolist(), float(whole[0])], rel=1e-12)


def test_a_constant_normaliser_must_be_given():
    with pytest.raises(ValueError, match="maximum number of tokens"):
        row_weights("seq-mean-token-sum-norm", torch.tensor([1]), torch.tensor([0]))


def test_splitting_a_rollout_into_calls_does_not_change_what_its_tokens_weigh():
    whole = row_weights("rollout-mean", torch.tensor([6, 3]), torch.tensor([0, 1]))
    split = row_weights("rollout-mean", torch.tensor([1, 5, 3]), torch.tensor([0, 0, 1]))
    assert split.tolist() == [whole[0], whole[0], whole[1]]
