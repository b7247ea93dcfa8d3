"""Updates of the loop in the open: the very ones that `tune()` makes."""

from itertools import count

import pytest
import torch

from tests.areal.loop import GCONFIG, ROWS, Random, Turns, step
from tests.areal.test_agents import Conversation
from tests.areal.test_tokens import TwoTurns
from tests.kit.examples import grid
from tuner.errors import TrainingError
from tuner.runs.stack import build_trainer, selection
from tuner.tasks.functions import WorkflowOutput
from tuner.training.batch import build_batch


class Mixed(TwoTurns):
    """Two turns, a token of one of them masked, and rewards that differ."""

    def __init__(self):
        super().__init__(self.spoil, gconfig=GCONFIG.new(temperature=0.8))
        self.count = 0

    def spoil(self, tensors, responses):
        self.count += 1
        mask = tensors["loss_mask"].clone()
        mask[0, 4 if self.count % 2 else 11] = 0
        return tensors | {"loss_mask": mask, "rewards": torch.tensor([float(self.count)])}


def trained(actor):
    """Copies of all weights that an actor's updates change."""
    state = dict(actor._run.stack.model.state_dict())
    if actor.trainer.critic is not None:
        state |= {f"critic.{k}": v for k, v in actor.trainer.critic.model.state_dict().items()}
    return {name: weights.clone() for name, weights in state.items()}


def check_same_update(loop, workflow, group_size=3):
    """Two steps of the loop, and two of the trainer that `tune()` has on the same traces."""
    actor, rollout = loop
    config, stack, workflow = actor._run.config, actor._run.stack, workflow()
    start = {name: weights.clone() for name, weights in stack.model.state_dict().items()}
    steps = []
    for _ in range(2):
        batch = rollout.rollout_batch(ROWS[:2], workflow, group_size=group_size)
        steps.append(list(batch.traces))
        step(actor, batch)
    mine = trained(actor)
    stack.model.load_state_dict(start)
    actor._trainer = trainer = build_trainer(config, stack, total_steps=4)
    for traces in steps:
        direct = build_batch(traces, selection=selection(config))
        scored = trainer.compute_ref_logp(trainer.compute_advantages(direct))
        trainer.ppo_update(scored)
        trainer.step_lr_scheduler()
    assert any(not torch.equal(mine[name], start[name]) for name in start)
    for name, weights in trained(actor).items():
        torch.testing.assert_close(weights, mine[name], atol=1e-6, rtol=0)


def test_the_loop_makes_the_very_update_that_traces_make(make_loop):
    """Several turns, masks, rewards of calls: one path of numbers from samples to weights."""
    check_same_update(make_loop(), Mixed)


async def function(task, model):
    """Two turns, a sub-agent between them, and a reward for the first turn alone."""
    ids = [40, 41]
    for turn in range(2):
        answer = await model.client.completions.create(
            model=model.model_name,
            prompt=ids,
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )
        sampled = list(answer.choices[0].token_ids)
        ids = ids + sampled + [50]
        if turn == 0:
            model.calls[-1].reward = 0.25 * (sampled[0] % 3)
            await model([{"role": "user", "content": "hi"}], max_tokens=3)
    return WorkflowOutput(reward=float(sampled[0] % 5))


def rewarded_by_call():
    numbers = count()
    return Conversation(
        lambda first, beside, second, third: {third: next(numbers) % 3 / 2, first: 0.25}
    )


PPO = {"algorithm": {"algorithm_type": "ppo"}, "tuner": {"critic": {"lr": 0.01}}}
BIASED = {**PPO, "tuner": {**PPO["tuner"], "algorithm": {"reward_scale": 2.0, "reward_bias": -0.5}}}
LORA = {"model": {"lora_configs": [{"lora_rank": 2}]}}
TURNS = {"turn_discount": 0.5}
SEQUENCES = {"tuner": {"algorithm": {"loss_agg_mode": "seq-mean-token-mean"}}}


