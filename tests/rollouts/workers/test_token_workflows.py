"""Agents that own their tokens leave the same traces in workers as in this process."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch

from tests.rollouts.workers.conftest import DEFAULTS, ByPort, pool_of
from tests.rollouts.workers.test_outcomes import told
from tuner.areal import (
    Agent,
    AgentAbstraction,
    EnvironmentService,
    EnvServiceAbstraction,
    GenerationHyperparameters,
    ModelRequest,
    QueueWorkflow,
    TokenWorkflow,
    concat_padded_tensors,
    register_agent,
    register_environment,
)
from tuner.gateway.request_error import RequestError
from tuner.traces import RolloutId

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_workers")]

ID = RolloutId(1, 0, 0)
FEW = GenerationHyperparameters(max_new_tokens=3)


def tensors(ids, sampled, logprobs, reward):
    return {
        "input_ids": torch.tensor([ids]),
        "loss_mask": torch.tensor([sampled]),
        "logprobs": torch.tensor([logprobs]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "rewards": torch.tensor([reward]),
    }


class Turns:
    """Asks by token ids, and does what the row says."""

    async def arun_episode(self, engine, data):
        prompt = engine.tokenizer.encode(data["question"])
        if data["do"] == "ask for nothing":
            return await engine.agenerate(ModelRequest([], FEW))
        if data["do"] == "stop elsewhere":
            return await engine.agenerate(ModelRequest(prompt, FEW.new(stop_token_ids=[5])))
        if data["do"] == "reject":
            return None
        if data["do"] == "return words":
            return engine.tokenizer.decode(prompt)
        if data["do"] == "use up its calls":
            return [await engine.agenerate(ModelRequest([*prompt, n], FEW)) for n in range(9)]
        two = [engine.agenerate(ModelRequest([*prompt, n], FEW)) for n in (40, 41)]
        answers = await asyncio.gather(*two)
        found = []
        for answer in answers:
            versions = answer.output_versions
            assert set(versions) == {engine.get_version()}
            zeros = [0] * answer.input_len
            ids = answer.input_tokens + answer.output_tokens
            mask = zeros + [1] * (answer.output_len - 1) + [int(data["do"] != "leave one out")]
            reward = float(sum(answer.output_tokens) % 7)
            found.append(tensors(ids, mask, [*map(float, zeros), *answer.output_logprobs], reward))
        return concat_padded_tensors(found)


class Impatient:
    """Begins two answers, and leaves the one that has no end."""

    async def arun_episode(self, engine, data):
        late = asyncio.ensure_future(engine.agenerate(ModelRequest([40], FEW)))
        answer = await engine.agenerate(ModelRequest([40, 41], FEW))
        late.cancel()
        mask = [0] * answer.input_len + [1] * answer.output_len
        logprobs = [0.0] * answer.input_len + answer.output_logprobs
        return tensors(answer.input_tokens + answer.output_tokens, mask, logprobs, 1.0)


class Sums(EnvironmentService):
    """Rewards the sum of an answer."""

    async def step(self, action):
        return None, float(sum(action) % 7), True, False, {}


class Asks(Agent):
    """Asks for several answers at once, through queues."""

    def __init__(self, gconfig):
        self.gconfig = gconfig

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await env.reset()
        ids = prompt.data["packed_prompts"].tolist()
        await obs_queue.put((prompt.ids[0], ids, self.gconfig))
        act = await act_queue.get()
        found = []
        for output, logprobs in zip(act.output_ids, act.output_logprobs, strict=True):
            _, reward, *_ = await env.step(output)
            mask = [0] * len(ids) + [1] * len(output)
            found.append(tensors([*ids, *output], mask, [0.0] * len(ids) + logprobs, reward))
        return found


def by_queues():
    """Of classes that only this process knows by their names."""
    register_agent("asks in workers", Asks)
    register_environment("sums in workers", Sums)
    gconfig = {"n_samples": 2, "max_new_tokens": 3}
    return QueueWorkflow(
        AgentAbstraction("asks in workers", {"gconfig": gconfig}),
        EnvServiceAbstraction("sums in workers"),
    )


DEEDS = [
    "answer",
    "leave one out",
    "ask for nothing",
    "stop elsewhere",
    "reject",
    "return words",
    "use up its calls",
]
TURNS = [{"do": deed, "question": "What is 2 + 2?"} for deed in DEEDS]
SAID = {"role": "user", "content": "hi"}
PROMPTS = [{"prompt": "hi"}, {"messages": [SAID]}, {"input_ids": [40, 41]}, {"other": "hi"}]


async def traces_of(runner, rows):
    """Those of all rows at once; or the error that ends the run."""

    async def one(number, row):
        try:
            return [told(t) for t in await runner.run(row, RolloutId(1, number, 0), DEFAULTS)]
        except Exception as error:
            return type(error), str(error)

    return await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))


@pytest.mark.parametrize(
    ("make", "rows", "placing"),
    [
        (lambda: TokenWorkflow(Turns()), TURNS, None),
        (lambda: TokenWorkflow(Turns()), TURNS, ByPort()),
        (by_queues, PROMPTS, None),
    ],
    ids=["token-level by a socket", "token-level by a port", "queues by a socket"],
)
async def test_episodes_leave_the_same_traces_in_workers(make_runner, make, rows, placing):
    here = await traces_of(make_runner(make(), calls=4), rows)
    async with pool_of(1, make(), placing=placing) as pool:
        there = await traces_of(make_runner(make(), calls=4, workers=pool), rows)
    for row, expected, found in zip(rows, here, there, strict=True):
        assert found == expected, row
    (trained,) = here[0]
    assert trained.outcome == "completed"
    assert {call.reward for call in trained.calls} != {None}


async def test_an_answer_that_nobody_waits_for_is_cancelled(make_runner):
    ended = asyncio.Event()
    async with pool_of(1, workflow := TokenWorkflow(Impatient())) as pool:
        runner = make_runner(workflow, workers=pool)
        complete = runner.gateway.complete_tokens

        async def endless(session, prompt_ids, **settings):
            if len(prompt_ids) > 1:
                return await complete(session, prompt_ids, **settings)
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        runner.gateway.complete_tokens = endless
        (trace,) = await runner.run({"question": "hi"}, ID, DEFAULTS)
        await asyncio.wait_for(ended.wait(), 60)  # while the worker lives
    assert trace.outcome == "completed"


class Says:
    """Asks for more than it may, and returns what it is told in numbers."""

    async def arun_episode(self, engine, data):
        try:
            for n in range(9):
                await engine.agenerate(ModelRequest([40, n], FEW))
        except RequestError as error:
            raise ValueError(f"{error.status} {error.code}") from error


async def test_a_refusal_is_the_one_that_the_gateway_gave(make_runner):
    async with pool_of(1, workflow := TokenWorkflow(Says())) as pool:
        (here,) = await make_runner(workflow, calls=4).run({}, ID, DEFAULTS)
        (there,) = await make_runner(workflow, calls=4, workers=pool).run({}, ID, DEFAULTS)
    assert here.error == there.error == "ValueError: 403 rollout_limit"


class Broken:
    """A tokenizer that another process cannot read."""

    def __reduce__(self):
        return int, ("not a number",)


class Reads:
    """Wants the tokenizer first of all."""

    async def arun_episode(self, engine, data):
        return engine.tokenizer


async def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_rollout(make_runner):
    async with pool_of(1, workflow := TokenWorkflow(Reads())) as pool:
        runner = make_runner(workflow, workers=pool)
        service = runner.gateway.service
        renderer = copy.copy(service.renderer)
        renderer.tokenizer = Broken()
        runner.gateway.service = replace(service, renderer=renderer)
        for rollout in range(2):  # the worker still listens
            (trace,) = await runner.run({}, RolloutId(1, 0, rollout), DEFAULTS)
            assert "ValueError: invalid literal for int()" in trace.error
