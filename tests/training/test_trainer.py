"""The training step against an independent computation, one token at a time, in float64."""

import copy
import math
import random

import pytest
import torch

from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.kit.models import tiny_qwen3
from tests.training.configured import changed, training
from tuner.config.algorithms import EntropyLoss, KLLoss
from tuner.errors import TrainingError
from tuner.traces import Outcome
from tuner.training.batch import build_batch
from tuner.training.optimizer import lr_factor
from tuner.training.trainer import PolicyTrainer

VOCABULARY = 53


def tiny_model(seed=0):
    return tiny_qwen3(VOCABULARY, seed=seed)


def random_batch(seed, samplings=({},)):
    """3 groups of 3 rollouts with 1 to 3 calls each; log-probs near what the model gives."""
    rng = random.Random(seed)
    model = tiny_model()
    traces = []
    for task in range(3):
        for rollout in range(3):
            calls = []
            for number in range(rng.randint(1, 3)):
                prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
                completion = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + completion])).logits[0]
                logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
                exact = logp.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
                calls.append(
                    call(
                        f"{task}-{rollout}-{number}",
                        prompt,
                        completion,
                        [p + rng.gauss(0, 0.2) for p in exact],
                        **rng.choice(samplings),
                    )
                )
            traces.append(trace(task, rollout, calls, reward=rng.random()))
    rng.shuffle(traces)
    return traces


def reference_loss(model, ref, traces, settings):
    """The loss of the module's docstring, token by token; returns a scalar with a graph."""
    groups = {}
    for item in traces:
        groups.setdefault(item.id.task, []).append(item)
    total, tokens = 0.0, 0
    for group in groups.values():
        rewards = [item.reward for item in group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for item in group:
            advantage = (item.reward - mean) / (std + settings.algorithm.advantage.epsilon)
            for one in item.calls:
                ids = torch.tensor([one.prompt_ids + one.completion_ids])
                heat = one.sampling.temperature
                logp = (model(ids).logits[0] / heat).log_softmax(-1)
                with torch.no_grad():
                    ref_logp = (ref(ids).logits[0] / heat).log_softmax(-1)
                for i, (token, old) in enumerate(
                    zip(one.completion_ids, one.logprobs, strict=True)
                ):
                    row = len(one.prompt_ids) + i - 1
                    ratio = torch.exp(logp[row, token] - old)
                    clipped = ratio.clamp(
                        1 - settings.algorithm.policy_loss.low,
                        1 + settings.algorithm.policy_loss.high,
                    )
                    loss = torch.max(-advantage * ratio, -advantage * clipped)
                    if advantage < 0:
                        loss = torch.clamp(
                            loss, max=-advantage * settings.algorithm.policy_loss.clip_ratio_c
                        )
                    loss = (
                        loss
                        + settings.algorithm.kl_loss.kl_coef
                        * (logp[row, token] - ref_logp[row, token]) ** 2
                        / 2
                    )
                    entropy = -(logp[row].exp() * logp[row]).sum()
                    total = total + loss - settings.algorithm.entropy_loss.entropy_coef * entropy
                    tokens += 1
    return total / tokens


def gradient_of(model, trainer, traces):
    """The gradient that `ppo_update` hands to the optimizer, before clipping changes it."""
    trainer.optimizer.step = lambda: gradients.append(
        torch.cat([p.grad.flatten().double().clone() for p in model.parameters()])
    )
    gradients = []
    scored = trainer.compute_ref_logp(trainer.compute_advantages(build_batch(traces)))
    metrics = trainer.ppo_update(scored)
    return metrics["loss"], gradients[0]


SETTINGS = training(
    total_steps=10,
    kl_args=KLLoss(kl_coef=0.1),
    entropy=EntropyLoss(entropy_coef=0.02),
    grad_clip=1e9,
    max_tokens_per_micro_batch=64,
)


@grid("seed", [0, 1, 2], quick=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_equal_the_formula_in_float64(seed, dtype):
    traces = random_batch(seed, samplings=({}, {"temperature": 0.7}))
    exact, ref = tiny_model().double(), tiny_model(seed=1).double()
    expected = reference_loss(exact, ref, traces, SETTINGS)
    expected.backward()
    expected_gradient = torch.cat([p.grad.flatten() for p in exact.parameters()])
    model = tiny_model().to(dtype)
    trainer = PolicyTrainer(model, SETTINGS, reference=tiny_model(seed=1).to(dtype))
    loss, gradient = gradient_of(model, trainer, traces)
    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert error < 1e-6


def test_where_micro_batches_are_cut_does_not_change_the_gradient():
    traces = random_batch(3)
    gradients = []
    for tokens in (1, 40, 10_000):
        settings = changed(SETTINGS, max_tokens_per_micro_batch=tokens)
        model = tiny_model()
        trainer = PolicyTrainer(model, settings, reference=tiny_model(seed=1))
        gradients.append(gradient_of(model, trainer, traces)[1])
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


def test_order_of_arrival_does_not_change_the_update():
    traces = random_batch(4)
    weights = []
    for order in (traces, traces[::-1]):
        model = tiny_model()
        trainer = PolicyTrainer(model, training(total_steps=1, lr=1e-2))
        trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(build_batch(order))))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "temperature": 0.7}])
