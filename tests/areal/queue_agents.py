"""A queue agent and an environment to test with."""

from tests.areal.test_tokens import single
from tuner.areal import Agent, EnvironmentService, GenerationHyperparameters, ModelResponse

GCONFIG = GenerationHyperparameters(max_new_tokens=4)
TASK = {"query_id": "q1", "input_ids": [40, 41, 42]}


class Counting(EnvironmentService):
    """Rewards the n-th step with n."""

    made = 0
    closed = 0

    def __init__(self):
        type(self).made += 1
        self.steps = 0

    async def reset(self, seed=None, options=None):
        self.steps = 0
        return None, {}

    async def step(self, action):
        self.steps += 1
        return None, float(self.steps), True, False, {}

    async def close(self):
        type(self).closed += 1


def trajectory(act, place=0, reward=1.0):
    response = ModelResponse(
        act.prompt_ids, act.output_ids[place], act.output_logprobs[place], [], "stop"
    )
    return single(response, reward)


class Once(Agent):
    """Asks once; `play` makes trajectories of the answers."""

    def __init__(self, gconfig=GCONFIG, play=None):
        self.gconfig = gconfig
        self.play = play or self.default
        self.seen = []

    @staticmethod
    async def default(act, env):
        _, reward, *_ = await env.step(None)
        return [trajectory(act, place, reward) for place in range(len(act.seqs))]

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await env.reset()
        self.seen.append(prompt)
        ids = prompt.data["packed_prompts"].tolist()
        await obs_queue.put((prompt.ids[0], ids, self.gconfig))
        act = await act_queue.get()
        self.seen.append(act)
        return await self.play(act, env)
