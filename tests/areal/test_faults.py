"""Whatever breaks inside an episode has a name, and training goes on."""

import asyncio

import pytest
import torch

from tests.areal.loop import step
from tests.areal.queue_agents import GCONFIG, trajectory
from tests.kit.clock import jump
from tests.rewards import functions
from tuner.areal import Agent, EnvironmentService, QueueWorkflow, StatefulDataLoader
from tuner.rewards import in_process

FINE = 5
GROUP = 3
SECONDS = 60.0  # for a rollout; those that are fine need hundredths
# What happens in an episode, by the row's number; everything else is fine.
FAULTS = {
    0: ("judge_error", "the process of die died with exit code -9"),
    1: ("judge_timeout", "judge timed out: hang took more than 0.2 s"),
    2: ("workflow_error", "ConnectionError: the simulator is gone"),
    3: ("workflow_error", "Env.step returned (None, 1.0); it must return"),
    4: ("timeout", f"no result within {SECONDS:g} s"),
}


class Env(EnvironmentService):
    """Judges an answer, or fails as the row says."""

    hung = 0

    def __init__(self):
        self.die = in_process(functions.die, workers=1)
        self.hang = in_process(functions.hang, timeout=0.2, workers=1)

    async def step(self, action):
        number, token = action
        match number:
            case 0:
                await self.die("a")
            case 1:
                await self.hang("a")
            case 2:
                raise ConnectionError("the simulator is gone")
            case 3:
                return None, 1.0
            case 4:
                Env.hung += 1
                if Env.hung == GROUP:  # all of them have sampled their tokens
                    jump(SECONDS)
                await asyncio.Event().wait()
        return None, float(token % 5), True, False, {}


class Asking(Agent):
    """Answers once, and tells the environment which row it is."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await obs_queue.put((prompt.ids[0], prompt.data["packed_prompts"].tolist(), GCONFIG))
        act = await act_queue.get()
        action = (prompt.metadata["task"]["n"], act.output_ids[0][0])
        _, reward, *_ = await env.step(action)
        return [trajectory(act, reward=reward)]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_in_an_episode_has_a_name_and_training_goes_on(make_loop, fault):
    actor, rollout = make_loop(concurrent=GROUP, tuner={"explorer": {"max_timeout": SECONDS}})
    rows = [{"input_ids": [40, 41], "n": n} for n in (fault, FINE)]
    workflow = QueueWorkflow(Asking(), Env)
    before = next(actor._run.stack.model.parameters()).clone()
    batch = rollout.prepare_batch(StatefulDataLoader(rows, 1), workflow, group_size=GROUP)
    outcome, error = FAULTS[fault]
    assert batch.account.outcomes == {"completed": 3, outcome: 3}
    assert [line for line in batch.account.errors if error not in line] == []
    metrics = step(actor, batch)
    assert metrics[f"tokens/dropped/{outcome}"] == metrics["tokens/sampled"] / 2 == 12
    assert not torch.equal(next(actor._run.stack.model.parameters()), before)
