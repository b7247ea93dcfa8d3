"""Agents with queues: what they are given, what they may do, how they are chosen."""

import asyncio

import pytest
import torch

from tests.areal import seed_agent
from tests.areal.queue_agents import GCONFIG, TASK, Counting, Once, trajectory
from tuner.areal import (
    Agent,
    AgentAbstraction,
    EnvServiceAbstraction,
    QueueWorkflow,
    SequenceSample,
    configured_agent,
    register_agent,
)
from tuner.areal.queues import serve
from tuner.cli import functions_of
from tuner.config import load_config
from tuner.engines.base import Generation
from tuner.errors import ConfigError, FunctionError
from tuner.tasks.functions import WorkflowOutput
from tuner.training.batch import Selection, build_batch


async def test_a_bundle_has_whole_sequences_logprobs_and_versions(run):
    agent = Once(GCONFIG.new(n=3))
    (trace,) = await run(QueueWorkflow(agent, Counting), TASK)
    prompt, act = agent.seen
    assert (prompt.ids, prompt.bs, prompt.metadata["task"]) == (["q1"], 1, TASK)
    assert (act.qid, act.prompt_ids, act.prompt_len) == ("q1", [40, 41, 42], 3)
    assert [tuple(ids) for ids in act.output_ids] == [c.completion_ids for c in trace.calls]
    assert len(set(map(tuple, act.output_ids))) == 3
    assert act.seqs == [[40, 41, 42, *ids] for ids in act.output_ids]
    assert act.seqlens == [len(logprobs) + 1 for logprobs in act.logprobs]
    assert all(logprobs[:2] == [0.0, 0.0] for logprobs in act.logprobs)
    assert [tuple(p) for p in act.output_logprobs] == [c.logprobs for c in trace.calls]
    assert act.version_start == act.version_end == [0, 0, 0]
    assert act.no_eos == [c.finish_reason == "length" for c in trace.calls]
    assert [call.reward for call in trace.calls] == [1.0, 1.0, 1.0]


async def test_a_bundle_has_the_span_of_versions_that_sampled_each_answer():
    class Updated:
        """An engine whose weights change in the middle of the first of two answers."""

        async def sample(self, prompt_ids, gconfig):
            return (
                Generation((5, 6, 7), (-1.0, -2.0, -3.0), (3, 3, 4), "length"),
                Generation((8,), (-4.0,), (4,), "stop"),
            )

    observations, actions = asyncio.Queue(), asyncio.Queue()
    server = asyncio.ensure_future(serve(Updated(), observations, actions))
    await observations.put(("q", [1, 2], GCONFIG))
    act = await actions.get()
    server.cancel()
    assert (act.version_start, act.version_end) == ([3, 4], [4, 4])
    assert act.no_eos == [True, False]
    assert act.logprobs == [[0.0, -1.0, -2.0, -3.0], [0.0, -4.0]]


async def test_the_seeds_agent_and_environment_train_every_turn_with_its_own_reward(
    run, random_model_path
):
    workflow = QueueWorkflow(
        AgentAbstraction(
            "math-multi-turn",
            args={
                "gconfig": GCONFIG,
                "tokenizer_path": str(random_model_path),
                "turn_level_discount": 0.5,
                "num_turns": 3,
            },
        ),
        EnvServiceAbstraction("math-code-single-step", args={"solutions": {"q1": "7"}}),
    )
    traces = [
        (await run(workflow, {"query_id": "q1@0", "prompt": "3 + 4 = "}, rollout=i))[0]
        for i in range(2)
    ]
    assert [t.outcome for t in traces] == ["completed", "completed"]
    assert [len(t.calls) for t in traces] == [3, 3]
    assert all(call.reward is not None for t in traces for call in t.calls)
    one, two, three = traces[0].calls
    assert two.prompt_ids[: len(one.prompt_ids) + 4] == one.prompt_ids + one.completion_ids
    assert len(three.prompt_ids) > len(two.prompt_ids) + len(two.completion_ids)
    batch = build_batch(traces)
    assert (batch.sampled_tokens, batch.dropped_tokens) == (batch.trained_tokens, {})


