"""A step of `prompt_distill` against transformers' own forward passes, one for each of the two rows
of a call: the student's, and the teacher's with its prompt."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.kit.builders import call
from tests.kit.examples import grid
from tests.training.configured import changed, training
from tests.training.lora import change_adapter, wrapped
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import DistillAdvantage
from tuner.errors import TrainingError
from tuner.training.batch import Selection, build_batch
from tuner.training.trainer import PolicyTrainer

SETTINGS = training(
    total_steps=10,
    lr=1e-2,
    advantage="prompt_distill",
    advantage_args=DistillAdvantage(kl_coef=0.5),
    kl="none",
    grad_clip=1e9,
    max_tokens_per_micro_batch=64,
)
ANY_REWARD = Selection(needs_group=False, needs_reward=False)
PROMPT = tuple(range(7, 16))


def taught(one):
    """The head of every prompt, its first token, is exchanged."""
    return PROMPT + one.prompt_ids[1:]


def talks(seed):
    """Rollouts of one to three turns, each going on from the one before, with log-probs near the
    model's; some of them hot, some of them masked in the middle."""
    traces, generator = [], torch.Generator().manual_seed(seed)
    model = tiny_model()
    for trace in random_batch(seed):
        calls, ids = [], ()
        for one in trace.calls:
            prompt = (1, *ids, *one.prompt_ids)
            heat = 0.7 if len(calls) == 1 else 1.0
            with torch.no_grad():
                logits = model(torch.tensor([prompt + one.completion_ids])).logits[0] / heat
            logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            logp = logp.gather(1, torch.tensor(one.completion_ids)[:, None])[:, 0]
            logp = logp + 0.1 * torch.randn(len(logp), generator=generator)
            made = call(one.id, prompt, one.completion_ids, logp.tolist(), temperature=heat)
            masked = ((1, 2),) if len(one.completion_ids) > 3 else ()
            calls.append(replace(made, masked=masked))
            ids = prompt[1:] + one.completion_ids
        traces.append(replace(trace, calls=tuple(calls), reward=None))
    return traces


def plain_logp(model, prompt, one):
    ids = torch.tensor([prompt + one.completion_ids])
    logits = model(ids).logits[0] / one.sampling.temperature
    place = torch.tensor(one.completion_ids)[:, None]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, place)[:, 0]


def wanted(student, teacher, traces):
    """Gradient of the trained parameters, and the mean of `student - teacher`."""
    total, distances = 0.0, []
    for one in (one for trace in traces for one in trace.calls):
        kept = torch.ones(len(one.completion_ids), dtype=torch.bool)
        for start, stop in one.masked:
            kept[start:stop] = False
        with torch.no_grad():
            opinion = plain_logp(teacher, taught(one), one)
        old = torch.tensor(one.logprobs, dtype=opinion.dtype)
        advantage = 0.5 * (opinion - old)
        ratio = (plain_logp(student, one.prompt_ids, one) - old).exp()
        loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        bounded = torch.minimum(loss, -advantage * 3.0)
        total = total + torch.where(advantage < 0, bounded, loss)[kept].sum()
        distances.append((old - opinion)[kept])
    (total / sum(map(len, distances))).backward()
    return gradient(student), float(torch.cat(distances).mean())


def gradient(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])


def found(trainer, traces):
    """What an update hands to the optimizer, and what it reports."""
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient(trainer.model))
    batch = build_batch(traces, selection=ANY_REWARD, teacher_prompt=taught)
    metrics = trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
    return gradients[0], metrics


def error(one, other):
    return float((one - other).norm() / other.norm())


@grid("lora", [False, True], quick=1, ids=["whole", "lora"])
@pytest.mark.parametrize("teacher", ["start", "policy"])
@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_the_gradient_is_that_of_two_plain_passes_for_each_call(layout, teacher, lora):
    """The policy has moved away from its start, so the two teachers differ."""
    start = tiny_model()
    model = wrapped(copy.deepcopy(start), new=True) if lora else copy.deepcopy(start)
    reference = None if lora else start
    settings = changed(SETTINGS, layout=layout, prompt_teacher=teacher)
    trainer = PolicyTrainer(model, settings, reference=reference)
    if lora:
        change_adapter(model)
    else:
        model.load_state_dict(tiny_model(seed=3).state_dict())
    exact = copy.deepcopy(model)
    traces = talks(1)
    reads = start if teacher == "start" else copy.deepcopy(exact)
    expected, distance = wanted(exact, reads, traces)
    got, metrics = found(trainer, traces)
    assert error(got, expected) < 1e-5
    assert metrics["kl_teacher"] == pytest.approx(distance, rel=1e-5)


def test_the_start_costs_no_further_pass_where_there_is_no_kl_term():
    trainer = PolicyTrainer(tiny_model(), SETTINGS)
    batch = build_batch(talks(2), selection=ANY_REWARD, teacher_prompt=taught)
    scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
    assert trainer.reference is not None
    assert scored.ref_logp is None
    policy = PolicyTrainer(tiny_model(), changed(SETTINGS, prompt_teacher="policy"))
    assert policy.reference is None


def test_calls_without_a_teachers_prompt_are_dropped_and_counted_by_reason():
    traces = talks(3)
    calls = [one for trace in traces for one in trace.calls]
    reasons = dict(zip((one.id for one in calls), ("", "a", "b") * len(calls), strict=False))

    def some(one):
        return reasons[one.id] or taught(one)

    batch = build_batch(traces, selection=ANY_REWARD, teacher_prompt=some)
    lost = {
        why: sum(len(one.completion_ids) for one in calls if reasons[one.id] == why) for why in "ab"
    }
    assert {why: batch.dropped_tokens[why] for why in "ab"} == lost
    assert all(lost.values())
    assert batch.sampled_tokens == batch.trained_tokens + sum(batch.dropped_tokens.values())
    # What is not trained in any case is counted by that.
    traces = [
        replace(trace, calls=tuple(replace(one, excluded=True) for one in trace.calls))
        for trace in traces
    ]
    batch = build_batch(traces, selection=ANY_REWARD, teacher_prompt=some)
    assert batch.dropped_tokens == {"excluded_call": batch.sampled_tokens}


def test_the_teacher_reads_of_a_masked_call_what_it_sampled_before():
    one = replace(call("a", (1, 2), (3, 4, 5, 6), (-1.0,) * 4), masked=((1, 3),))
    trace = replace(talks(4)[0], calls=(one,))
    first, last = build_batch([trace], selection=ANY_REWARD, teacher_prompt=taught).rows
    assert (first.teacher_prompt_ids, last.teacher_prompt_ids) == (
        (*PROMPT, 2),
        (*PROMPT, 2, 3, 4, 5),
    )
    assert last.of_teacher == replace(last, prompt_ids=(*PROMPT, 2, 3, 4, 5))


def test_rows_without_a_teachers_prompt_are_not_trained_against_the_student_itself():
    trainer = PolicyTrainer(tiny_model(), SETTINGS)
    with pytest.raises(TrainingError, match="the teacher's prompt of each call"):
        trainer.compute_advantages(build_batch(talks(5), selection=ANY_REWARD))