@grid(
    "settings, workflow, group_size",
    [
        ({"tuner": PPO}, Mixed, 2),
        ({"tuner": PPO}, Turns, 1),
        ({"tuner": BIASED}, lambda: function, 2),
        ({"tuner": LORA}, Mixed, 3),
        ({}, Turns, 3),
        (SEQUENCES, Mixed, 3),
        (TURNS, Turns, 3),
        (TURNS, Mixed, 3),
        (TURNS, lambda: function, 3),
        (TURNS, rewarded_by_call, 2),
    ],
    quick=4,
    ids=[
        "ppo",
        "ppo-turns",
        "ppo-calls",
        "lora",
        "rewards-of-turns",
        "sequences",
        "discount",
        "discount-masks",
        "discount-calls",
        "discount-agent",
    ],
)
def test_critic_adapter_and_discount_are_as_in_tune(make_loop, settings, workflow, group_size):
    check_same_update(make_loop(**settings), workflow, group_size)


def test_an_adapters_distance_to_its_start_is_charged(make_loop):
    loop = make_loop(tuner={**LORA, "algorithm": {"kl_loss_fn": "k2"}})
    check_same_update(loop, Random)
    assert not hasattr(loop[0].trainer.reference, "state_dict")  # no second model


def test_a_critic_needs_its_values(make_loop):
    actor, rollout = make_loop(tuner=PPO)
    batch = rollout.rollout_batch(ROWS[:2], Random())
    batch["advantages"] = torch.ones(batch["input_ids"].shape)
    with pytest.raises(TrainingError, match=r"has no values, returns: call actor\.compute_adv"):
        actor.ppo_update(batch)


def test_metrics_of_an_update_say_where_every_sampled_token_went(make_loop):
    actor, rollout = make_loop()

    class SomeFail(Random):
        async def arun_episode(self, engine, data):
            number = len(self.seen) + 1
            tensors = await super().arun_episode(engine, data)
            match number:
                case 1:
                    raise ConnectionError("the search server is gone")
                case 2:
                    return None
            return tensors

    batch = rollout.rollout_batch(ROWS[:2], SomeFail(), group_size=4)
    batch["loss_mask"][0, 4] = 0
    metrics = step(actor, batch)
    assert batch.account.outcomes == {"completed": 6, "rejected": 1, "workflow_error": 1}
    assert "ConnectionError: the search server is gone" in batch.account.errors[0]
    dropped = {k: v for k, v in metrics.items() if k.startswith("tokens/dropped/")}
    assert dropped == {
        "tokens/dropped/masked": 1.0,
        "tokens/dropped/rejected": 5.0,
        "tokens/dropped/workflow_error": 5.0,
    }
    assert metrics["tokens/sampled"] == metrics["tokens/trained"] + sum(dropped.values()) == 40


def test_given_log_probs_are_the_policy_that_ratios_are_taken_to(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=3)
    actor.compute_advantages(batch)
    mask = batch["loss_mask"].bool()
    batch["prox_logp"] = actor.compute_logp(batch) - 0.5 * mask
    metrics = actor.ppo_update(batch)
    assert metrics["ratio_mean"] == pytest.approx(torch.e**0.5, rel=1e-4)


def test_advantages_may_be_the_users_own(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    batch["advantages"] = torch.full(batch["input_ids"].shape, 2.0)
    assert actor.ppo_update(batch)["advantage_max"] == 2.0


class Ranked(Random):
    """No two answers have one reward, so every step has advantages."""

    async def arun_episode(self, engine, data):
        place = float(len(self.seen))
        return await super().arun_episode(engine, data) | {"rewards": torch.tensor([place])}


def test_kl_is_taken_off_the_rewards_where_it_is_asked_for(make_loop):
    config_kl = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}}
    actor, rollout = make_loop(tuner={"algorithm": config_kl})
    workflow = Ranked()
    for _ in range(2):  # the reference is the policy itself until the first update
        batch = rollout.rollout_batch(ROWS[:2], workflow, group_size=2)
        metrics = step(actor, batch)
    assert not torch.allclose(batch["ref_logp"], batch["logprobs"], atol=1e-3)
    assert metrics["tokens/trained"] == 20
