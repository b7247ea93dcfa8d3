"""Updates on recorded data and on a teacher's opinion, against autograd of the whole loss."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.kit.models import tiny_qwen3
from tests.training.configured import changed, training
from tests.training.test_trainer import VOCABULARY, gradient_of, random_batch, tiny_model
from tuner.config.algorithms import DistillAdvantage, DPOLoss
from tuner.errors import TrainingError
from tuner.training.batch import build_batch
from tuner.training.likelihood import RecordedBatch, recorded_update
from tuner.training.trainer import PolicyTrainer

PREFERENCE = DPOLoss(beta=0.3, label_smoothing=0.1)
SFT = training(
    total_steps=10,
    policy_loss="sft",
    advantage="none",
    kl="none",
    grad_clip=1e9,
    max_tokens_per_micro_batch=64,
    max_completion=16,
)
DPO = changed(SFT, policy_loss="dpo", aggregation="seq-mean-token-sum", policy_loss_args=PREFERENCE)
DISTILL = changed(
    SFT,
    policy_loss="ppo",
    advantage="on_policy_distill",
    advantage_args=DistillAdvantage(kl_coef=0.5),
    importance_cap=None,
)


@dataclass
class Piece:
    prompt_ids: list[int]
    completion_ids: list[int]


def conversations(seed, count=6):
    """Conversations of 1 to 3 turns, all with the same beginning, each turn extending the last."""
    rng = random.Random(seed)

    def some(low, high):
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    system = some(5, 8)
    found = []
    for _ in range(count):
        ids, turns = [*system, *some(1, 6)], []
        for _ in range(rng.randint(1, 3)):
            answer = some(1, 8)
            turns.append(Piece(list(ids), answer))
            ids += [*answer, *some(1, 4)]
        found.append(turns)
    return found


def logp_of(model, piece):
    """Log-probs of a completion, by one plain forward pass."""
    ids = torch.tensor([piece.prompt_ids + piece.completion_ids])
    logp = model(ids).logits[0].log_softmax(-1)[len(piece.prompt_ids) - 1 : -1]
    return logp.gather(1, torch.tensor(piece.completion_ids)[:, None])[:, 0]


def flat_gradient(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def sft_loss(model, talks, mode):
    """The formulas of `row_weights`, one loss for each way to add up."""
    turns = [-logp_of(model, piece) for talk in talks for piece in talk]
    tokens = sum(len(turn) for turn in turns)
    match mode:
        case "token-mean":
            return sum(turn.sum() for turn in turns) / tokens
        case "seq-mean-token-mean":
            return sum(turn.mean() for turn in turns) / len(turns)
        case "seq-mean-token-sum":
            return sum(turn.sum() for turn in turns) / len(turns)
        case "seq-mean-token-sum-norm":
            return sum(turn.sum() for turn in turns) / len(turns) / 16
        case "rollout-mean":
            means = [torch.cat([-logp_of(model, p) for p in talk]).mean() for talk in talks]
            return sum(means) / len(means)


def dpo_loss(model, ref, talks, settings):
    def distance(talk):
        with torch.no_grad():
            frozen = sum(logp_of(ref, piece).sum() for piece in talk)
        return sum(logp_of(model, piece).sum() for piece in talk) - frozen

    losses = []
    for chosen, rejected in zip(talks[0::2], talks[1::2], strict=True):
        margin = PREFERENCE.beta * (distance(chosen) - distance(rejected))
        smooth = PREFERENCE.label_smoothing
        losses.append(-(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin))
    return sum(losses) / len(losses)


def update_of(settings, talks, dtype=torch.float64):
    """What `recorded_update` reports, and the gradient that it hands to the optimizer."""
    model = tiny_model().to(dtype)
    trainer = PolicyTrainer(model, settings, reference=tiny_model(seed=1).to(dtype))
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(flat_gradient(model))
    metrics = recorded_update(trainer, RecordedBatch.of(talks))
    assert trainer.step == 1
    return metrics, gradients[0]


def error(one, other):
    return float((one - other).norm() / other.norm())


MODES = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "rollout-mean",
]


@pytest.mark.parametrize("mode", MODES)
def test_sft_is_the_negative_likelihood_in_float64(mode):
    talks = conversations(0)
    exact = tiny_model().double()
    wanted = sft_loss(exact, talks, mode)
    wanted.backward()
    metrics, gradient = update_of(changed(SFT, aggregation=mode), talks)
    assert metrics["loss"] == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert error(gradient, flat_gradient(exact)) < 1e-6


@pytest.mark.parametrize("max_tokens", [8, 64, 10_000])
def test_dpo_is_autograds_gradient_in_float64_wherever_pairs_are_cut(max_tokens):
    talks = conversations(1)
    exact, ref = tiny_model().double(), tiny_model(seed=1).double()
    wanted = dpo_loss(exact, ref, talks, DPO)
    wanted.backward()
    metrics, gradient = update_of(changed(DPO, max_tokens_per_micro_batch=max_tokens), talks)
    assert metrics["loss"] == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert error(gradient, flat_gradient(exact)) < 1e-6


def test_dpo_reports_rewards_margin_accuracy_and_log_probs():
    talks = conversations(2)
    model, ref = tiny_model().double(), tiny_model(seed=1).double()
    metrics, _ = update_of(DPO, talks)
    with torch.no_grad():
        own = torch.tensor([sum(float(logp_of(model, p).sum()) for p in t) for t in talks])
        theirs = torch.tensor([sum(float(logp_of(ref, p).sum()) for p in t) for t in talks])
    rewards = PREFERENCE.beta * (own - theirs)
    margins = rewards[0::2] - rewards[1::2]
    assert 0 < float((margins > 0).float().mean()) < 1
    assert metrics["accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert metrics["reward_margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert metrics["chosen_reward"] == pytest.approx(float(rewards[0::2].mean()), rel=1e-4)
    assert metrics["rejected_reward"] == pytest.approx(float(rewards[1::2].mean()), rel=1e-4)
    assert metrics["chosen_logp"] == pytest.approx(float(own[0::2].mean()), rel=1e-4)
    assert metrics["rejected_logp"] == pytest.approx(float(own[1::2].mean()), rel=1e-4)


@pytest.mark.parametrize("settings", [SFT, DPO], ids=["sft", "dpo"])
def test_the_token_tree_gives_recorded_data_the_gradient_of_one_row_per_turn(settings):
    talks = conversations(3)
    of_tree = update_of(settings, talks, torch.float32)
    of_rows = update_of(changed(settings, layout="padded"), talks, torch.float32)
    assert error(of_tree[1], of_rows[1]) < 1e-5
    assert of_tree[0]["loss"] == pytest.approx(of_rows[0]["loss"], rel=1e-5)


def test_an_empty_batch_of_recorded_data_is_refused():
    trainer = PolicyTrainer(tiny_model(), SFT)
    with pytest.raises(TrainingError, match="without a turn to train"):
        recorded_update(trainer, RecordedBatch(()))


def test_infinite_loss_leaves_the_weights_alone():
    model = tiny_model()
    trainer = PolicyTrainer(model, DPO)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TrainingError, match="not finite"):
        recorded_update(trainer, RecordedBatch.of(conversations(4)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert trainer.step == 0


# On-policy distillation -----------------------------------------------------------------------


def teacher_model():
    """Of another shape than the student, with its vocabulary."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return tiny_qwen3(VOCABULARY, seed=5, **shape, **heads)


