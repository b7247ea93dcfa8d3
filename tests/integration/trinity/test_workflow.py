"""The adapter under Trinity-RFT's own runner, in front of a server with a real (tiny) model."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel, Field
from trinity.common.config import GenerationConfig, InferenceModelConfig
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow
from trinity.explorer.workflow_runner import WorkflowRunner

from tests.integration.trinity.conftest import TINY
from tests.trinity.served import serving
from tuner import WorkflowOutput
from tuner.engines.transformers.engine import TransformersEngine
from tuner.runs.models import load_model, load_tokenizer
from tuner.traces import Outcome, TraceStore
from tuner.trinity import workflow as adapter
from tuner.trinity.progress import Journal
from tuner.trinity.workflow import TunerWorkflow

SETTINGS = {
    "workflow": "test:workflow",
    "judge": None,
    "folder": "",
    "call_rewards": True,
    "timeout": 30.0,
    "max_retries": 0,
    "seed": 1,
    "on_failure": "drop",
    "max_calls": None,
    "max_tokens": None,
    "reasoning": "keep",
    "experiences": "merged",
    "states": False,
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1",
    "auxiliary_models": {},
}


class Version:
    """Stands for Trinity-RFT's actor: its answers come as awaitables of remote calls."""

    def __init__(self):
        self.value = 0
        self.get_model_version = SimpleNamespace(remote=self._version)

    async def _version(self):
        return self.value


class Bench:
    """Trinity-RFT's runner, made without its Ray actors."""

    def __init__(self, address, model_path, folder):
        config = InferenceModelConfig(
            model_path=str(model_path),
            max_model_len=2048,
            max_response_tokens=32,
            temperature=1.0,
            enable_openai_api=True,
        )
        self.actor = Version()
        self.folder = folder
        runner = object.__new__(WorkflowRunner)
        runner.name = "runner"
        runner.logger = logging.getLogger("runner")
        runner.config = SimpleNamespace(explorer=SimpleNamespace(rollout_model=config))
        runner.model_wrapper = ModelWrapper(model=self.actor, config=config, api_address=address)
        runner.auxiliary_model_wrappers = []
        runner.workflow_instance = None
        runner.runner_state = {}
        self._runner = runner

    async def run(
        self,
        function,
        *,
        judge=None,
        repeat=2,
        batch=1,
        row=None,
        is_eval=False,
        max_tokens=32,
        **settings,
    ):
        adapter._loaded = {"test:workflow": function, "test:judge": judge}.get
        settings |= {} if judge is None else {"judge": "test:judge"}
        task = Task(
            workflow=TunerWorkflow,
            repeat_times=repeat,
            rollout_args=GenerationConfig(
                temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens
            ),
            workflow_args={
                "tuner": {**SETTINGS, **settings},
                "checkpoint_job_dir": str(self.folder),
            },
            is_eval=is_eval,
            raw_task=row or {"question": "What is 3 plus 4?"},
            batch_id=batch,
            task_id=0,
            index={"index": 0},
        )
        status, payload = await self._runner.run_task(task, str(batch), repeat_times=repeat)
        return status, Experience.deserialize_many(payload) if payload else []

    def traces(self, split="train", step=1):
        return TraceStore(self.folder / "traces").read(split, step)


@asynccontextmanager
async def opened(folder):
    model = load_model(str(TINY), device=torch.device("cpu"), dtype=torch.float32)
    engine = TransformersEngine(model, load_tokenizer(str(TINY)), max_model_len=2048, max_slots=8)
    async with serving(engine) as (server, address):
        bench = Bench(address, TINY, folder)
        bench.server = server
        yield bench
        for hosts in adapter._hosts.values():
            for host in hosts.values():
                await host.gateway.aclose()
                await host.gateway.engine.close()
        await engine.close()


async def talk(task, model, turns=2, stream=False):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(turns):
        answer = await model.client.chat.completions.create(
            model=model.model_name, messages=messages
        )
        text = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "What is 5 plus 6?"},
        ]
    return WorkflowOutput(reward=float(len(text)), response=text, metrics={"length": len(text)})


