"""Whole updates of every algorithm: against float64 formulas, and that they learn."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch

from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.kit.models import tiny_qwen3
from tests.training.configured import changed, training
from tests.training.test_trainer import gradient_of, random_batch, tiny_model
from tuner.config import RunConfig, load_config
from tuner.config.algorithms import ADVANTAGES, ALGORITHMS, KLLoss, KLPenalty
from tuner.runs.stack import for_trainer, selection
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer

BASE = training(
    total_steps=10,
    kl_args=KLLoss(kl_coef=0.1),
    grad_clip=1e9,
    max_tokens_per_micro_batch=64,
    max_completion=16,
)


# The others, on recorded data or with a teacher, are in test_recorded.py.
REWARDED = [
    name
    for name, row in ALGORITHMS.items()
    if row.recorded is None and ADVANTAGES[row.advantage_fn].needs_reward
]


def charged(coefficient: float) -> RunConfig:
    return changed(BASE, kl_penalty="k1", kl_penalty_args=KLPenalty(kl_coef=coefficient))


def settings_of(algorithm: str, *overrides: str) -> RunConfig:
    """What the configuration makes of an algorithm, with nothing else changed."""
    config = load_config(
        overrides=[
            f"algorithm.algorithm_type={algorithm}",
            "model.max_response_tokens=16",
            *overrides,
        ]
    )
    return changed(for_trainer(config, 10, 64), grad_clip=1e9)


def stale(traces):
    """The same rollouts, sampled by weights two updates older than those of step 2."""
    return [
        replace(item, calls=tuple(replace(c, versions=(0,) * len(c.versions)) for c in item.calls))
        for item in traces
    ]


def trainer_at(step, settings, dtype=torch.float64):
    trainer = PolicyTrainer(
        tiny_model().to(dtype), settings, reference=tiny_model(seed=1).to(dtype)
    )
    trainer.step = step
    return trainer


def gradient(trainer, traces):
    return gradient_of(trainer.model, trainer, traces)[1]


def close(one, other, tolerance=1e-6):
    return (one - other).norm() <= tolerance * other.norm()


# Decoupled PPO --------------------------------------------------------------------------------


def decoupled_loss(model, ref, traces, settings, proximal):
    """The module's docstring for PPO, token by token; `proximal` gives a call's log-probs."""
    total, tokens = 0.0, 0
    for item in traces:
        group = [other.reward for other in traces if other.id.task == item.id.task]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        advantage = (item.reward - mean) / (std + settings.algorithm.advantage.epsilon)
        for one in item.calls:
            ids = torch.tensor([one.prompt_ids + one.completion_ids])
            rows = range(len(one.prompt_ids) - 1, ids.shape[1] - 1)
            logp = model(ids).logits[0].log_softmax(-1)
            with torch.no_grad():
                ref_logp = ref(ids).logits[0].log_softmax(-1)
            for i, (row, token) in enumerate(zip(rows, one.completion_ids, strict=True)):
                old = proximal(one, i, logp[row, token].detach())
                ratio = torch.exp(logp[row, token] - old)
                loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
                if advantage < 0:
                    loss = torch.clamp(loss, max=-advantage * 3)
                weight = math.exp(old - one.logprobs[i])
                low, high = settings.tuner.algorithm.rejection or (0, math.inf)
                kept = low <= weight <= high
                bounded = (
                    min(weight, settings.tuner.algorithm.cap) if settings.tuner.algorithm.cap else 1
                )
                loss = loss * bounded * kept
                loss = (
                    loss
                    + settings.algorithm.kl_loss.kl_coef
                    * (logp[row, token] - ref_logp[row, token]) ** 2
                    / 2
                )
                total, tokens = total + loss, tokens + 1
    return total / tokens


@pytest.mark.parametrize("cap", [1.05, None])
@pytest.mark.parametrize("rejection", [None, (0.8, 1.3)])
def test_stale_tokens_are_weighed_by_proximal_over_behaviour(cap, rejection):
    traces = stale(random_batch(0))
    settings = changed(BASE, importance_cap=cap, rejection=rejection)
    trainer = trainer_at(2, settings)
    batch = build_batch(traces)
    at_start = dict(
        zip((row.call_id for row in batch.rows), trainer.compute_logp(batch), strict=True)
    )
    exact, ref = tiny_model().double(), tiny_model(seed=1).double()
    expected = decoupled_loss(
        exact, ref, traces, settings, lambda one, i, _: float(at_start[one.id][i])
    )
    expected.backward()
    loss, got = gradient_of(trainer.model, trainer, traces)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert close(got, torch.cat([p.grad.flatten() for p in exact.parameters()]))


def test_proximal_log_probs_can_be_interpolated():
    traces = stale(random_batch(1))
    settings = changed(BASE, proximal="loglinear")
    trainer = trainer_at(2, settings)
    exact, ref = tiny_model().double(), tiny_model(seed=1).double()
    expected = decoupled_loss(
        exact,
        ref,
        traces,
        settings,
        lambda one, i, now: one.logprobs[i] + 2 / 3 * (float(now) - one.logprobs[i]),
    )
    expected.backward()
    loss, got = gradient_of(trainer.model, trainer, traces)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert close(got, torch.cat([p.grad.flatten() for p in exact.parameters()]))


def test_on_policy_the_three_policies_change_nothing_and_take_no_forward_pass(monkeypatch):
    traces = random_batch(2)
    plain = changed(BASE, importance_cap=None, proximal="recorded")
    expected = gradient(trainer_at(0, plain), traces)
    trainer = trainer_at(0, changed(BASE, rejection=(0.99, 1.01), importance_cap=1.0))
    passes = []
    compute = trainer.compute_logp
    monkeypatch.setattr(
        trainer,
        "compute_logp",
        lambda batch, model=None: passes.append(model) or compute(batch, model=model),
    )
    assert torch.equal(gradient(trainer, traces), expected)
    assert passes == [trainer.reference]


def test_several_updates_keep_the_policy_that_the_step_began_with():
    """The second update of a step is that of a batch whose ratio has left 1."""
    traces = random_batch(3)
    once, twice = (trainer_at(0, changed(BASE, lr=1e-2, updates=updates)) for updates in (1, 2))
    batch = build_batch(traces)
    for trainer in (once, twice):
        metrics = trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
        assert trainer.step == 1
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    again = trainer_at(0, changed(BASE, lr=1e-2))
    scored = again.compute_ref_logp(again.compute_advantages(batch))
    again.ppo_update(scored)
    again.step = 0  # so that the recorded log-probs count as those of the step's beginning
    again.ppo_update(scored)
    pairs = zip(twice.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Every algorithm ------------------------------------------------------------------------------


@grid("algorithm", REWARDED, quick=4)
def test_cuts_order_and_parts_of_a_batch_do_not_change_the_update(algorithm):
    traces = random_batch(4)
    settings = settings_of(algorithm, "algorithm.loss_agg_mode=seq-mean-token-mean")
    keep = selection(load_config(overrides=[f"algorithm.algorithm_type={algorithm}"]))
    gradients = []
    for order, tokens in ((traces, 10_000), (traces, 1), (traces[::-1], 40)):
        trainer = trainer_at(0, changed(settings, max_tokens_per_micro_batch=tokens))
        found = []
        trainer.optimizer.step = lambda t=trainer, f=found: f.append(
            torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])
        )
        batch = build_batch(order, selection=keep)
        trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
        gradients.append(found[0])
    assert gradients[0].norm() > 0
    assert all(close(other, gradients[0]) for other in gradients[1:])


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm", "rollout-mean"])
def test_aggregation_weighs_the_loss_of_single_tokens(mode):
    """Against gradients of one row at a time, added up with the weights of the definition."""
    traces = random_batch(5)
    batch = build_batch(traces)
    lengths = [len(row.completion_ids) for row in batch.rows]
    of_rollout = {
        r: sum(n for n, row in zip(lengths, batch.rows, strict=True) if row.rollout == r)
        for r in {row.rollout for row in batch.rows}
    }
    settings = changed(BASE, aggregation=mode, kl="none")
    advantages = trainer_at(0, settings).compute_advantages(batch).advantages_N
    model = tiny_model().double()
    total = 0.0
    for n, row in enumerate(batch.rows):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logp = model(ids).logits[0].log_softmax(-1)
        weight = {
            "seq-mean-token-mean": 1 / (len(lengths) * lengths[n]),
            "seq-mean-token-sum-norm": 1 / (len(lengths) * 16),
            "rollout-mean": 1 / (len(of_rollout) * of_rollout[row.rollout]),
        }[mode]
        for i, token in enumerate(row.completion_ids):
            ratio = torch.exp(logp[len(row.prompt_ids) - 1 + i, token] - row.logprobs[i])
            a = advantages[n]
            loss = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            total = total + weight * (loss.clamp(max=-3 * a) if a < 0 else loss)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert close(gradient(trainer_at(0, settings), traces), expected)


def test_penalty_takes_the_distance_to_the_reference_off_the_rewards():
    traces = random_batch(6)
    batch = build_batch(traces)
    settings = changed(charged(0.3), kl="none", advantage="rloo")
    trainer = trainer_at(0, settings)
    ref_logp = trainer.compute_logp(batch, model=trainer.reference)
    rewards = batch.rewards_R.tolist()
    for row, ref in zip(batch.rows, ref_logp, strict=True):
        rewards[row.rollout] -= 0.3 * sum(
            old - float(r) for old, r in zip(row.logprobs, ref, strict=True)
        )
    groups = batch.group_R.tolist()
    expected = []
    for row in batch.rows:
        others = [
            r
            for i, r in enumerate(rewards)
            if groups[i] == groups[row.rollout] and i != row.rollout
        ]
        expected.append(rewards[row.rollout] - sum(others) / len(others))
    scored = trainer.compute_advantages(batch)
    assert scored.advantages_N.tolist() == pytest.approx(expected, rel=1e-9)
    assert scored.ref_logp is not None


def test_metrics_tell_how_far_the_policy_has_moved():
    traces = random_batch(7)
    batch = build_batch(traces)
    trainer = trainer_at(0, BASE)
    metrics = trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
    current = torch.cat(trainer_at(0, BASE).compute_logp(batch))
    recorded = torch.tensor([p for row in batch.rows for p in row.logprobs], dtype=torch.float64)
    ratio = (current - recorded).exp()
    size = float(ratio.sum() ** 2 / (ratio**2).sum()) / len(ratio)
    assert metrics["effective_sample_size"] == pytest.approx(size)
    assert 0 < size < 1
    assert metrics["kl_behaviour"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    tokens = torch.cat(trainer.compute_advantages(batch).advantages)
    assert metrics["advantage_std"] == pytest.approx(float(tokens.std(correction=0)))
    assert metrics["kl_reference"] > 0


def test_log_probs_of_another_distribution_raise_the_alarm_once(caplog):
    batch = build_batch(random_batch(8))
    trainer = trainer_at(0, BASE)
    exact = trainer.compute_logp(batch)
    rows = [
        replace(row, logprobs=tuple(p.tolist()), versions=())
        for row, p in zip(batch.rows, exact, strict=True)
    ]
    with caplog.at_level(logging.WARNING, logger="tuner"):
        good = replace(batch, rows=tuple(rows))
        trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(good)))
        assert not caplog.records
        for _ in range(2):
            fresh = replace(batch, rows=tuple(replace(row, versions=()) for row in batch.rows))
            trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(fresh)))
    assert len(caplog.records) == 1
    assert "recorded and recomputed log-probs" in caplog.text


ACTIONS, GOOD = 8, 3


def bandit(seed):
    return tiny_qwen3(
        ACTIONS,
        seed=seed,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )


@pytest.mark.long
@pytest.mark.parametrize("algorithm", REWARDED)
def test_every_algorithm_raises_the_reward_of_a_bandit(algorithm):
    """Two tokens of eight; the reward is the share of them that are the good one."""
    config = load_config(overrides=[f"algorithm.algorithm_type={algorithm}"])
    settings = changed(for_trainer(config, 40, 4096), lr=2e-2)
    trainer = PolicyTrainer(bandit(0), settings)
    generator = torch.Generator().manual_seed(0)
    means = []
    for step in range(25):
        traces = []
        for task in range(4):
            ids = torch.full((8, 1), task)
            logps = []
            for _ in range(2):
                with torch.no_grad():
                    logp = trainer.model(ids).logits[:, -1].log_softmax(-1)
                token = torch.multinomial(logp.exp(), 1, generator=generator)
                logps.append(logp.gather(1, token))
                ids = torch.cat([ids, token], 1)
            for i, (sampled, logprobs) in enumerate(
                zip(ids[:, 1:].tolist(), torch.cat(logps, 1).tolist(), strict=True)
            ):
                one = call(f"{task}-{i}", [task], sampled, logprobs)
                one = replace(one, versions=(trainer.step,) * 2)
                reward = sum(token == GOOD for token in sampled) / 2
                traces.append(trace(task, i, [one], reward=reward, step=step))
        means.append(sum(item.reward for item in traces) / len(traces))
        batch = build_batch(traces, selection=selection(config))
        if batch.rows:
            scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
            metrics = trainer.ppo_update(scored)
            assert metrics["stale_fraction"] == 0
    assert sum(means[:3]) / 3 < 0.3
    assert sum(means[-3:]) / 3 > 0.8


def test_topr_compares_with_the_policy_that_sampled_however_old():
    """On stale tokens the ratio stays that to the recorded log-probs, without a forward pass."""
    traces = random_batch(9)
    settings = settings_of("topr")
    fresh = gradient(trainer_at(0, settings), traces)
    assert close(gradient(trainer_at(2, settings), stale(traces)), fresh, 1e-12)
    recomputed = changed(settings, policy_loss="importance_sampling", policy_loss_args=None)
    trainer = trainer_at(2, recomputed)
    assert not close(gradient(trainer, stale(traces)), fresh, 1e-3)


def test_rejected_tokens_are_counted():
    batch = build_batch(stale(random_batch(0)))
    trainer = trainer_at(2, changed(BASE, rejection=(0.8, 1.3)))
    weights = (
        torch.cat(trainer.compute_logp(batch))
        - torch.tensor([p for row in batch.rows for p in row.logprobs], dtype=torch.float64)
    ).exp()
    metrics = trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
    outside = ((weights < 0.8) | (weights > 1.3)).double().mean()
    assert 0 < float(outside) < 1
    assert metrics["rejected_fraction"] == pytest.approx(float(outside))
    assert metrics["stale_fraction"] == 1


def test_calls_with_rewards_of_their_own_pay_their_penalty_themselves():
    """Two rollouts: a call with its own reward and one that shares the rollout's."""
    traces = [
        trace(
            0,
            number,
            [
                replace(call(f"{number}-own", [1], [2, number], [-1.0] * 2), role="a", reward=0.5),
                call(f"{number}-shared", [3], [4, number], [-1.0] * 2),
            ],
            reward=1.0,
        )
        for number in range(2)
    ]
    batch = build_batch(traces)
    trainer = trainer_at(0, changed(charged(1.0), advantage="rloo"))
    ref_logp = trainer.compute_logp(batch, model=trainer.reference)
    paid = {
        row.call_id: sum(-1.0 - float(r) for r in ref)
        for row, ref in zip(batch.rows, ref_logp, strict=True)
    }
    advantages = trainer.compute_advantages(batch).advantages_N.tolist()
    for row, advantage in zip(batch.rows, advantages, strict=True):
        number, _, kind = row.call_id.partition("-")
        other = f"{1 - int(number)}-{kind}"
        assert advantage == pytest.approx(paid[other] - paid[row.call_id], rel=1e-9)