def distill_trainer(settings, dtype=torch.float64):
    return PolicyTrainer(tiny_model().to(dtype), settings, teacher=teacher_model().to(dtype))


@pytest.mark.parametrize("samplings", [({},), ({"temperature": 0.7},)])
def test_distillation_is_ppo_with_the_teachers_opinion_in_float64(samplings):
    traces = random_batch(6, samplings)
    exact, teacher = tiny_model().double(), teacher_model().double()
    total, tokens, distances = 0.0, 0, []
    for item in traces:
        for one in item.calls:
            piece = Piece(list(one.prompt_ids), list(one.completion_ids))
            ids = torch.tensor([piece.prompt_ids + piece.completion_ids])
            heat, first = one.sampling.temperature, len(one.prompt_ids) - 1
            place = torch.tensor(one.completion_ids)[:, None]
            logp, opinion = (
                (model(ids).logits[0] / heat).log_softmax(-1)[first:-1].gather(1, place)[:, 0]
                for model in (exact, teacher)
            )
            old = torch.tensor(one.logprobs, dtype=torch.float64)
            advantage = 0.5 * (opinion.detach() - old)
            distances.append(old - opinion.detach())
            ratio = (logp - old).exp()
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            bound = -advantage * 3.0
            loss = torch.where((advantage < 0) & (loss > bound), bound, loss)
            total = total + loss.sum()
            tokens += len(old)
    (total / tokens).backward()
    trainer = distill_trainer(DISTILL)
    loss, gradient = gradient_of(trainer.model, trainer, traces)
    assert loss == pytest.approx(float(total.detach()) / tokens, rel=1e-6)
    assert error(gradient, flat_gradient(exact)) < 1e-6
    again = distill_trainer(DISTILL)
    metrics = again.ppo_update(again.compute_advantages(build_batch(traces)))
    assert metrics["kl_teacher"] == pytest.approx(float(torch.cat(distances).mean()), rel=1e-6)


def test_the_token_tree_gives_distillation_the_gradient_of_one_row_per_call():
    traces = random_batch(7)
    found = []
    for layout in ("tree", "padded"):
        trainer = distill_trainer(changed(DISTILL, layout=layout), torch.float32)
        found.append(gradient_of(trainer.model, trainer, traces)[1])
    assert error(*found) < 1e-5


def test_the_teacher_is_never_trained_and_must_be_there():
    traces = random_batch(8)
    trainer = distill_trainer(DISTILL)
    assert trainer.teacher is not None
    before = [p.clone() for p in trainer.teacher.model.parameters()]
    trainer.ppo_update(trainer.compute_advantages(build_batch(traces)))
    after = trainer.teacher.model.parameters()
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    with pytest.raises(TrainingError, match="needs a teacher"):
        PolicyTrainer(tiny_model(), DISTILL).compute_advantages(build_batch(traces))


def test_a_teacher_needs_neither_rewards_nor_groups():
    from tuner.training.batch import Selection

    alone = [replace(item, reward=None) for item in random_batch(9) if item.id.rollout == 0]
    batch = build_batch(alone, selection=Selection(needs_group=False, needs_reward=False))
    assert batch.trained_tokens == batch.sampled_tokens > 0
    assert batch.dropped_rollouts == {}
    with_group = build_batch(alone, selection=Selection(needs_reward=False))
    assert with_group.dropped_rollouts == {"group_of_one": 3}
    # Rewards of single calls are not looked at: none is left out for want of a peer.
    own = [
        replace(item, calls=tuple(replace(one, reward=1.0) for one in item.calls)) for item in alone
    ]
    batch = build_batch(own, selection=Selection(needs_group=False, needs_reward=False))
    assert batch.trained_tokens == batch.sampled_tokens
