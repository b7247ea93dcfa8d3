"""Every policy loss and its gradient, token by token, against the formula in plain Python."""

import math
import random

import pytest
import torch

from tests.training.configured import training
from tuner.config.algorithms import CISPOLoss, GSPOLoss, OPMDLoss, PPOLoss, SAPOLoss, TOPRLoss
from tuner.training import losses
from tuner.training.losses import Tokens, micro_batch_loss

ROWS = [0, 0, 0, 1, 1, 2, 2, 2, 2]


def tokens(seed):
    """Log-probs near each other and far apart; an advantage for each row."""
    rng = random.Random(seed)
    logp = [rng.uniform(-3, -0.1) for _ in ROWS]
    old = [p + rng.gauss(0, rng.choice([0.0003, 0.2, 1.5])) for p in logp]
    advantages = [rng.choice([-1.5, -0.2, 0.0, 0.7, 2.0]) for _ in range(3)]
    return logp, old, [advantages[row] for row in ROWS]


def clip(value, low, high):
    return min(max(value, low), high)


# Each gives (loss, d loss / d logp) of token t, worked out by hand.


def ppo(t, logp, old, a):
    r = math.exp(logp[t] - old[t])
    plain, cut = -a[t] * r, -a[t] * clip(r, 0.9, 1.3)
    if a[t] < 0 and max(plain, cut) > -2.0 * a[t]:
        return -2.0 * a[t], 0.0
    return (plain, plain) if plain >= cut else (cut, 0.0)


def gspo(t, logp, old, a):
    mine = [k for k in range(len(ROWS)) if ROWS[k] == ROWS[t]]
    s = math.exp(sum(logp[k] - old[k] for k in mine) / len(mine))
    plain, cut = -a[t] * s, -a[t] * clip(s, 0.9, 1.3)
    return (plain, plain) if plain >= cut else (cut, 0.0)


def cispo(t, logp, old, a):
    weight = clip(math.exp(logp[t] - old[t]), 0.9, 1.3)
    return -weight * a[t] * logp[t], -weight * a[t]


def sapo(t, logp, old, a):
    tau = 1.2 if a[t] > 0 else 1.7
    r = math.exp(logp[t] - old[t])
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * gate * a[t], -4 * gate * (1 - gate) * r * a[t]


def importance(t, logp, old, a):
    r = math.exp(logp[t] - old[t])
    return -r * a[t], -r * a[t]


def opmd(t, logp, old, a):
    return -a[t] * logp[t] / 1.5, -a[t] / 1.5


def topr(t, logp, old, a):
    weight = min(math.exp(logp[t] - old[t]), 1) if a[t] <= 0.1 else 1
    return -weight * a[t] * logp[t], -weight * a[t]


def sft(t, logp, old, a):
    return -logp[t], -1.0


BOUNDS = {"clip_range_low": 0.1, "clip_range_high": 0.3}
CASES = {
    "ppo": (ppo, lambda p, o, a, _: losses.ppo_clip(p, o, a, PPOLoss(**BOUNDS, clip_ratio_c=2.0))),
    "gspo": (gspo, lambda p, o, a, row: losses.sequence_clip(p, o, a, row, GSPOLoss(**BOUNDS))),
    "cispo": (cispo, lambda p, o, a, _: losses.cispo(p, o, a, CISPOLoss(**BOUNDS))),
    "sapo": (sapo, lambda p, o, a, _: losses.sapo(p, o, a, SAPOLoss(tau_pos=1.2, tau_neg=1.7))),
    "importance": (importance, lambda p, o, a, _: losses.importance_sampling(p, o, a)),
    "opmd": (opmd, lambda p, o, a, _: losses.opmd(p, o, a, OPMDLoss(tau=0.5))),
    "topr": (topr, lambda p, o, a, _: losses.topr(p, o, a, TOPRLoss(advantage_threshold=0.1))),
    "sft": (sft, lambda p, o, a, _: losses.likelihood(p, o)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_the_formulas(name, seed):
    formula, function = CASES[name]
    logp, old, advantages = tokens(seed)
    logp_T = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    fixed = [torch.tensor(x, dtype=torch.float64) for x in (old, advantages)]
    result = function(logp_T, *fixed, torch.tensor(ROWS))
    # Each token's own gradient: a sequence's ratio must not leak into its other tokens twice.
    result.loss_T.sum().backward()
    expected = [formula(t, logp, old, advantages) for t in range(len(ROWS))]
    assert result.loss_T.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9)
    assert logp_T.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("opmd", "sft")])
def test_on_policy_every_loss_has_the_policy_gradient(name):
    logp, _, advantages = tokens(1)
    logp_T = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    a_T = torch.tensor(advantages, dtype=torch.float64)
    CASES[name][1](logp_T, logp_T.detach().clone(), a_T, torch.tensor(ROWS)).loss_T.sum().backward()
    assert torch.allclose(logp_T.grad, -a_T)


