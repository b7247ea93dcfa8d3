"""What Trinity-RFT computes from our experiences is what our own trainer computes from the traces.

Trinity-RFT's own advantage and policy loss, over the experiences that a run would hand over; the
model's log-probs are computed here, as its trainers do, from the experiences' tokens.
"""

import copy
import dataclasses
import functools
import itertools
import random

import pytest
import torch
from trinity.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

from tests.kit.builders import call, trace
from tests.training.configured import training
from tests.training.exact import all_float64
from tests.training.test_trainer import VOCABULARY, gradient_of, tiny_model
from tuner.config.algorithms import GiGPOAdvantage, GRPOAdvantage, KLLoss
from tuner.runs.metrics import state_metrics
from tuner.training.batch import Selection, build_batch, unreplayed
from tuner.training.trainer import PolicyTrainer
from tuner.trinity.experience import merged, one_per_call
from tuner.trinity.plugins import CallRewards
from tuner.trinity.workflow import _add_states, _experience

TURNS = 6


def conversations(seed):
    """2 groups of 3 rollouts of a tool agent: 6 turns, each of which continues the one before."""
    rng = random.Random(seed)
    model = tiny_model()
    traces = []
    for task in range(2):
        opening = [rng.randrange(VOCABULARY) for _ in range(8)]
        for rollout in range(3):
            calls, history = [], list(opening)
            for turn in range(TURNS):
                answer = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
                with torch.no_grad():
                    logits = model(torch.tensor([history + answer])).logits[0]
                logp = logits.log_softmax(-1)[len(history) - 1 : -1]
                exact = logp.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
                logprobs = [value + rng.gauss(0, 0.2) for value in exact]
                calls.append(call(f"{task}{rollout}{turn}", history, answer, logprobs))
                history = history + answer + [rng.randrange(VOCABULARY) for _ in range(3)]
            traces.append(trace(task, rollout, calls, reward=rng.random()))
    return traces


def experiences_of(traces, make):
    found = []
    for one in traces:
        for step, sequence in enumerate(make(one.calls)):
            experience = _experience(one, sequence, step, reward=one.reward)
            experience.eid.batch, experience.eid.task = 1, one.id.task
            found.append(experience)
    return found


def trinitys_gradient(model, experiences, advantage=StepWiseGRPOAdvantageFn):
    experiences, _ = advantage().process(experiences)
    width = max(len(e.tokens) - e.prompt_length for e in experiences)
    size = (len(experiences), width)
    old, new = torch.zeros(size, dtype=torch.float64), []
    advantages, mask = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.bool)
    for row, e in enumerate(experiences):
        start, length = e.prompt_length, len(e.tokens) - e.prompt_length
        old[row, :length], mask[row, :length] = e.logprobs.double(), e.action_mask
        advantages[row, :length] = e.advantages.double()
        tokens = e.tokens.long()
        logp = model(tokens[None]).logits[0].log_softmax(-1)[start - 1 : -1]
        taken = logp.gather(1, tokens[start:, None])[:, 0]
        new.append(torch.nn.functional.pad(taken, (0, width - length)))
    loss, _ = PPOPolicyLossFn(**PPOPolicyLossFn.default_args())(
        torch.stack(new), old, mask, advantages
    )
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("seed", [0, 1])
def test_merged_and_single_calls_give_the_gradient_of_our_own_trainer(seed):
    traces = conversations(seed)
    model = all_float64(tiny_model())
    settings = training(
        total_steps=1, kl_args=KLLoss(kl_coef=0.0), grad_clip=1e9, max_tokens_per_micro_batch=4096
    )
    trained = copy.deepcopy(model)
    _, ours = gradient_of(trained, PolicyTrainer(trained, settings), traces)
    assert ours.norm() > 0
    for make in (merged, one_per_call):
        theirs = trinitys_gradient(model, experiences_of(traces, make))
        # Experiences carry log-probs and advantages as float32.
        assert (theirs - ours).norm() / ours.norm() < 1e-5


def with_call_rewards(traces, seed):
    """Every second call of two roles gets a reward of its own; one role has it in one rollout."""
    rng = random.Random(seed)
    changed = []
    for number, one in enumerate(traces):
        calls = [
            dataclasses.replace(
                c,
                role="planner" if turn % 2 else "lonely" if turn == 4 else "solver",
                reward=rng.random() if turn % 2 or turn == 2 or (turn, number) == (4, 0) else None,
                excluded=turn == 5 and number == 1,
                masked=((0, 1),) if turn == 3 else (),
            )
            for turn, c in enumerate(one.calls)
        ]
        changed.append(dataclasses.replace(one, calls=tuple(calls)))
    return changed


