"""Rewards of turns in groups whose rollouts have different numbers of them, and their discount."""

from dataclasses import replace

import pytest
import torch

from tests.areal.queue_agents import GCONFIG, Counting, trajectory
from tests.areal.test_updates import rewarded_by_call
from tests.training.configured import training
from tuner.areal import Agent, AgentWorkflow, GRPOConfig, QueueWorkflow
from tuner.errors import ConfigError, TrainingError
from tuner.traces import Outcome
from tuner.training.batch import Selection, build_batch
from tuner.training.scoring import critic_advantages, row_advantages
from tuner.tune import prepare

LONE = Selection(lone_rewards=True)
RETURNS = [[1.0], [0.25, 0.5, 1.0], [0.0, 0.0, 0.0]]  # of [1], [0, 0, 1] and [0, 0, 0] at 0.5


class Tries(Agent):
    """As many turns as the task has rewards, each with its own."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        ids, found = prompt.data["packed_prompts"].tolist(), []
        for reward in prompt.metadata["task"]["rewards"]:
            await obs_queue.put((prompt.ids[0], ids, GCONFIG))
            act = await act_queue.get()
            found.append(trajectory(act, reward=reward))
            ids = act.seqs[0] + [50]
        return found


@pytest.fixture
def collect(run):
    """The traces of one group, a rollout for each list of rewards."""

    async def collect(rewards):
        workflow, traces = QueueWorkflow(Tries(), Counting), []
        for rollout, mine in enumerate(rewards):
            task = {"input_ids": [40, 41], "rewards": mine}
            traces += await run(workflow, task, rollout=rollout)
        return traces

    return collect


def with_last_reward_alone(traces):
    """The same samples of a workflow that gives a rollout one reward, that of its last turn."""
    last = [trace.task["rewards"][-1] for trace in traces]
    return [
        replace(
            trace,
            reward=reward,
            calls=tuple(replace(call, reward=None, gained=None) for call in trace.calls),
        )
        for trace, reward in zip(traces, last, strict=True)
    ]


def advantages(batch, **settings):
    found = row_advantages(batch, training(total_steps=1, **settings))
    return torch.cat(found)


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
async def test_a_rollout_with_one_turn_has_the_baseline_of_those_with_several(collect, advantage):
    traces = await collect(RETURNS)
    assert [len(trace.calls) for trace in traces] == [1, 3, 3]
    batch = build_batch(traces)
    assert batch.dropped_tokens == {}
    discounted = build_batch(with_last_reward_alone(traces), selection=LONE)
    torch.testing.assert_close(
        advantages(batch, advantage=advantage),
        advantages(discounted, advantage=advantage, turn_discount=0.5),
    )


async def test_turns_can_be_compared_with_a_rollout_of_one_turn_alone(collect):
    batch = build_batch(await collect(RETURNS[:2]))
    assert batch.dropped_tokens == {}
    assert [row.reward for row in batch.rows] == [1.0, 0.25, 0.5, 1.0]
    assert {row.peers for row in batch.rows} == {0}


async def test_rollouts_of_one_turn_each_are_compared_as_any_others(collect):
    traces = await collect([[1.0], [0.0]])
    assert all(row.reward is None for row in build_batch(traces).rows)
    best = build_batch(traces, selection=Selection(best_only=True))
    assert best.dropped_rollouts == {"not_best_of_group": 1}
    with pytest.raises(TrainingError, match="cannot use rewards of single calls"):
        build_batch(await collect(RETURNS), selection=Selection(best_only=True))


async def test_the_trainers_discount_takes_a_turns_reward_once(collect):
    """Turns with the rewards of their own, and what the rollout gains is not added to them."""
    traces = await collect([[1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    plain = build_batch(with_last_reward_alone(traces), selection=LONE)
    batch = build_batch(traces, selection=LONE)
    torch.testing.assert_close(
        advantages(batch, turn_discount=0.5), advantages(plain, turn_discount=0.5)
    )
    settings = training(total_steps=1, advantage="ppo")
    values = [torch.full((len(row.completion_ids),), 0.25) for row in batch.rows]
    for mine, theirs in zip(
        critic_advantages(batch, settings, values),
        critic_advantages(plain, settings, values),
        strict=True,
    ):
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs))


async def test_a_failed_rollouts_penalty_is_compared_with_turns_too(collect):
    traces = await collect(RETURNS[1:])
    failed = replace(with_last_reward_alone(traces)[1], outcome=Outcome.TIMEOUT, reward=None)
    batch = build_batch([traces[0], failed], penalty=-1.0)
    assert [row.reward for row in batch.rows] == [0.25, 0.5, 1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("algorithm", "mend"),
    [("ppo", "set algorithm.advantage_fn_args.gamma"), ("raft", "remove it")],
)
def test_a_discount_that_cannot_apply_is_refused(algorithm, mend):
    config = GRPOConfig(turn_discount=0.5, tuner={"algorithm": {"algorithm_type": algorithm}})
    with pytest.raises(ConfigError, match=rf"turn_discount is 0\.5, but .*: {mend}"):
        config.run_config()


def test_two_discounts_are_refused(make_loop, tmp_path):
    agent = AgentWorkflow(rewarded_by_call(), turn_discount=0.9)
    _, rollout = make_loop(turn_discount=0.5)
    with pytest.raises(ConfigError, match=r"turn_discount 0\.9, but the run also .* 0\.5"):
        rollout.rollout_batch([{}], agent, group_size=2)
    with pytest.raises(ConfigError, match=r"turn_discount 0\.9, but the run also .* 0\.5"):
        prepare(agent, None, [{"a": 1}] * 8, overrides=["tuner.algorithm.turn_discount=0.5"])
