"""Updates of the loop in the open: the very ones that `tune()` makes."""

import pytest
import torch

from tests.areal.loop import GCONFIG, ROWS, Random, step
from tests.areal.test_tokens import TwoTurns
from tuner.errors import ConfigError
from tuner.training import PolicyTrainer, build_batch


def test_the_loop_makes_the_very_update_that_traces_make(make_loop, random_parts):
    """Several turns, masks, rewards of calls: one path of numbers from samples to weights."""

    class Mixed(TwoTurns):
        def __init__(self):
            super().__init__(self.spoil, gconfig=GCONFIG.new(temperature=0.8))
            self.count = 0

        def spoil(self, tensors, responses):
            self.count += 1
            mask = tensors["loss_mask"].clone()
            mask[0, 4 if self.count % 2 else 11] = 0
            return tensors | {"loss_mask": mask, "rewards": torch.tensor([float(self.count)])}

    actor, rollout = make_loop()
    before = {k: v.clone() for k, v in actor._run.stack.model.state_dict().items()}
    batch = rollout.rollout_batch(ROWS[:2], Mixed(), group_size=3)
    direct = build_batch(list(batch.traces))
    step(actor, batch)
    mine = {k: v.clone() for k, v in actor._run.stack.model.state_dict().items()}
    actor._run.stack.model.load_state_dict(before)
    trainer = PolicyTrainer(actor._run.stack.model, actor.trainer.settings)
    trainer.ppo_update(trainer.compute_advantages(direct))
    assert any(not torch.equal(mine[k], before[k]) for k in mine)
    for name, weights in trainer.model.state_dict().items():
        torch.testing.assert_close(weights, mine[name], atol=1e-6, rtol=0)


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


def test_kl_is_taken_off_the_rewards_where_it_is_asked_for(make_loop):
    config_kl = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}}
    actor, rollout = make_loop(tuner={"algorithm": config_kl})
    for _ in range(2):  # the reference is the policy itself until the first update
        batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
        metrics = step(actor, batch)
    assert not torch.allclose(batch["ref_logp"], batch["logprobs"], atol=1e-3)
    assert metrics["tokens/trained"] == 20


@pytest.mark.parametrize(
    ("tuner", "named"),
    [
        ({"algorithm": {"algorithm_type": "ppo"}}, "whose critic the loop in the open does not"),
        ({"model": {"lora_configs": [{"lora_rank": 2}]}}, "model.lora_configs is set"),
    ],
)
def test_what_only_tune_trains_is_refused(make_loop, tuner, named):
    with pytest.raises(ConfigError, match=named):
        make_loop(tuner=tuner)
