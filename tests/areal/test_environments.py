"""Environments of queue agents: whose they are, how they fail, gymnasium's."""

import asyncio

import pytest

from tests.areal.queue_agents import GCONFIG, TASK, Counting, Once, trajectory
from tests.kit.clock import jump
from tuner.areal import (
    Agent,
    EnvironmentService,
    EnvServiceAbstraction,
    GymnasiumEnvironment,
    QueueWorkflow,
    make_environment,
)
from tuner.errors import MissingDependencyError


class Faulty(EnvironmentService):
    def __init__(self, fault):
        self.fault = fault

    async def step(self, action):
        return await self.fault()


async def raising():
    raise ConnectionError("the simulator is gone")


async def two_values():
    return None, 1.0


async def hanging():
    jump(60)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [
        (raising, "workflow_error", "ConnectionError: the simulator is gone"),
        (
            two_values,
            "workflow_error",
            "Faulty.step returned (None, 1.0); it must return (observation",
        ),
        (hanging, "timeout", "no result within 60 s"),
    ],
)
async def test_an_environment_that_fails_is_a_typed_outcome(run, fault, outcome, error):
    (trace,) = await run(QueueWorkflow(Once(), lambda: Faulty(fault)), TASK)
    assert (trace.outcome, trace.reward) == (outcome, None)
    assert error in trace.error


async def test_reset_must_return_two_values(run):
    class Old(Counting):
        async def reset(self, seed=None, options=None):
            return None

    (trace,) = await run(QueueWorkflow(Once(), Old), TASK)
    assert "Old.reset returned None; it must return (observation, info)" in trace.error


async def test_an_environment_is_used_again_unless_its_episode_failed(run):
    outcomes = iter([None, ValueError("broken"), None])

    async def play(act, env):
        fault = next(outcomes)
        if fault is not None:
            raise fault
        return await Once.default(act, env)

    workflow = QueueWorkflow(Once(play=play), Counting)
    results = [(await run(workflow, TASK))[0] for _ in range(3)]
    assert [r.outcome for r in results] == ["completed", "workflow_error", "completed"]
    await asyncio.sleep(0)
    assert (Counting.made, Counting.closed) == (2, 1)


async def test_an_instance_is_shared_by_all_rollouts(run):
    environment = Counting()
    workflow = QueueWorkflow(Once(), environment)
    for _ in range(2):
        await run(workflow, TASK)
    assert (Counting.made, Counting.closed, environment.steps) == (1, 0, 1)


class Walk:
    """A gymnasium environment, as far as its interface goes: walk to 3."""

    def reset(self, *, seed=None, options=None):
        self.place = seed or 0
        return self.place, {"start": self.place}

    def step(self, action):
        self.place += action
        return self.place, float(self.place == 3), self.place == 3, False, {}

    def close(self):
        self.place = None


async def test_any_gymnasium_environment_can_be_wrapped():
    walk = Walk()
    environment = GymnasiumEnvironment(walk, read_action=int)
    assert await environment.reset(seed=1) == (1, {"start": 1})
    assert await environment.step("2") == (3, 1.0, True, False, {})
    await environment.close()
    assert walk.place is None


async def test_a_queue_agent_plays_a_gymnasium_environment(run):
    class Player(Agent):
        """Steps by what it samples until the episode ends."""

        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            ids, found = prompt.data["packed_prompts"].tolist(), []
            place, _ = await env.reset(seed=1)
            ended = False
            while not ended:
                await obs_queue.put((prompt.ids[0], [*ids, place], GCONFIG))
                act = await act_queue.get()
                place, reward, terminated, truncated, _ = await env.step(act.output_ids[0])
                ended = terminated or truncated
                found.append(trajectory(act, reward=reward))
                ids = act.seqs[0]
            return found

    def one_step(answer):
        assert len(answer) == 4
        return 1

    workflow = QueueWorkflow(Player(), lambda: GymnasiumEnvironment(Walk(), read_action=one_step))
    (trace,) = await run(workflow, TASK)
    assert trace.outcome == "completed", trace.error
    assert [call.reward for call in trace.calls] == [0.0, 1.0]
    assert [call.prompt_ids[-1] for call in trace.calls] == [1, 2]  # where it was


async def test_a_gymnasium_id_is_made_by_name():
    pytest.importorskip("gymnasium")
    environment = make_environment(
        EnvServiceAbstraction("gymnasium", {"id": "FrozenLake-v1", "is_slippery": False})
    )
    assert (await environment.reset(seed=1))[0] == 0
    path = [await environment.step(action) for action in (2, 2, 1, 1, 1, 2)]
    assert [step[1] for step in path] == [0, 0, 0, 0, 0, 1]
    assert path[-1][2] is True


def test_a_missing_gymnasium_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[gymnasium\]"):
        GymnasiumEnvironment("CartPole-v1")