async def test_experiences_are_the_recorded_calls_merged(tmp_path):
    async with opened(tmp_path) as bench:
        bench.actor.value = 4
        status, experiences = await bench.run(talk)
        traces = bench.traces()
    assert status.ok
    assert [e.eid.rid for e in experiences] == ["1/0/0", "1/0/1"]
    for trace, experience in zip(sorted(traces, key=lambda t: t.id), experiences, strict=True):
        first, second = trace.calls
        assert second.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == (
            first.prompt_ids + first.completion_ids
        )
        tokens = tuple(experience.tokens.tolist())
        assert tokens == second.prompt_ids + second.completion_ids
        assert experience.prompt_length == len(first.prompt_ids)
        sampled = [
            (token, logprob)
            for token, logprob, mask in zip(
                tokens[experience.prompt_length :],
                experience.logprobs.tolist(),
                experience.action_mask.tolist(),
                strict=True,
            )
            if mask
        ]
        ids = [*first.completion_ids, *second.completion_ids]
        assert [token for token, _ in sampled] == ids
        assert [logprob for _, logprob in sampled] == pytest.approx(
            [*first.logprobs, *second.logprobs], abs=1e-5
        )
        assert experience.reward == trace.reward
        assert experience.info["weights_versions"] == [4]
        assert experience.info["model_version"] == 4
        assert experience.metrics["reward"] == trace.reward
        assert experience.metrics["length"] == trace.metrics["length"]
        assert experience.messages[-1] == second.response
        ended = "response_truncated" if second.finish_reason == "length" else None
        assert experience.truncate_status == ended


async def test_one_experience_per_call_where_it_is_wanted(tmp_path):
    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(talk, experiences="calls")
    assert [(e.eid.run, e.eid.step) for e in experiences] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(e.action_mask.all() for e in experiences)


async def test_rollouts_of_a_group_are_different_samples(tmp_path):
    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(talk, repeat=4)
    assert len({tuple(e.tokens.tolist()) for e in experiences}) > 1


async def test_recorded_rollouts_of_a_run_that_goes_on_are_not_sampled_again(tmp_path):
    async with opened(tmp_path) as bench:
        _, before = await bench.run(talk, repeat=2, batch=3)
        first = bench.traces(step=3)
        Journal(tmp_path).replay([tmp_path / "traces" / "step_000003.jsonl"])
        adapter._step_before.cache_clear()  # a run that goes on has new workers
        _, after = await bench.run(talk, repeat=3, batch=3)
        traces = bench.traces(step=3)
        _, others = await bench.run(talk, repeat=2, batch=4)
    assert traces[:2] == first
    assert len(traces) == 3  # only the third rollout was run
    assert [e.tokens.tolist() for e in after[:2]] == [e.tokens.tolist() for e in before]
    assert [e.info["calls"] for e in after[:2]] == [e.info["calls"] for e in before]
    assert {e.eid.batch for e in others} == {4}
    assert len(bench.traces(step=4)) == 2


async def test_a_failed_rollout_is_left_out_and_counted(tmp_path):
    started = []

    async def sometimes(task, model):
        started.append(1)
        if len(started) == 2:
            raise RuntimeError("the tool broke")
        return await talk(task, model)

    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(sometimes, repeat=3)
        outcomes = sorted(trace.outcome for trace in bench.traces())
    assert len({e.eid.run for e in experiences}) == 2
    assert outcomes == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.WORKFLOW_ERROR]


async def test_a_failed_rollout_is_penalized_where_that_is_wanted(tmp_path):
    async def breaks(task, model):
        await talk(task, model, turns=1)
        raise RuntimeError("the tool broke")

    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(breaks, on_failure={"penalize": -2.5})
    assert [e.reward for e in experiences] == [-2.5, -2.5]


async def test_a_group_of_one_teaches_nothing_and_says_so(tmp_path):
    started = []

    async def once(task, model):
        started.append(1)
        if len(started) > 1:
            raise RuntimeError("the tool broke")
        return await talk(task, model)

    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(once)
    assert (status.completed_runs, experiences) == (0, [])
    assert "nothing to train on" in status.message
    assert "RuntimeError: the tool broke" in status.message


class WithHistory(Workflow):
    """A workflow in the way of AgentScope's bridge: calls go to the model's one history."""

    is_async = True
    attempts = 0
    begun: asyncio.Event
    retried: asyncio.Event
    recorded: asyncio.Event

    async def run_async(self):
        WithHistory.attempts += 1
        number = WithHistory.attempts
        self.begun.set()
        if number == 1:
            await self.retried.wait()  # a slow answer; Trinity-RFT has given up on it by now
        else:
            self.retried.set()
            await self.recorded.wait()
        call = Experience(tokens=[number, number], logprobs=[-1.0], prompt_length=1, reward=1.0)
        self.model._record_history(call)
        self.recorded.set()
        return self.model.extract_experience_from_history() if number == 2 else [call]


async def test_trinitys_history_mixes_a_late_attempt_into_its_retry(tmp_path):
    """The failure that sessions of their own prevent; the next test is the same with ours."""
    async with opened(tmp_path) as bench:
        runner = bench._runner
        runner.concurrent_run_fn = runner._sequential_run
        runner.model_wrapper.enable_history = True
        for name in ("begun", "retried", "recorded"):
            setattr(WithHistory, name, asyncio.Event())
        task = Task(workflow=WithHistory, repeat_times=1, raw_task={}, batch_id=1, task_id=0)
        late = asyncio.ensure_future(runner.run_task(task, "1"))
        await WithHistory.begun.wait()
        _, payload = await runner.run_task(task, "1")  # its retry, on the same runner
        await late
    retried = [tuple(e.tokens.tolist()) for e in Experience.deserialize_many(payload)]
    assert retried == [(1, 1), (2, 2)]


