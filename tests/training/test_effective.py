"""How many samples recorded ones are worth: against the formula, and its invariants."""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tests.training.configured import training
from tests.training.test_trainer import random_batch, tiny_model
from tuner.errors import TrainingError
from tuner.training.batch import build_batch
from tuner.training.likelihood import effective_of, effective_samples, effective_size
from tuner.training.trainer import PolicyTrainer

logs = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


def size(log_weights):
    return effective_size(torch.tensor(log_weights, dtype=torch.float64)).size


def on_policy(batch, moved=lambda index: 0.0):
    """A batch's log-probs as its own policy gives them, moved by as much as a row is."""
    return [
        torch.tensor(row.logprobs, dtype=torch.float64) + moved(index)
        for index, row in enumerate(batch.rows)
    ]


@given(logs)
def test_it_is_the_formula(log_weights):
    weights = [math.exp(log) for log in log_weights]
    expected = sum(weights) ** 2 / sum(w * w for w in weights)
    assert size(log_weights) == pytest.approx(expected, rel=1e-9)


@given(logs, st.floats(-1000, 1000))
def test_a_common_factor_changes_nothing(log_weights, factor):
    assert size([log + factor for log in log_weights]) == pytest.approx(size(log_weights), rel=1e-6)


@given(logs, st.randoms(use_true_random=False))
def test_the_order_changes_nothing(log_weights, rng):
    mixed = log_weights[:]
    rng.shuffle(mixed)
    assert size(mixed) == pytest.approx(size(log_weights), rel=1e-12)


@given(logs)
def test_it_is_between_one_sample_and_all(log_weights):
    assert 1 - 1e-12 <= size(log_weights) <= len(log_weights) * (1 + 1e-12)


@given(st.floats(-1000, 1000), st.integers(1, 50))
def test_equal_weights_are_worth_all_samples_exactly(log, count):
    found = effective_size(torch.full((count,), log, dtype=torch.float64))
    assert (found.size, found.share) == (count, 1.0)


@pytest.mark.parametrize("log_weights", [[], [-math.inf, -math.inf]])
def test_what_is_not_there_or_impossible_is_worth_nothing(log_weights):
    found = effective_size(torch.tensor(log_weights, dtype=torch.float64))
    assert (found.size, found.share) == (0.0, 0.0)


def test_samples_of_the_policy_itself_are_worth_all_of_them():
    batch = build_batch(random_batch(0))
    found = effective_of(batch, on_policy(batch))
    for one in (found.tokens, found.calls, found.rollouts):
        assert one.share == 1.0
    assert found.tokens.count == batch.trained_tokens
    assert found.rollouts.count == len(batch.ids) == 9
    assert found.calls.count == len({(row.rollout, row.call_id) for row in batch.rows})


def test_calls_and_rollouts_have_the_products_of_their_tokens():
    """Also where a mask cut a call into rows."""
    masked = replace(call("a", [1], [2, 3, 4, 5], [-1.0] * 4), masked=((1, 2),))
    traces = [
        trace(0, 0, [masked, call("b", [9], [7], [-1.0])], reward=0.0),
        trace(0, 1, [call("c", [1], [2], [-1.0])], reward=1.0),
    ]
    batch = build_batch(traces)
    shift = {("a", 1): 0.5, ("a", 2): 0.25, ("b", 1): -1.0, ("c", 1): 2.0}
    found = effective_of(
        batch,
        on_policy(batch, lambda i: shift[batch.rows[i].call_id, len(batch.rows[i].completion_ids)]),
    )
    of_a = 0.5 + 2 * 0.25
    assert found.tokens.size == pytest.approx(size([0.5, 0.25, 0.25, -1.0, 2.0]))
    assert found.calls.size == pytest.approx(size([of_a, -1.0, 2.0]))
    assert found.rollouts.size == pytest.approx(size([of_a - 1.0, 2.0]))
    assert found.calls.count == 3


