"""Agents by class, instance or path, which see a base URL and a key."""

import asyncio

import numpy as np
import openai
import pytest
import torch

from tests.areal.queue_agents import Counting, Once
from tests.areal.test_tokens import single
from tuner.areal import (
    AgentWorkflow,
    GenerationHyperparameters,
    ModelRequest,
    QueueWorkflow,
    TokenWorkflow,
)
from tuner.errors import ConfigError, FunctionError
from tuner.tasks.functions import WorkflowOutput
from tuner.training.batch import build_batch

HI = [{"role": "user", "content": "hi"}]


class MyAgent:
    def __init__(self, reward=1.0, **request):
        self.reward = reward
        self.request = request
        self.ids = []

    async def run(self, data, **extra):
        async with openai.AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"]
        ) as client:
            answer = await client.chat.completions.create(
                model="default", messages=HI, max_tokens=4, **self.request
            )
        self.ids.append(answer.id)
        return self.reward(answer.id) if callable(self.reward) else self.reward


@pytest.mark.parametrize(
    "agent",
    [
        lambda: AgentWorkflow(MyAgent()),
        lambda: AgentWorkflow(MyAgent, temperature=0.5),
        lambda: AgentWorkflow("tests.areal.test_agents:MyAgent", temperature=0.5),
        lambda: AgentWorkflow("tests.areal.test_agents.MyAgent"),
    ],
)
async def test_instance_class_and_path_run(run, agent):
    (trace,) = await run(agent())
    assert (trace.outcome, trace.reward, len(trace.calls)) == ("completed", 1.0, 1)


async def test_an_instance_keeps_its_state(run):
    agent = MyAgent(temperature=0.5)
    for _ in range(2):
        (trace,) = await run(AgentWorkflow(agent))
    assert len(agent.ids) == 2
    assert trace.calls[0].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("reward", "number"),
    [(1, 1.0), (True, 1.0), (0.5, 0.5), (np.float32(2), 2.0), (torch.tensor(3.0), 3.0)],
)
async def test_every_kind_of_number_is_a_reward(run, reward, number):
    (trace,) = await run(AgentWorkflow(MyAgent(reward)))
    assert trace.reward == number


async def test_none_rejects(run):
    (trace,) = await run(AgentWorkflow(MyAgent(None)), retries=1)
    assert trace.outcome == "rejected"


async def test_a_plain_run_over_http_and_with_the_credentials_alone(run):
    class Plain:
        def run(self, data, base_url, api_key):
            client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
            client.chat.completions.create(model="default", messages=HI, max_tokens=4)
            return 1

    (trace,) = await run(AgentWorkflow(Plain()))
    assert (trace.outcome, len(trace.calls)) == ("completed", 1)


class Conversation:
    """Turns of token ids, so that each goes on from the one before; and a call beside them."""

    def __init__(self, rewards):
        self.rewards = rewards

    async def run(self, data, **extra):
        async with openai.AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"]
        ) as client:

            async def ask(prompt):
                answer = await client.completions.create(
                    model="default",
                    prompt=prompt,
                    max_tokens=3,
                    extra_body={"return_token_ids": True},
                )
                return answer.id, prompt + list(answer.choices[0].token_ids) + [50]

            first, ids = await ask([40, 41])
            beside, _ = await ask([60, 61])
            second, ids = await ask(ids)
            third, _ = await ask(ids)
        return self.rewards(first, beside, second, third)


async def test_rewards_by_call_reach_the_turns_that_led_to_them_and_no_other_agents(run):
    agent = Conversation(lambda first, beside, second, third: {third: 1.0, first: 0.25})
    traces = [
        (await run(AgentWorkflow(agent, turn_discount=0.5), rollout=rollout))[0]
        for rollout in range(2)
    ]
    calls = traces[0].calls
    assert [call.reward for call in calls] == [0.5, None, 0.5, 1.0]
    assert [call.excluded for call in calls] == [False, True, False, False]
    assert traces[0].reward == 1.0
    batch = build_batch(traces)
    assert batch.dropped_tokens == {"excluded_call": 6}
    assert len(batch.rows) == 6


async def test_a_choice_can_be_rewarded_by_its_own_id(run):
    agent = MyAgent(lambda id: {f"{id}-0": 0.0, f"{id}-1": 1.0}, n=2)
    (trace,) = await run(AgentWorkflow(agent))
    assert [call.reward for call in trace.calls] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("good", r"returned 'good' \(str\); it must return a number"),
        (float("nan"), "reward nan: give a finite number"),
        ({}, "returned no rewards; the calls it made are chatcmpl-"),
        ({"chatcmpl-1": 1.0}, "returned rewards of chatcmpl-1; the calls it made are chatcmpl-"),
        (lambda id: {id: "good"}, "returned 'good'"),
    ],
)
async def test_what_is_no_reward_stops_the_run(run, reward, message):
    with pytest.raises(FunctionError, match=message):
        await run(AgentWorkflow(MyAgent(reward)))