async def test_a_timed_out_attempt_never_reaches_its_retry(tmp_path):
    started = []

    async def slow_at_first(task, model):
        started.append(1)
        output = await talk(task, model, turns=1)
        if len(started) == 1:
            await asyncio.Event().wait()
        return output

    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(slow_at_first, repeat=1, timeout=1.0, max_retries=1)
        attempts = bench.traces()
    late, final = sorted(attempts, key=lambda trace: trace.attempt)
    assert (late.outcome, late.final) == (Outcome.TIMEOUT, False)
    assert final.outcome is Outcome.COMPLETED
    (experience,) = experiences
    assert experience.info["calls"] == [call.id for call in final.calls]
    assert experience.info["attempt"] == 2
    assert not {call.id for call in late.calls} & {call.id for call in final.calls}


async def test_an_evaluation_reports_its_reward_and_stores_its_traces(tmp_path):
    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(talk, repeat=1, batch="3/held-out", is_eval=True)
        (trace,) = bench.traces("held-out", 3)
    assert experiences == []  # Trinity-RFT keeps none of an evaluation
    assert status.metrics[0]["reward"] == trace.reward


async def test_a_wrong_return_value_stops_the_run(tmp_path):
    async def forgot(task, model):
        await talk(task, model)

    async with opened(tmp_path) as bench:
        await bench.run(forgot)
    reason = Journal(tmp_path).reason()
    assert reason["error"] == "FunctionError"
    assert "is a return statement missing?" in reason["message"]


async def test_a_failure_stops_the_run_where_that_is_wanted(tmp_path):
    async def breaks(task, model):
        raise RuntimeError("the tool broke")

    async with opened(tmp_path) as bench:
        await bench.run(breaks, on_failure="abort")
    assert "the tool broke (tuner.on_failure is 'abort')" in Journal(tmp_path).reason()["message"]


async def test_streams_and_other_clients_are_recorded(tmp_path):
    import openai

    async def streaming(task, model):
        client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        stream = await client.chat.completions.create(
            model=model.model_name,
            messages=[{"role": "user", "content": task["question"]}],
            stream=True,
        )
        async with stream:
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        return WorkflowOutput(reward=1.0, response=text)

    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(streaming)
        traces = bench.traces()
    assert len(experiences) == 2
    assert all(call.streamed for trace in traces for call in trace.calls)


