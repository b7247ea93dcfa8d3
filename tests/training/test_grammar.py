"""Calls that were held to a form are trained on the distribution that they were sampled from."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.engines.models import generate_all
from tests.engines.test_grammar import END, grammars, make_engine, make_model
from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.kit.toy import ids_of
from tests.training.configured import changed, training
from tests.training.exact import all_float64
from tuner.config.algorithms import EntropyLoss, KLLoss
from tuner.engines import SamplingParams
from tuner.engines.grammar_text import GrammarError
from tuner.errors import TrainingError
from tuner.gateway.families.grammars import json_schema
from tuner.traces.store import trace_from_json, trace_to_json
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer

SETTINGS = training(total_steps=5, kl="none", grad_clip=1e9)
GRAMMAR = "start: %json " + json_schema(
    {
        "type": "object",
        "properties": {"k": {"enum": ["aé", "b"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["k"],
        "additionalProperties": False,
    },
    ("schema",),
)
ONE_OF_THREE = 'start: "abc" | "ad" | "xe"'
# What may follow "", "a", "ab", ... in that grammar, written down by hand.
FOLLOWERS = {"": "ax", "a": "bd", "ab": "c", "x": "e"}


async def rollouts(engine, grammars_, **options):
    asked = [
        (
            list(ids_of("hello" + "!" * (seed % 3))),
            SamplingParams(max_tokens=40, seed=seed, grammar=grammar, **options),
        )
        for seed, grammar in enumerate(grammars_)
    ]
    got = await generate_all(engine, asked)
    calls = [
        dataclasses.replace(
            call(str(i), prompt_ids, one.completion_ids, one.logprobs), sampling=sampling
        )
        for i, ((prompt_ids, sampling), one) in enumerate(zip(asked, got, strict=True))
    ]
    return [trace(0, i, [one], reward=float(i % 2)) for i, one in enumerate(calls)]


@grid("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}], quick=2)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_recomputed_log_probs_are_the_recorded_ones_also_from_the_store(
    deterministic: bool, options: dict
) -> None:
    engine = make_engine(deterministic=deterministic)
    traces = await rollouts(engine, [GRAMMAR, ONE_OF_THREE, "", GRAMMAR] * 2, **options)
    stored = [trace_from_json(json.loads(json.dumps(trace_to_json(one)))) for one in traces]
    assert stored == traces
    trainer = PolicyTrainer(engine._model, SETTINGS, grammars=engine.grammars)
    batch = build_batch(stored)
    for row, logp in zip(batch.rows, trainer.compute_logp(batch), strict=True):
        assert logp.tolist() == pytest.approx(row.logprobs, abs=1e-5)
    metrics = trainer.ppo_update(trainer.compute_advantages(batch))
    assert metrics["logprob_mismatch_max"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def allowed_by_hand(text: str, taken: str | None) -> list[int]:
    """Ids that may follow `text` in ONE_OF_THREE."""
    return [ids_of(letter)[0] for letter in FOLLOWERS[text]] if taken else [END]


@pytest.mark.parametrize("entropy", [0.0, 0.05])
def test_loss_and_gradient_equal_the_formula_over_the_allowed_tokens(entropy: float) -> None:
    """In float64, with the sets that may follow written by hand, off policy and clipped."""
    texts = ["abc", "ad", "xe", "ad"]
    offsets = [0.05, -0.02, 0.5, -0.4]
    exact = all_float64(make_model())
    calls, terms, entropies = [], [], []
    for text, offset in zip(texts, offsets, strict=True):
        prompt_ids, completion = [*ids_of("hello")], [*ids_of(text), END]
        logits = exact(torch.tensor([prompt_ids + completion])).logits[0, len(prompt_ids) - 1 :]
        logps = []
        for i, token_id in enumerate(completion):
            places = allowed_by_hand(text[:i], text[i : i + 1])
            row = logits[i, places].log_softmax(-1)
            logps.append(row[places.index(token_id)])
            entropies.append(-(row.exp() * row).sum())
        old = [p.item() + offset for p in logps]
        calls.append(call(text, prompt_ids, completion, old, grammar=ONE_OF_THREE))
        terms.append((torch.stack(logps), torch.tensor(old, dtype=torch.float64)))
    rewards = [1.0, 0.0, 0.0, 0.5]
    traces = [
        trace(0, i, [one], reward=reward)
        for i, (one, reward) in enumerate(zip(calls, rewards, strict=True))
    ]
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    losses = []
    for reward, (logp, old) in zip(rewards, terms, strict=True):
        advantage = (reward - mean) / (std + 1e-6)
        ratio = (logp - old).exp()
        losses.append(torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)))
    expected = torch.cat(losses).mean() - entropy * torch.stack(entropies).mean()
    expected.backward()

    model = all_float64(make_model())
    settings = changed(
        SETTINGS, entropy=EntropyLoss(entropy_coef=entropy), max_tokens_per_micro_batch=20
    )
    trainer = PolicyTrainer(model, settings, grammars=grammars())
    gradients = {}
    trainer.optimizer.step = lambda: gradients.update(
        {name: p.grad.clone() for name, p in model.named_parameters()}
    )
    metrics = trainer.ppo_update(trainer.compute_advantages(build_batch(traces)))
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-9)
    for name, parameter in exact.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-9), name


async def test_the_reference_is_held_to_the_same_form() -> None:
    engine = make_engine()
    traces = await rollouts(engine, [GRAMMAR, ONE_OF_THREE])
    settings = changed(SETTINGS, kl="k2", kl_args=KLLoss(kl_coef=0.1))
    trainer = PolicyTrainer(engine._model, settings, grammars=engine.grammars)
    scored = trainer.compute_ref_logp(trainer.compute_advantages(build_batch(traces)))
    assert trainer.ppo_update(scored)["kl_loss"] == pytest.approx(0.0, abs=1e-9)


def test_a_constrained_call_is_never_trained_without_its_masks() -> None:
    def batch(text: str):
        one = call("c", ids_of("hi"), ids_of(text), [-1.0] * len(text), grammar=ONE_OF_THREE)
        return build_batch([trace(0, i, [one], reward=float(i)) for i in range(2)])

    with pytest.raises(TrainingError, match=r"grammars=engine\.grammars"):
        PolicyTrainer(make_model(), SETTINGS).compute_logp(batch("ad"))
    with pytest.raises(GrammarError, match="token 1"):
        PolicyTrainer(make_model(), SETTINGS, grammars=grammars()).compute_logp(batch("ac"))