@pytest.mark.parametrize("std_threshold", [None, 10.0])
def test_rewards_exclusions_and_masks_of_single_calls_give_our_own_gradient(std_threshold):
    traces = with_call_rewards(conversations(3), 7)
    model = all_float64(tiny_model())
    settings = training(
        total_steps=1, kl_args=KLLoss(kl_coef=0.0), grad_clip=1e9,
        max_tokens_per_micro_batch=4096, advantage_args=GRPOAdvantage(std_threshold=std_threshold),
    )  # fmt: skip
    trained = copy.deepcopy(model)
    _, ours = gradient_of(trained, PolicyTrainer(trained, settings), traces)
    assert ours.norm() > 0
    kept = [
        dataclasses.replace(one, calls=tuple(c for c in one.calls if unreplayed(c) is None))
        for one in traces
    ]
    advantage = functools.partial(CallRewards, std_threshold=std_threshold)
    for make in (merged, one_per_call):
        theirs = trinitys_gradient(model, experiences_of(kept, make), advantage)
        if std_threshold is not None:  # Trinity-RFT's mean is over what the threshold leaves
            theirs *= ours.norm() / theirs.norm()
        assert (theirs - ours).norm() / ours.norm() < 1e-5


@pytest.mark.parametrize("fnorm", ["none", "std"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_gigpo_is_trinitys_own_function(gamma, fnorm):
    args = {"omega": 0.7, "gamma": gamma, "fnorm": fnorm, "epsilon": 1e-3}
    for seed in range(30):
        traces = with_states(seed)
        settings = training(total_steps=1, advantage="gigpo", advantage_args=GiGPOAdvantage(**args))
        batch = build_batch(traces, selection=Selection(lone_rewards=True))
        trainer = PolicyTrainer(tiny_model(), settings)
        values = trainer.compute_advantages(batch).advantages_N.tolist()
        ours = {row.call_id: value for row, value in zip(batch.rows, values, strict=True)}
        experiences = experiences_of(traces, one_per_call)
        for one in traces:
            own = [e for e in experiences if e.info["rollout"] == str(one.id)]
            _add_states(own, one, one.reward)
        found, metrics = GiGPOAdvantageFn(**args).process(experiences)
        theirs = {e.info["calls"][0]: float(e.advantages[e.action_mask][0]) for e in found}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert state_metrics(batch)["states/count"] == metrics["gigpo/anchor_groups_total"]


def with_states(seed):
    """Two tasks whose rollouts visit few states, named or not, in one role or another."""
    rng = random.Random(seed)
    traces = []
    for task, rollout in itertools.product(range(2), range(3)):
        said = rng.choice([None, "reward", "gained"])
        calls = []
        for turn in range(rng.randint(1, 5)):
            fields = {"role": rng.choice([None, "other"]), "state": rng.choice([None, "a", "b"])}
            if said is not None and rng.random() < 0.6:
                fields[said] = rng.random()
            one = call(f"{task}{rollout}{turn}", [rng.randint(1, 3)], [1, 2], [-1.0, -1.0])
            calls.append(dataclasses.replace(one, **fields))
        traces.append(trace(task, rollout, calls, reward=rng.random()))
    return traces


def test_without_rewards_of_calls_trinitys_own_function_is_what_it_was():
    traces = conversations(5)
    given = [experiences_of(traces, merged) for _ in range(2)]
    (ours, _), (theirs, _) = (
        CallRewards().process(given[0]),
        StepWiseGRPOAdvantageFn().process(given[1]),
    )
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.eid.rid, mine.eid.step) == (other.eid.rid, other.eid.step)
        assert torch.equal(mine.advantages, other.advantages)
        assert torch.equal(mine.action_mask, other.action_mask)


def test_merging_six_turns_trains_a_third_of_the_tokens_or_less():
    traces = conversations(0)
    tokens = {
        make: sum(len(e.tokens) for e in experiences_of(traces, make))
        for make in (merged, one_per_call)
    }
    assert tokens[one_per_call] / tokens[merged] > 3