async def test_rewards_of_turns_come_back_as_the_environment_gave_them(run):
    class TwoTurns(Agent):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            ids, found = prompt.data["packed_prompts"].tolist(), []
            for _ in range(2):
                await obs_queue.put((prompt.ids[0], ids, GCONFIG))
                act = await act_queue.get()
                _, reward, *_ = await env.step(None)
                found.append(trajectory(act, reward=reward))
                found[-1]["loss_mask"][0, : act.prompt_len] = 0
                ids = act.seqs[0] + [50]
            return found

    (trace,) = await run(QueueWorkflow(TwoTurns(), Counting), TASK)
    assert [call.reward for call in trace.calls] == [1.0, 2.0]
    assert trace.reward == 1.5


async def test_no_trajectory_rejects(run):
    async def nothing(act, env):
        return []

    (trace,) = await run(QueueWorkflow(Once(play=nothing), Counting), TASK, retries=2)
    assert (trace.outcome, len(trace.calls)) == ("rejected", 1)


async def test_observations_are_answered_in_order_and_as_they_were_put(run):
    class Parallel(Agent):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            ids = [40]
            for place in range(3):
                await obs_queue.put((str(place), ids, GCONFIG.new(max_new_tokens=6 - 2 * place)))
                ids.append(41)
            acts = [await act_queue.get() for _ in range(3)]
            assert [act.qid for act in acts] == ["0", "1", "2"]
            assert [act.prompt_len for act in acts] == [1, 2, 3]
            return [trajectory(act) for act in acts]

    (trace,) = await run(QueueWorkflow(Parallel(), Counting), TASK)
    assert trace.outcome == "completed", trace.error


@pytest.mark.parametrize(
    ("observation", "error"),
    [
        (("q", [1]), "put (qid, token_ids, gconfig)"),
        (("q", [1], {"n": 1}), "the last a GenerationHyperparameters"),
    ],
)
async def test_an_observation_that_is_none_stops_the_run(run, observation, error):
    class Wrong(Agent):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            await obs_queue.put(observation)

    with pytest.raises(FunctionError) as raised:
        await run(QueueWorkflow(Wrong(), Counting), TASK)
    assert error in str(raised.value)


async def test_an_answer_that_fails_ends_the_episode_instead_of_letting_it_wait(run):
    agent = Once()
    (trace,) = await run(QueueWorkflow(agent, Counting), {"input_ids": [1] * 400})
    assert trace.outcome == "workflow_error"
    assert "400 tokens" in trace.error


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.data.pop("rewards"), "has no rewards"),
        (
            lambda s: s.data.update(prompt_mask=s.data["prompt_mask"][1:]),
            "_mask .* 6 entries",
        ),
        (lambda s: s.seqlens.update(packed_logprobs=[[5]]), "has 6 entries, .* add up to 5"),
        (lambda s: s.seqlens.update(rewards=[[1], [1]]), "it must have one prompt"),
        (
            lambda s: (s.seqlens.update(rewards=[[1, 1]]), s.data.update(rewards=torch.ones(2))),
            "1 of packed_logprobs and 2 rewards",
        ),
        (
            lambda s: (
                s.seqlens.update(packed_logprobs=[[7]]),
                s.data.update(packed_logprobs=torch.zeros(7)),
            ),
            "packed_input_ids 7, prompt_mask 7, packed_logprobs 7; they must be L, L and L - 1",
        ),
    ],
)
async def test_a_sample_whose_lengths_do_not_agree_is_refused_with_them(run, spoil, message):
    async def play(act, env):
        sample = SequenceSample(
            ids=[act.qid],
            data={
                "packed_input_ids": torch.tensor(act.seqs[0]),
                "prompt_mask": torch.tensor([1] * 3 + [0] * 4),
                "packed_logprobs": torch.tensor(act.logprobs[0]),
                "rewards": torch.tensor([1.0]),
            },
            seqlens={
                "packed_input_ids": [[7]],
                "prompt_mask": [[7]],
                "packed_logprobs": [[6]],
                "rewards": [[1]],
            },
        )
        spoil(sample)
        return [sample]

    with pytest.raises(FunctionError, match=message):
        await run(QueueWorkflow(Once(play=play), Counting), TASK)


async def test_what_is_no_list_of_trajectories_stops_the_run(run):
    async def play(act, env):
        return None

    with pytest.raises(FunctionError, match=r"returned None .* empty to reject"):
        await run(QueueWorkflow(Once(play=play), Counting), TASK)