def test_truncated_sampling_is_recomputed_as_it_was_sampled(cut):
    """For a token inside the cut, log-probs are those of the cut, renormalised distribution."""
    model, heat = tiny_model(), cut.get("temperature", 1.0)
    prompt = [1, 2, 3]
    logits = model(torch.tensor([prompt])).logits[0, -1].detach() / heat
    order = logits.argsort(descending=True).tolist()
    probs = logits.softmax(-1)
    kept, mass = [], 0.0
    for token in order:
        if len(kept) == cut.get("top_k", VOCABULARY) or mass >= cut.get("top_p", 1.0):
            break
        kept.append(token)
        mass += float(probs[token])
    token = kept[-1]
    expected = math.log(float(probs[token]) / mass)
    batch = build_batch(
        [trace(0, i, [call(str(i), prompt, [token], [expected], **cut)], reward=i) for i in (0, 1)]
    )
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    assert trainer.compute_logp(batch)[0].tolist() == pytest.approx([expected], abs=1e-5)
    assert trainer.ppo_update(trainer.compute_advantages(batch))["logprob_mismatch_max"] < 1e-5


def test_rewarded_tokens_become_more_probable_and_the_reference_stays():
    model = tiny_model()
    trainer = PolicyTrainer(model, training(total_steps=5, lr=1e-2, kl_args=KLLoss(kl_coef=0.01)))

    def two_rollouts(logp):
        good, bad = call("g", [1, 2], [3, 4], logp[0]), call("b", [1, 2], [5, 6], logp[1])
        return build_batch([trace(0, 0, [good], reward=1.0), trace(0, 1, [bad], reward=0.0)])

    before = trainer.compute_logp(two_rollouts([[-1, -1], [-1, -1]]))
    batch = two_rollouts([logp.tolist() for logp in before])
    frozen = copy.deepcopy(trainer.reference.state_dict())
    for _ in range(3):
        trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
    after = trainer.compute_logp(batch)
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
    assert all(torch.equal(frozen[k], v) for k, v in trainer.reference.state_dict().items())


def test_saved_trainer_goes_on_bit_for_bit(tmp_path):
    settings = training(total_steps=6, lr=1e-2, lr_scheduler="cosine", warmup_steps=2)
    straight = PolicyTrainer(tiny_model(), settings)
    resumed = None
    for step in range(4):
        batch = build_batch(random_batch(step))
        if step == 2:
            straight.save(tmp_path / "state.pt")
            model = copy.deepcopy(straight.model)
            resumed = PolicyTrainer(model, settings, reference=tiny_model())
            resumed.load(tmp_path / "state.pt")
            assert resumed.lr == straight.lr
        for trainer in filter(None, (straight, resumed)):
            trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
            trainer.step_lr_scheduler()
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_infinite_gradient_raises_and_leaves_the_weights_alone():
    model = tiny_model()
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    batch = build_batch(random_batch(0))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError, match="not finite"):
        trainer.ppo_update(trainer.compute_advantages(batch))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_every_sampled_token_is_trained_or_dropped_with_a_reason():
    traces = [
        trace(0, 0, [call("a", [1], [2, 3], [-1, -1])], reward=1.0),
        trace(
            0,
            1,
            [call("b", [1], [2], [-1]), call("c", [1], [4], [0.0], temperature=0.0)],
            reward=0.0,
        ),
        trace(
            0,
            1,
            [call("d", [1], [2] * 4, [-1] * 4)],
            outcome=Outcome.TIMEOUT,
            final=False,
            attempt=0,
        ),
        trace(0, 2, [call("e", [1], [2] * 5, [-1] * 4)], reward=0.5),
        trace(0, 3, [call("f", [1], [2] * 6, [-1] * 6)], outcome=Outcome.WORKFLOW_ERROR),
        trace(1, 0, [call("g", [1], [2] * 7, [-1] * 7)], reward=1.0),
        trace(1, 1, [], outcome=Outcome.NO_CALLS),
    ]
    batch = build_batch(traces)
    assert batch.trained_tokens == 3
    assert batch.dropped_tokens == {
        "greedy_call": 1,
        "group_of_one": 7,
        "invalid_call": 5,
        "retried_attempt": 4,
        "workflow_error": 6,
    }
    assert batch.sampled_tokens == 26
    assert batch.dropped_rollouts == {
        "group_of_one": 1,
        "invalid_call": 1,
        "no_calls": 1,
        "workflow_error": 1,
    }

    penalized = build_batch(traces, penalty=-1.0)
    assert "workflow_error" not in penalized.dropped_tokens
    assert -1.0 in penalized.rewards_R.tolist()


def test_schedules_follow_trinitys_names():
    def factors(kind):
        return [
            round(lr_factor(s, kind=kind, warmup_steps=2, total_steps=6, min_lr_ratio=0.1), 3)
            for s in range(7)
        ]

    assert factors("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert factors("cosine") == [0.5, 1, 1, 0.868, 0.55, 0.232, 0.1]