async def react(task, model):
    """The tutorial's agent, with a tool."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    async def add(a: int, b: int) -> ToolResponse:
        """Add two numbers."""
        return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    agent = ReActAgent(
        name="agent",
        sys_prompt="You solve problems.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )
    answer = await agent.reply(Msg("user", task["question"], role="user"))
    return WorkflowOutput(reward=1.0, response=answer)


class Answer(BaseModel):
    number: int = Field(ge=0, le=9)


async def with_a_form(task, model):
    """AgentScope's structured output: `.parse`, which Trinity-RFT's own client does not record."""
    messages = [{"role": "user", "content": task["question"]}]
    free = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    text = free.choices[0].message.content or ""
    answer = await model(
        [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "JSON?"}],
        structured_model=Answer,
    )
    return WorkflowOutput(reward=1.0, response=str(answer.metadata))


async def test_agentscopes_structured_output_is_recorded_and_not_trained(tmp_path):
    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(
            with_a_form, max_tokens=60, reasoning_parser="none", reasoning="template"
        )
        traces = bench.traces()
    assert status.ok, status.message
    for trace in traces:
        free, formed = trace.calls
        assert (free.constrained, formed.constrained) == (False, True)
        assert set(json.loads(formed.response["content"])) == {"number"}
        assert trace.response == str(json.loads(formed.response["content"]))
        assert len(formed.logprobs) == len(formed.completion_ids)
    assert [e.info["calls"] for e in experiences] == [
        [trace.calls[0].id] for trace in sorted(traces, key=lambda t: t.id)
    ]


async def test_tools_are_forced(tmp_path):
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }

    async def forced(task, model):
        answer = await model.client.chat.completions.create(
            model=model.model_name,
            messages=[{"role": "user", "content": task["question"]}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (called,) = answer.choices[0].message.tool_calls
        return WorkflowOutput(reward=1.0, response=called.function.arguments)

    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(
            forced, max_tokens=100, reasoning_parser="none", reasoning="template"
        )
        traces = bench.traces()
    assert all("a" in json.loads(trace.response) for trace in traces)
    # Nothing else was called, so the group has nothing to train on, and says why.
    assert experiences == []
    assert "constrained_call" in status.message


async def test_roles_rewards_and_exclusions_of_calls_reach_the_experiences(tmp_path):
    async def two_agents(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for role in ("planner", "solver", "critic"):
            client = model.role(role).client
            await client.chat.completions.create(model=model.model_name, messages=messages)
        planner, _, critic = model.calls
        planner.reward = 0.25
        critic.exclude()
        return WorkflowOutput(reward=1.0)

    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(two_agents, experiences="calls")
        traces = bench.traces()
    assert status.ok, status.message
    assert [call.role for call in traces[0].calls] == ["planner", "solver", "critic"]
    planners, solvers = experiences[0::2], experiences[1::2]
    assert len(experiences) == 4
    for planner, solver in zip(planners, solvers, strict=True):
        ((start, stop, reward, role),) = planner.info["call_rewards"]
        assert (start, stop) == (0, len(planner.action_mask))
        assert (reward, role) == (0.25, "planner")
        assert solver.info["call_rewards"] == []


async def test_states_and_gains_of_calls_reach_the_experiences(tmp_path):
    async def wanders(task, model):
        for place in ("here", "there", "here"):
            await talk(task, model, turns=1)
            model.calls[-1].state = place
        model.calls[0].reward = 0.25
        return WorkflowOutput(reward=1.0)

    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(
            wanders, experiences="calls", call_rewards=False, states=True
        )
    assert status.ok, status.message
    rollouts = len(experiences) // 3
    assert [e.info["step_reward"] for e in experiences] == [0.25, 0.0, 1.0] * rollouts
    states = [e.info["env_state_hash"] for e in experiences]
    assert states == states[:3] * rollouts  # the same in all rollouts
    assert states[0] == states[2] != states[1]


async def test_rewards_of_calls_stop_a_run_whose_algorithm_does_not_compare_them(tmp_path):
    async def rewarded(task, model):
        await talk(task, model, turns=1)
        model.calls[-1].reward = 1.0
        return WorkflowOutput(reward=1.0)

    async with opened(tmp_path) as bench:
        await bench.run(rewarded, call_rewards=False)
    assert (
        "set algorithm.algorithm_type to multi_step_grpo" in Journal(tmp_path).reason()["message"]
    )


async def test_limits_of_calls_and_tokens_hold_on_the_workers(tmp_path):
    async def endless(task, model):
        while True:
            await talk(task, model, turns=1)

    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(endless, max_calls=2, on_failure={"penalize": -1.0})
        traces = bench.traces()
    assert [len(trace.calls) for trace in traces] == [2, 2]
    assert [e.reward for e in experiences] == [-1.0] * len(experiences)
    assert len(experiences) >= 2


async def test_an_auxiliary_model_answers_and_is_not_recorded(tmp_path):
    async def helped(task, model, auxiliary_models):
        helper = auxiliary_models["helper"]
        messages = [{"role": "user", "content": task["question"]}]
        hint = await helper.client.chat.completions.create(
            model=helper.model_name, messages=messages
        )
        messages[0]["content"] += hint.choices[0].message.content or "?"
        await model.client.chat.completions.create(model=model.model_name, messages=messages)
        return WorkflowOutput(reward=1.0)

    async with opened(tmp_path) as bench:
        address = bench._runner.model_wrapper.api_address
        config = InferenceModelConfig(
            model_path=str(TINY),
            name="helper",
            max_model_len=2048,
            max_response_tokens=8,
            temperature=0.5,
            top_p=1.0,
            top_k=-1,
            enable_openai_api=True,
        )
        wrapper = ModelWrapper(model=Version(), config=config, api_address=address)
        bench._runner.auxiliary_model_wrappers = [wrapper]
        status, experiences = await bench.run(helped)
        traces = bench.traces()
        sent = bench.server.requests
    assert status.ok, status.message
    assert [len(trace.calls) for trace in traces] == [1, 1]
    hints = [body for body in sent if body["temperature"] == 0.5]
    assert len(hints) == 2
    assert {body["max_tokens"] for body in hints} == {8}
    assert len(experiences) == 2


async def test_an_agentscope_agent_with_a_tool_is_recorded(tmp_path):
    async with opened(tmp_path) as bench:
        status, experiences = await bench.run(react)
        traces = bench.traces()
    assert status.ok, status.message
    assert sorted(id for e in experiences for id in e.info["calls"]) == sorted(
        call.id for trace in traces for call in trace.calls
    )
    tools = [tool["function"]["name"] for e in experiences for tool in e.tools]
    assert set(tools) == {"add"}