async def test_messages_make_the_prompt_that_a_chat_would(run):
    messages = [{"role": "user", "content": "hi"}]

    async def chat(task, model):
        await model(messages)
        return WorkflowOutput(reward=1.0)

    (chatted,) = await run(chat, max_tokens=4)
    (queued,) = await run(QueueWorkflow(Once(), Counting), {"messages": messages})
    assert queued.calls[0].prompt_ids == chatted.calls[0].prompt_ids
    assert queued.calls[0].completion_ids == chatted.calls[0].completion_ids


async def test_a_task_without_a_prompt_names_its_fields(run):
    with pytest.raises(FunctionError, match=r"none of input_ids, .* its fields are text"):
        await run(QueueWorkflow(Once(), Counting), {"text": "hi"})


async def test_messages_that_are_text_are_no_prompt(run):
    with pytest.raises(FunctionError, match=r"messages are text .*must be a list of messages"):
        await run(QueueWorkflow(Once(), Counting), {"messages": "hi"})


async def test_success_rate_and_reward_settings_apply_to_queue_agents(run):
    async def play(act, env):
        return [trajectory(act, reward=1.0)]

    traces = [
        (await run(QueueWorkflow(Once(play=play), Counting), TASK, rollout=i))[0] for i in range(2)
    ]
    easy = build_batch(traces, selection=Selection(success_rate=(0.05, 0.95)))
    assert easy.dropped_rollouts == {"success_rate_too_high": 2}
    shaped = build_batch(traces, selection=Selection(scale=5.0, bias=-0.5))
    assert shaped.rewards_R.tolist() == [2.5, 2.5]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (AgentAbstraction("nobody"), "there is no agent 'nobody' .registered: .*math-multi-turn"),
        (AgentAbstraction("math-multi-turn", {"turns": 2}), "does not take the arguments turns"),
        (AgentAbstraction("tests.areal.seed_agent:Nobody"), "has no function 'Nobody'"),
    ],
)
def test_a_name_or_argument_that_does_not_fit_is_refused_at_once(agent, message):
    with pytest.raises(ConfigError, match=message):
        QueueWorkflow(agent, Counting)


@pytest.mark.parametrize("agent", [Once, object()])
def test_what_is_no_agent_is_refused(agent):
    with pytest.raises(FunctionError, match="is not an agent"):
        QueueWorkflow(agent, Counting)


def test_a_name_means_one_class():
    register_agent("math-multi-turn", seed_agent.MathMultiTurnAgent)
    with pytest.raises(ConfigError, match=r"is .*MathMultiTurnAgent already; register .*Once"):
        register_agent("math-multi-turn", Once)


def test_the_file_selects_agent_and_environment_with_arguments(tmp_path, random_model_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "tuner:\n"
        "  imports: [tests.areal.seed_agent]\n"
        "  agent:\n"
        "    type: math-multi-turn\n"
        "    args:\n"
        "      gconfig: {max_new_tokens: 9}\n"
        f"      tokenizer_path: {random_model_path}\n"
        "  environment: {type: math-code-single-step, args: {solutions: {q1: '7'}}}\n"
    )
    workflow, judge, *_ = functions_of(file, ["tuner.agent.args.my_param=5.0"])
    assert judge is None
    agent = workflow._agent
    assert (agent.my_param, agent.gconfig.max_new_tokens, agent.num_turns) == (5.0, 9, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent": {"type": "a"}}, "tuner.agent is set without tuner.environment"),
        ({"environment": {"type": "e"}}, "tuner.environment is set without tuner.agent"),
        (
            {"agent": {"type": "a"}, "environment": {"type": "e"}, "workflow": "m:f"},
            "tuner.agent is 'a' and tuner.workflow is 'm:f': set one",
        ),
        ({"agent": {"args": {}}}, "tuner.agent.type"),
    ],
)
def test_half_a_selection_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings={"tuner": settings})


def test_modules_of_the_file_start_at_its_folder(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "tuner:\n"
        "  imports: [here.py, some.module]\n"
        "  agent: {type: 'here.py:Mine'}\n"
        "  environment: {type: 'some.module:Env'}\n"
    )
    config = load_config(file)
    assert config.tuner.imports == (str(tmp_path / "here.py"), "some.module")
    assert config.tuner.agent.type == f"{tmp_path / 'here.py'}:Mine"
    with pytest.raises(ConfigError, match=r"tuner.imports is .*there is no such file"):
        configured_agent(config.tuner)