async def test_an_agent_that_raises_or_hangs_is_a_typed_outcome(run):
    class Raising(MyAgent):
        async def run(self, data, **extra):
            raise RuntimeError("no tools")

    class Hanging(MyAgent):
        async def run(self, data, **extra):
            await asyncio.Event().wait()

    (raised,), (hung,) = (
        await run(AgentWorkflow(Raising())),
        await run(AgentWorkflow(Hanging()), seconds=0.3),
    )
    assert (raised.outcome, hung.outcome) == ("workflow_error", "timeout")


@pytest.mark.parametrize(
    ("agent", "arguments", "error", "message"),
    [
        ("tests.areal.test_agents:Nobody", {}, ConfigError, "has no function 'Nobody'"),
        ("nowhere.Agent", {}, ConfigError, "importing nowhere failed"),
        (Conversation, {"turns": 2}, ConfigError, "does not take the arguments turns"),
        (MyAgent(), {"reward": 2}, ConfigError, "is an instance"),
        (object(), {}, FunctionError, "has no run"),
        (type("Odd", (), {"run": lambda self: 1})(), {}, FunctionError, "takes no `data`"),
    ],
)
def test_what_is_no_agent_is_refused_at_once(agent, arguments, error, message):
    with pytest.raises(error, match=message):
        AgentWorkflow(agent, **arguments)


async def test_another_models_name_is_still_refused(run):
    class Wrong(MyAgent):
        async def run(self, data, **extra):
            async with openai.AsyncOpenAI(
                base_url=extra["base_url"],
                api_key=extra["api_key"],
                http_client=extra["http_client"],
            ) as client:
                await client.chat.completions.create(model="gpt-5", messages=HI)

    (trace,) = await run(AgentWorkflow(Wrong()))
    assert "model is 'gpt-5'" in trace.error


def test_the_loop_takes_agents(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch([{}], MyAgent(), group_size=2)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    torch.testing.assert_close(actor.compute_logp(batch), batch["logprobs"], atol=1e-5, rtol=0)
    by_path = rollout.rollout_batch([{}], "tests.areal.test_agents.MyAgent", group_size=2)
    assert by_path["rewards"].tolist() == [1.0, 1.0]


async def test_an_agent_written_four_ways_samples_and_trains_the_same(run):
    """Workflow function, queue agent, token-level workflow, class with a base URL."""

    async def function(task, model):
        await model(task["messages"], max_tokens=4)
        return WorkflowOutput(reward=float(task["reward"]))

    class Tokens:
        async def arun_episode(self, engine, data):
            text = engine.tokenizer.apply_chat_template(
                data["messages"], add_generation_prompt=True, tokenize=False
            )
            prompt = engine.tokenizer.encode(text, add_special_tokens=False)
            gconfig = GenerationHyperparameters(max_new_tokens=4)
            return single(await engine.agenerate(ModelRequest(prompt, gconfig)), data["reward"])

    class Queue(Once):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            (found,) = await super().collect_trajectory(prompt, env, obs_queue, act_queue)
            return [found | {"rewards": torch.tensor([float(prompt.metadata["task"]["reward"])])}]

    class Agent(MyAgent):
        async def run(self, data, **extra):
            await super().run(data, **extra)
            return data["reward"]

    ways = [
        function,
        QueueWorkflow(Queue(), Counting),
        TokenWorkflow(Tokens()),
        AgentWorkflow(Agent()),
    ]
    batches = []
    for way in ways:
        traces = [
            (await run(way, {"messages": HI, "reward": i}, rollout=i, max_tokens=4))[0]
            for i in range(3)
        ]
        assert [trace.outcome for trace in traces] == ["completed"] * 3
        batches.append(build_batch(traces))
    first, *others = batches
    for batch in others:
        for ours, theirs in zip(batch.rows, first.rows, strict=True):
            for name in ("prompt_ids", "completion_ids", "logprobs", "versions", "sampling"):
                assert getattr(ours, name) == getattr(theirs, name)
        assert torch.equal(batch.rewards_R, first.rewards_R)
        assert batch.dropped_tokens == first.dropped_tokens == {}