def test_the_order_in_which_rollouts_arrive_changes_nothing():
    traces = random_batch(1)
    mixed = traces[:]
    random.Random(2).shuffle(mixed)
    model = PolicyTrainer(tiny_model(), training(total_steps=1))
    one, other = (effective_samples(model, build_batch(each)) for each in (traces, mixed))
    for name in ("tokens", "calls", "rollouts"):
        assert getattr(one, name) == getattr(other, name)


def test_weights_that_have_moved_make_samples_worth_less_and_long_rollouts_least():
    batch = build_batch(random_batch(3))
    trainer = PolicyTrainer(tiny_model(), training(total_steps=9, lr=1e-2))
    before = effective_samples(trainer, batch)
    for _ in range(5):
        trainer.ppo_update(trainer.compute_advantages(batch))
    after = effective_samples(trainer, batch)
    assert after.tokens.share < before.tokens.share
    assert after.rollouts.share < after.tokens.share < 1


def test_what_it_has_computed_is_the_proximal_policy_of_the_update():
    """With the log-probs handed on, an update gives the bits that it gives when it computes them,
    and takes no forward pass for them."""
    batch = build_batch(random_batch(4))
    trainers = [
        PolicyTrainer(copy.deepcopy(tiny_model()), training(total_steps=9, lr=1e-2))
        for _ in range(2)
    ]
    for trainer in trainers:
        trainer.step = 3  # the samples are of version 0
        scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
        if trainer is trainers[1]:
            scored = replace(scored, proximal=effective_samples(trainer, batch).logp)
            trainer.compute_logp = None
        trainer.ppo_update(scored)
    one, other = (trainer.model.state_dict() for trainer in trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_nobody_sampled_is_refused():
    batch = build_batch(random_batch(5))
    rows = (replace(batch.rows[0], logprobs=()), *batch.rows[1:])
    with pytest.raises(TrainingError, match="0 recorded log-probs: only sampled tokens"):
        effective_of(replace(batch, rows=rows), on_policy(batch))


@pytest.mark.parametrize("proximal", ["auto", "loglinear"])
def test_samples_of_another_run_are_never_taken_for_those_of_the_same_version(proximal):
    """Its versions count that run's updates, so the policy that the step begins with is computed,
    and the loss weighed by it, as where that is asked for."""
    traces = random_batch(6)
    updated = {}
    for name, asked, foreign in (
        ("foreign", proximal, 0),
        ("recomputed", "recompute", None),
        ("own", proximal, None),
    ):
        batch = build_batch([replace(one, foreign_from=foreign) for one in traces])
        settings = training(total_steps=9, lr=1e-2, proximal=asked)
        trainer = PolicyTrainer(copy.deepcopy(tiny_model()), settings)
        assert {version for row in batch.rows for version in row.versions} == {trainer.step}
        metrics = trainer.ppo_update(trainer.compute_advantages(batch))
        assert metrics["stale_fraction"] == pytest.approx(float(name == "foreign"))
        updated[name] = trainer.model.state_dict()
    same = {
        name: all(torch.equal(one[key], updated["foreign"][key]) for key in one)
        for name, one in updated.items()
    }
    assert same == {"foreign": True, "recomputed": True, "own": False}


def test_weights_that_both_runs_have_are_no_other_run():
    """Of a rollout that another run recorded, only tokens of versions from `foreign_from` on."""
    calls = [
        replace(call("a", [1], [2, 3], [-1.0, -1.0]), versions=(1, 2)),
        replace(call("b", [1], [2, 3], [-1.0, -1.0]), versions=(2, 3)),
    ]
    traces = [
        trace(0, 0, calls, reward=0.0, foreign_from=3),
        trace(0, 1, calls, reward=1.0),
    ]
    batch = build_batch(traces)
    assert [row.foreign for row in batch.rows] == [False, True, False, False]
    assert batch.foreign
