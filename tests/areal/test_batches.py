"""Batches of the loop in the open: what is in them, what is compared, what is left out."""

from dataclasses import replace

import pytest
import torch

from tests.areal.loop import GCONFIG, ROWS, Random
from tests.areal.test_tokens import PROMPT, single
from tests.kit.builders import call, trace
from tuner.areal import ModelRequest
from tuner.areal.group_rows import group_of
from tuner.areal.trajectory_batch import to_batch
from tuner.engines import SamplingParams
from tuner.errors import TrainingError
from tuner.tasks.functions import WorkflowOutput
from tuner.training.batch import Selection


def test_a_batch_has_what_was_sampled_and_says_which_rollouts_are_compared(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(
        ROWS[:3], Random(gconfig=GCONFIG.new(temperature=0.7, top_k=9, top_p=0.8)), group_size=2
    )
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["rollout_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    calls = [one.calls[0] for one in batch.traces]
    for row, sampled in enumerate(calls):
        mask = batch["loss_mask"][row].bool()
        assert batch["input_ids"][row][mask].tolist() == list(sampled.completion_ids)
        assert batch["logprobs"][row][mask].tolist() == pytest.approx(list(sampled.logprobs))
        assert set(batch["versions"][row][~mask].tolist()) == {-1}
        assert set(batch["versions"][row][mask].tolist()) == {0}
    logp = actor.compute_logp(batch)
    torch.testing.assert_close(logp, batch["logprobs"], atol=1e-5, rtol=0)
    assert batch.account.sampled == int(batch["loss_mask"].sum())
    found, _ = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert [row.kept for row in found.rows] == [one.kept for one in calls]
    assert all(all(one.kept) for one in calls)


def test_one_failing_rollout_does_not_take_its_group_along(make_loop):
    _, rollout = make_loop()

    class FirstFails(Random):
        async def arun_episode(self, engine, data):
            self.seen.append(1)
            if len(self.seen) == 1:
                raise ValueError("no")
            return single(await engine.agenerate(ModelRequest(PROMPT, GCONFIG)), 1)

    batch = rollout.rollout_batch(ROWS[:1], FirstFails(), group_size=3)
    assert batch["rewards"].tolist() == [1.0, 1.0]


def test_a_users_own_group_is_compared_as_one(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(group=3))
    assert batch["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["rollout_ids"].tolist() == list(range(6))
    actor.compute_advantages(batch)
    for rows in (slice(0, 3), slice(3, 6)):
        rewards, advantages = batch["rewards"][rows], batch["advantages"][rows][:, 3]
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(advantages, wanted, atol=1e-4, rtol=0)


def test_a_group_of_one_is_left_out_and_counted(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random())
    with pytest.raises(TrainingError, match=r"10 tokens were sampled and dropped .*group_of_one"):
        actor.compute_advantages(batch)


def test_trajectories_of_one_rollout_are_compared_by_their_own_rewards(make_loop):
    _actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:1], Random(group=2), group_size=2)
    assert batch["rollout_ids"].tolist() == [0, 0, 1, 1]
    batch["rewards"] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    found, _ = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert [row.reward for row in found.rows] == [0.0, 1.0, 2.0, 3.0]
    assert {row.peers for row in found.rows} == {0}
    batch["rewards"] = torch.tensor([1.0, 1.0, 3.0, 3.0])
    found, _ = to_batch(batch, Selection(scale=2.0, bias=-1.0), SamplingParams(max_tokens=1))
    assert [row.reward for row in found.rows] == [None] * 4
    assert found.rewards_R.tolist() == [0.0, 4.0]


def test_each_row_is_of_one_call(make_loop):
    _actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:1], Random(), group_size=2)
    batch["calls"][:, 5:] = 1  # as if an answer followed the first without an observation
    found, places = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert [(place.row, place.start) for place in places] == [(0, 3), (0, 5), (1, 3), (1, 5)]
    assert found.call_N.tolist() == [0, 1, 2, 3]
    batch["loss_mask"][:, 6] = 0
    found, places = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert found.call_N.tolist() == [0, 1, 1, 2, 3, 3]
    del batch["calls"]
    found, places = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert [place.start for place in places] == [3, 7, 3, 7]