def test_clipping_is_told_for_the_tokens_whose_gradient_it_changed():
    old = torch.zeros(4).double()
    logp = torch.tensor([0.5, 0.5, -0.5, 0.1]).double()
    ones = torch.tensor([1.0, -1.0, -1.0, 1.0]).double()
    assert losses.cispo(logp, old, ones).clipped_T.tolist() == [True, True, False, False]
    assert losses.topr(logp, old, ones).clipped_T.tolist() == [False, True, False, False]
    rows = torch.tensor([0, 1, 2, 3])
    cut = losses.sequence_clip(logp, old, ones, rows)
    assert cut.clipped_T.tolist() == [True, False, True, True]


def test_ratios_too_large_for_a_float_stay_finite():
    logp = torch.tensor([200.0], requires_grad=True)
    for name, (_, function) in CASES.items():
        result = function(logp, torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.long))
        assert torch.isfinite(result.loss_T).all(), name


def loss_of_token(logp: float, recorded: float, began: float | None, staleness: int, **settings):
    """The loss of one token whose advantage is -1: the ratio, times the weight of its sampler."""

    def one(value):
        return None if value is None else torch.tensor([value])

    config = training(total_steps=1, kl="none", **settings)
    loss, _, sums = micro_batch_loss(
        config.algorithm,
        config.tuner.algorithm,
        Tokens(
            logp_T=torch.tensor([logp], requires_grad=True),
            entropy_T=torch.zeros(1),
            recorded_T=torch.tensor([recorded]),
            advantages_T=-torch.ones(1),
            weights_T=torch.ones(1),
            call_T=torch.zeros(1, dtype=torch.long),
            calls=1,
            staleness_T=torch.tensor([staleness]),
            proximal_T=one(began),
        ),
    )
    return float(loss.detach()), float(sums["rejected_fraction"])


@pytest.mark.parametrize(
    ("proximal", "settings", "wanted"),
    [
        (0.0, {"importance_cap": 2.0}, (1.0, 0)),
        (1.0, {"importance_cap": 9.0}, (math.e, 0)),
        (1.0, {"importance_cap": 2.0}, (2.0, 0)),
        (-1.0, {"importance_cap": 2.0}, (1 / math.e, 0)),
        (0.5, {"importance_cap": 9.0, "rejection": (0.5, 2.0)}, (math.exp(0.5), 0)),
        (1.0, {"importance_cap": 9.0, "rejection": (0.5, 2.0)}, (0.0, 1)),
        (-1.0, {"importance_cap": 9.0, "rejection": (0.5, 2.0)}, (0.0, 1)),
    ],
)
def test_weights_of_older_samples_are_bounded_or_left_out(proximal, settings, wanted):
    found = loss_of_token(proximal, 0.0, proximal, 1, **settings)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(("staleness", "proximal"), [(0, -1.0), (1, -1.05), (3, -1.075)])
def test_log_linear_lies_between_behaviour_and_current_by_staleness(staleness, proximal):
    loss, _ = loss_of_token(-1.1, -1.0, None, staleness, proximal="loglinear", importance_cap=9.0)
    # The ratio to the proximal policy, times its weight against the one that sampled.
    assert loss == pytest.approx(math.exp(-1.1 - proximal) * math.exp(proximal + 1.0))
    capped, _ = loss_of_token(
        -1.1, -1.0, None, staleness, proximal="loglinear", importance_cap=0.94
    )
    assert capped == pytest.approx(math.exp(-1.1 - proximal) * min(math.exp(proximal + 1.0), 0.94))


@pytest.mark.parametrize("seed", range(5))
def test_a_value_outside_the_clip_is_pushed_back_by_the_worse_of_two_errors(seed):
    rng = random.Random(seed)
    now, old, aim = ([rng.gauss(0, 1) for _ in range(40)] for _ in range(3))
    values = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss, cut = losses.clipped_value_loss(
        values, torch.tensor(old).double(), torch.tensor(aim).double(), clip=0.3
    )
    loss.sum().backward()
    old, aim = torch.tensor(old).tolist(), torch.tensor(aim).tolist()
    for t, (v, before, wanted) in enumerate(zip(now, old, aim, strict=True)):
        near = clip(v, before - 0.3, before + 0.3)
        plain, clipped = (v - wanted) ** 2 / 2, (near - wanted) ** 2 / 2
        assert loss.tolist()[t] == pytest.approx(max(plain, clipped))
        assert bool(cut[t]) == (clipped > plain)
        slope = 0.0 if clipped > plain else v - wanted
        assert float(values.grad[t]) == pytest.approx(slope)
    assert 0 < int(cut.sum()) < 40
