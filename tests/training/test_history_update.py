"""Updates on rollouts that other weights sampled: the formula, the limit, and what is held out."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.kit.builders import call, trace
from tests.training.configured import training
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import KLPenalty
from tuner.errors import TrainingError
from tuner.training.batch import build_batch
from tuner.training.likelihood import (
    OffPolicyBatch,
    RecordedBatch,
    TooFewEffective,
    held_out_loss,
    held_out_rewards,
    off_policy_update,
    recorded_update,
)
from tuner.training.trainer import PolicyTrainer


def trainer_of(model=None, **settings):
    return PolicyTrainer(
        model or tiny_model(), training(total_steps=9, lr=1e-3, **{"kl": "none", **settings})
    )


def off_policy(traces, least=0.0):
    return OffPolicyBatch.of(build_batch(traces), least_effective=least)


def exact(model, traces):
    """The same traces with the log-probs that `model` gives."""
    found = []
    for one in traces:
        calls = []
        for each in one.calls:
            with torch.no_grad():
                logits = model(torch.tensor([each.prompt_ids + each.completion_ids])).logits[0]
            logp_T = logits.log_softmax(-1)[len(each.prompt_ids) - 1 : -1]
            ids = torch.tensor(each.completion_ids)[:, None]
            logprobs = tuple(logp_T.gather(1, ids)[:, 0].tolist())
            calls.append(replace(each, logprobs=logprobs))
        found.append(replace(one, calls=tuple(calls)))
    return found


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_samples_of_the_same_weights_are_trained_as_on_policy():
    traces = exact(tiny_model(), random_batch(1))
    one, other = trainer_of(), trainer_of()
    metrics = off_policy_update(one, off_policy(traces, least=0.99))
    batch = build_batch(traces)
    other.ppo_update(other.compute_advantages(batch))
    assert metrics["effective_tokens"] == pytest.approx(1)
    assert metrics["stale_fraction"] == 1  # of other weights, whatever their versions are
    for name, value in weights(one.model).items():
        torch.testing.assert_close(value, weights(other.model)[name], atol=1e-5, rtol=0)


def test_versions_of_other_runs_are_not_taken_for_this_runs():
    """Weights of version 0 that are others: the log-probs are computed, and weighed."""
    traces = random_batch(2)
    halved = [
        replace(
            one,
            calls=tuple(
                replace(c, logprobs=tuple(p - math.log(4) for p in c.logprobs)) for c in one.calls
            ),
        )
        for one in exact(tiny_model(), traces)
    ]
    capped, free = trainer_of(importance_cap=2.0), trainer_of(importance_cap=9.0)
    found = [off_policy_update(one, off_policy(halved)) for one in (capped, free)]
    # All weights are 4: the loss is 4 times what it was, or the cap times.
    plain = trainer_of()
    alike = off_policy_update(plain, off_policy(exact(tiny_model(), traces)))
    assert found[0]["grad_norm"] == pytest.approx(2 * alike["grad_norm"], rel=1e-4)
    assert found[1]["grad_norm"] == pytest.approx(4 * alike["grad_norm"], rel=1e-4)
    assert found[0]["effective_tokens"] == pytest.approx(1)


def test_too_few_effective_samples_stop_before_anything_changes():
    trainer = trainer_of()
    before = weights(trainer.model)
    with pytest.raises(TooFewEffective, match=r"the \d+ recorded tokens are worth only \d+ "):
        off_policy_update(trainer, off_policy(random_batch(3), least=0.999))
    assert trainer.step == 0
    assert all(torch.equal(before[name], p) for name, p in weights(trainer.model).items())
    assert issubclass(TooFewEffective, TrainingError)


def test_a_loss_without_weights_has_no_limit():
    metrics = off_policy_update(
        trainer_of(advantage="opmd", policy_loss="opmd"), off_policy(random_batch(3), least=0.999)
    )
    assert 0 < metrics["effective_tokens"] < 0.999


def test_a_distance_taken_off_rewards_is_that_of_the_policy_as_it_is():
    """Log-probs that are recorded far off do not change what a rollout is charged."""
    moved = tiny_model(seed=5)
    for name, p in tiny_model().named_parameters():
        dict(moved.named_parameters())[name].data.lerp_(p.data, 0.9)
    charged = []
    for shift in (0.0, 1.0):
        trainer = PolicyTrainer(
            copy.deepcopy(moved),
            training(
                total_steps=9,
                kl="none",
                kl_penalty="k1",
                kl_penalty_args=KLPenalty(kl_coef=1.0),
                importance_cap=None,
                rejection=None,
                proximal="recorded",
                policy_loss="opmd",
                advantage="opmd",
            ),
            reference=tiny_model(),
        )
        traces = [
            replace(
                one,
                calls=tuple(
                    replace(c, logprobs=tuple(p - shift for p in c.logprobs)) for c in one.calls
                ),
            )
            for one in random_batch(4)
        ]
        charged.append(off_policy_update(trainer, off_policy(traces))["advantage_std"])
    assert charged[0] == pytest.approx(charged[1], rel=1e-6)


# What is held out ---------------------------------------------------------------------------------


def test_the_held_out_reward_is_that_of_the_weighted_rollouts():
    model = tiny_model()
    traces = exact(model, random_batch(6))
    shifted = []
    for number, one in enumerate(traces):
        calls = [
            replace(c, logprobs=tuple(p - 0.1 * number for p in c.logprobs)) for c in one.calls
        ]
        shifted.append(replace(one, calls=tuple(calls)))
    batch = build_batch(shifted)
    found = held_out_rewards(trainer_of(model), batch)
    logs = {
        one.id: sum(0.1 * number * len(c.completion_ids) for c in one.calls)
        for number, one in enumerate(traces)
    }
    total = sum(math.exp(value) for value in logs.values())
    rewards = {one.id: one.reward for one in traces}
    expected = sum(math.exp(logs[id]) * rewards[id] for id in logs) / total
    assert found["reward"] == pytest.approx(expected, rel=1e-3)
    squares = sum(math.exp(2 * value) for value in logs.values())
    assert found["effective_rollouts"] == pytest.approx(total**2 / squares / 9, rel=1e-3)
    assert found["recorded"] == pytest.approx(sum(rewards.values()) / 9)


class Turn:
    def __init__(self, prompt, completion):
        self.prompt_ids, self.completion_ids = prompt, completion

    def __len__(self):
        return len(self.prompt_ids) + len(self.completion_ids)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_held_out_loss_falls_where_it_is_trained_itself(kind):
    parts = {"advantage": "none", "policy_loss": kind}
    trainer = PolicyTrainer(tiny_model(), training(total_steps=9, lr=1e-2, kl="none", **parts))
    batch = RecordedBatch.of([[Turn((1, 2), (3, 4))], [Turn((1, 2), (5,))]])
    before = held_out_loss(trainer, batch)
    assert weights(trainer.model).keys()
    for _ in range(3):
        recorded_update(trainer, batch)
    after = held_out_loss(trainer, batch)
    assert after["loss"] < before["loss"]
    if kind == "dpo":
        assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert after["accuracy"] == 1.0


def test_calls_of_a_trace_without_log_probs_are_refused():
    one = trace(0, 0, [call("c", [1], [2], [-1.0])], reward=1.0)
    two = trace(0, 1, [call("d", [1], [3], [-1.0])], reward=0.0)
    batch = off_policy([one, two])
    rows = (replace(batch.rows[0], logprobs=()), *batch.rows[1:])
    with pytest.raises(TrainingError, match="0 recorded log-probs"):
        off_policy_update(trainer_of(), replace(batch, rows=rows))