def test_filters_leave_groups_out_and_count_them(make_loop):
    _, rollout = make_loop(success_rate_ub=0.9)

    class Easy(Random):
        async def arun_episode(self, engine, data):
            tensors = await super().arun_episode(engine, data)
            return tensors | {"rewards": torch.tensor([1.0 if data["n"] == 0 else 0.0])}

    batch = rollout.rollout_batch(ROWS[:3], Easy(), group_size=2)
    assert batch.account.outcomes == {"completed": 6, "success_rate_too_high": 2}
    assert batch.account.dropped == {"success_rate_too_high": 10}
    assert batch["group_ids"].tolist() == [1, 1, 2, 2]
    with pytest.raises(TrainingError, match="4 completed, 4 not_accepted"):
        rollout.rollout_batch(
            ROWS[1:3], Easy(), group_size=2, should_accept_fn=lambda t: bool(t["rewards"].sum() > 0)
        )


def test_workflow_functions_and_their_rewards_of_calls_become_trajectories(make_loop):
    actor, rollout = make_loop()

    async def chat(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages, max_tokens=4
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        if task["n"]:
            model.calls[0].reward = 0.25
        return WorkflowOutput(reward=1.0)

    batch = rollout.rollout_batch(ROWS[:2], chat, group_size=2)
    found = set(zip(batch["rollout_ids"].tolist(), batch["rewards"].tolist(), strict=True))
    assert found == {(0, 1.0), (1, 1.0), (2, 0.25), (2, 1.0), (3, 0.25), (3, 1.0)}
    assert int(batch["loss_mask"].sum()) == batch.account.sampled
    torch.testing.assert_close(actor.compute_logp(batch), batch["logprobs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("group_ids"), "has no group_ids; use batches from"),
        (lambda b: b.update(prox_logp=b["logprobs"][:, 1:]), "prox_logp has the shape"),
        (lambda b: b.update(loss_mask=torch.ones_like(b["loss_mask"])), "a token is trained once"),
        (lambda b: b.pop("advantages"), "call actor.compute_advantages"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(make_loop, change, message):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    batch["advantages"] = torch.ones(batch["input_ids"].shape)
    change(batch)
    with pytest.raises(TrainingError, match=message):
        actor.ppo_update(batch)
    rollout.rollout_batch(ROWS[:1], Random(), group_size=2)  # nothing was held


def test_attempts_that_were_tried_again_are_counted(make_loop):
    _, rollout = make_loop(tuner={"explorer": {"max_retry_times": 1}})

    class Flaky(Random):
        async def arun_episode(self, engine, data):
            number = len(self.seen) + 1
            tensors = await super().arun_episode(engine, data)
            if number == 1:
                raise ConnectionError("once")
            return tensors

    batch = rollout.rollout_batch(ROWS[:1], Flaky(), group_size=2)
    assert batch.account.dropped == {"retried_attempt": 5}
    assert batch.account.sampled == 15


def test_a_rollout_without_a_trained_token_has_no_vote():
    calls = [call(str(n), [1], [2, 3], [-1.0] * 2) for n in range(3)]
    calls[2] = replace(calls[2], excluded=True)
    rollouts = [
        [trace(0, n, [c], reward=r)]
        for n, (c, r) in enumerate(zip(calls, (0, 1, 100), strict=True))
    ]
    group = group_of(rollouts, {}, Selection(best_only=True))
    assert group.tensors is not None
    assert group.tensors["rollout_ids"].tolist() == [1]
    assert group.account.dropped == {"excluded_call": 2, "not_best_of_group": 2}
    assert group.account.outcomes == {"completed": 3, "excluded_call": 1, "not_best_of_group": 1}


def test_greedy_rollouts_are_an_evaluation_whose_rewards_are_in_the_batch(make_loop):
    _, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(gconfig=GCONFIG.new(greedy=True)))
    assert batch["rewards"].shape == (2,)
    assert not batch["loss_mask"].any()
    assert batch.account.outcomes == {"completed": 2, "greedy_call": 2}
    found, _ = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert found.rows == ()


def test_a_rollout_that_the_user_masked_has_no_vote(make_loop):
    _, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:1], Random(), group_size=3)
    batch["rewards"] = torch.tensor([0.0, 1.0, 100.0])
    batch["loss_mask"][2] = 0
    found, _ = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert found.rewards_R.tolist() == [0.0, 1.0]
    assert found.sampled_tokens == found.trained_tokens + found.dropped_tokens["masked"]
