"""Token-level workflows: what they generate with, what they return, and what becomes of it."""

import asyncio
import threading

import pytest
import torch

from tests.areal.seed_search import GroupedSearchAgentWorkflow, SearchAgentWorkflow
from tests.kit.builders import call
from tests.training.configured import training
from tuner.areal import (
    GenerationHyperparameters,
    ModelRequest,
    RolloutWorkflow,
    SessionEngine,
    TokenWorkflow,
    concat_padded_tensors,
    tensor_container_to,
)
from tuner.areal.trajectories import Trajectory, settle
from tuner.errors import ConfigError, FunctionError
from tuner.gateway.request_error import RequestError
from tuner.tasks.functions import WorkflowOutput
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer

GCONFIG = GenerationHyperparameters(max_new_tokens=5)
PROMPT = [40, 41, 42]
TOOL = [50, 51]


class TwoTurns(RolloutWorkflow):
    """Prompt, answer, observation, answer; `change` may spoil what it returns."""

    def __init__(self, change=lambda tensors, responses: tensors, reward=1.0, gconfig=GCONFIG):
        self.change = change
        self.reward = reward
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        ids, logprobs, mask, responses = list(PROMPT), [0.0] * 3, [0] * 3, []
        for observation in (TOOL, []):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
            responses.append(response)
            ids += response.output_tokens + observation
            logprobs += response.output_logprobs + [0.0] * len(observation)
            mask += [1] * response.output_len + [0] * len(observation)
        tensors = {
            "input_ids": torch.tensor([ids]),
            "logprobs": torch.tensor([logprobs]),
            "loss_mask": torch.tensor([mask]),
            "rewards": torch.tensor([self.reward]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        }
        return self.change(tensors, responses)


def changing(**changes):
    """Returns the tensors with some of them made anew from what they were."""
    return lambda tensors, responses: tensors | {k: f(tensors[k]) for k, f in changes.items()}


async def test_every_answer_is_a_call_with_exact_ids_and_the_mask_has_a_row_per_stretch(run):
    seen = []
    (trace,) = await run(TokenWorkflow(TwoTurns(lambda t, r: seen.extend(r) or t)))
    assert trace.outcome == "completed"
    assert trace.reward == 1.0
    assert [list(call.prompt_ids) for call in trace.calls] == [r.input_tokens for r in seen]
    assert [list(call.completion_ids) for call in trace.calls] == [r.output_tokens for r in seen]
    assert [list(call.logprobs) for call in trace.calls] == [r.output_logprobs for r in seen]
    assert [list(call.versions) for call in trace.calls] == [r.output_versions for r in seen]
    assert trace.calls[1].prompt_ids == (*PROMPT, *trace.calls[0].completion_ids, *TOOL)
    assert not any(call.excluded or call.masked or call.reward for call in trace.calls)


async def test_the_seeds_search_agent_is_a_rollout(run, tokenizer):
    workflow = SearchAgentWorkflow(
        GenerationHyperparameters(max_new_tokens=5, stop=["</answer>", "</search>"]),
        tokenizer,
        max_tokens=64,
        max_turns=3,
        verbose=False,
    )
    (trace,) = await run(TokenWorkflow(workflow), {"question": "who?", "answer": ["me"]})
    assert trace.outcome == "completed"
    assert len(trace.calls) > 1
    assert trace.calls[0].sampling.stop == ("</answer>", "</search>")


async def test_the_seeds_double_append_is_refused_with_the_lengths(run):
    def twice(tensors, responses):
        ids = [*PROMPT, *responses[0].output_tokens, *responses[0].output_tokens]
        return tensors | {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        }

    with pytest.raises(FunctionError, match="input_ids 13, attention_mask 13, loss_mask 15, logpr"):
        await run(TokenWorkflow(TwoTurns(twice)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, r: 1.0, r"returned 1.0 \(float\); it must return a dict of tensors"),
        (lambda t, r: {"input_ids": t["input_ids"]}, "has no attention_mask, loss_mask"),
        (lambda t, r: t | {"values": t["logprobs"]}, "has values; its keys are input_ids"),
        (lambda t, r: {k: v[0] for k, v in t.items()}, r"rewards \[\]; tokens have the shape"),
        (changing(logprobs=lambda x: x[:, 1:]), "do not agree: input_ids 15, .* logprobs 14"),
        (changing(rewards=lambda x: x.repeat(2)), "numbers of trajectories: .* rewards 2"),
        (changing(rewards=lambda x: x * torch.nan), "not finite"),
        (changing(logprobs=lambda x: x * torch.inf), "not finite"),
        (changing(attention_mask=lambda x: x.flip(1).cumsum(1) > 2), "padding before tokens"),
        (changing(attention_mask=lambda x: x.cumsum(1) < 14), "loss_mask .* is 1 on padding"),
        (changing(loss_mask=torch.ones_like), r"token 0 \(id 40\), but no call .* sampled it"),
        (changing(input_ids=lambda x: x.index_fill(1, torch.tensor([1]), 7)), "no call"),
        (changing(logprobs=lambda x: x.roll(-1, 1)), "shifted against each other"),
        (lambda t, r: t | {"versions": t["loss_mask"] + 3}, "weights of version 0 sampled it"),
    ],
)
async def test_what_cannot_be_trained_as_it_says_is_refused(run, change, message):
    with pytest.raises(FunctionError, match=message):
        await run(TokenWorkflow(TwoTurns(change)))


async def test_versions_may_be_told(run):
    def told(tensors, responses):
        return tensors | {"versions": tensors["loss_mask"] - 1}

    (trace,) = await run(TokenWorkflow(TwoTurns(told)))
    assert trace.outcome == "completed"


async def test_none_rejects_and_is_neither_retried_nor_trained(run):
    traces = await run(TokenWorkflow(TwoTurns(lambda t, r: None)), retries=2)
    (trace,) = traces
    assert (trace.outcome, trace.reward) == ("rejected", None)
    assert trace.error == "TwoTurns.arun_episode returned None"
    batch = build_batch(traces, penalty=-1.0)
    assert batch.dropped_rollouts == {"rejected": 1}
    assert batch.dropped_tokens == {"rejected": trace.sampled_tokens}


async def test_an_episode_that_raises_is_a_workflow_error(run):
    def fail(tensors, responses):
        raise ConnectionError("the retrieval server is gone")

    (trace,) = await run(TokenWorkflow(TwoTurns(fail)))
    assert (trace.outcome, len(trace.calls)) == ("workflow_error", 2)


def unmask(*places):
    def change(mask):
        mask = mask.clone()
        mask[0, list(places)] = 0
        return mask

    return changing(loss_mask=change)


async def test_masked_tokens_are_counted_and_what_is_left_is_trained_as_it_was_sampled(
    run, random_parts
):
    gconfig = GCONFIG.new(temperature=0.7, top_k=20)
    places = {3, 5, 12}  # the first and third token of the first answer, the third of the second
    traces = [
        trace
        for i in range(2)
        for trace in await run(
            TokenWorkflow(TwoTurns(unmask(*places), reward=float(i), gconfig=gconfig)), rollout=i
        )
    ]
    assert [call.masked for call in traces[0].calls] == [((0, 1), (2, 3)), ((2, 3),)]
    batch = build_batch(traces)
    assert batch.dropped_tokens == {"masked": 6}
    assert batch.trained_tokens == batch.sampled_tokens - 6
    assert [len(row.completion_ids) for row in batch.rows[:4]] == [1, 2, 2, 2]
    recomputed = PolicyTrainer(random_parts[0], training(total_steps=1)).compute_logp(batch)
    recorded = [torch.tensor(row.logprobs) for row in batch.rows]
    torch.testing.assert_close(torch.cat(recomputed), torch.cat(recorded), atol=1e-5, rtol=0)


async def test_a_call_that_no_trajectory_trains_is_excluded(run):
    (trace,) = await run(TokenWorkflow(TwoTurns(unmask(*range(10)))))
    assert [call.excluded for call in trace.calls] == [True, False]


async def test_an_answer_that_was_cut_is_trained_up_to_the_cut(run):
    class Cutting:
        async def arun_episode(self, engine, data):
            first = await engine.agenerate(ModelRequest(PROMPT, GCONFIG))
            ids = PROMPT + first.output_tokens[:2] + TOOL
            second = await engine.agenerate(ModelRequest(ids, GCONFIG))
            logprobs = [0.0] * 3 + first.output_logprobs[:2] + [0.0] * 2 + second.output_logprobs
            mask = [0] * 3 + [1] * 2 + [0] * 2 + [1] * second.output_len
            return {
                "input_ids": torch.tensor([ids + second.output_tokens]),
                "logprobs": torch.tensor([logprobs]),
                "loss_mask": torch.tensor([mask]),
                "rewards": torch.tensor([1.0]),
                "attention_mask": torch.ones(1, len(mask)),
            }

    (trace,) = await run(TokenWorkflow(Cutting()))
    assert [call.masked for call in trace.calls] == [((2, 5),), ()]


async def test_trajectories_of_one_episode_have_the_rewards_of_their_own_calls(run, tokenizer):
    class Forked:
        """Two samples of one prompt, made to be equal, with different rewards."""

        async def arun_episode(self, engine, data):
            gconfig = GCONFIG.new(top_k=1)
            responses = await asyncio.gather(
                *[engine.agenerate(ModelRequest(PROMPT, gconfig)) for _ in range(2)]
            )
            return concat_padded_tensors(
                [single(response, reward=i) for i, response in enumerate(responses)]
            )

    (trace,) = await run(TokenWorkflow(Forked()))
    assert trace.calls[0].completion_ids == trace.calls[1].completion_ids
    assert [call.reward for call in trace.calls] == [0.0, 1.0]
    assert trace.reward == 0.5


def single(response, reward):
    length = response.input_len + response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "logprobs": torch.tensor([[0.0] * response.input_len + response.output_logprobs]),
        "loss_mask": torch.tensor([[0] * response.input_len + [1] * response.output_len]),
        "rewards": torch.tensor([float(reward)]),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
    }


class Twice:
    """The same answer in two trajectories."""

    def __init__(self, *rewards):
        self.rewards = rewards

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(PROMPT, GCONFIG))
        return concat_padded_tensors([single(response, reward) for reward in self.rewards])


async def test_an_answer_in_two_trajectories_is_trained_once(run):
    (trace,) = await run(TokenWorkflow(Twice(1, 1)))
    assert [(call.reward, call.excluded, call.masked) for call in trace.calls] == [(1.0, False, ())]


async def test_an_answer_in_two_trajectories_cannot_have_two_rewards(run):
    with pytest.raises(FunctionError, match=r"train the same call .* rewards 1 and 0"):
        await run(TokenWorkflow(Twice(1, 0)))


async def test_a_users_own_group_is_one_dict_of_padded_trajectories(run, tokenizer):
    workflow = GroupedSearchAgentWorkflow(GCONFIG, tokenizer, 64, 2, group_size=3, verbose=False)
    (trace,) = await run(TokenWorkflow(workflow), {"question": "who?", "answer": ["me"]})
    assert trace.outcome == "completed"
    first = [call for call in trace.calls if call.prompt_ids == trace.calls[0].prompt_ids]
    assert len({call.completion_ids for call in first}) == 3


async def test_tokens_and_chat_sample_the_same_from_the_same_seed(run, tokenizer):
    messages = [{"role": "user", "content": "hi"}]

    async def chat(task, model):
        await model(messages)
        return WorkflowOutput(reward=1.0)

    class Tokens:
        async def arun_episode(self, engine, data):
            text = engine.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            gconfig = GenerationHyperparameters(max_new_tokens=6)
            return single(await engine.agenerate(ModelRequest(prompt, gconfig)), 1)

    (chatted,), (tokens,) = await run(chat), await run(TokenWorkflow(Tokens()))
    for name in ("prompt_ids", "completion_ids", "logprobs", "versions", "sampling"):
        assert getattr(chatted.calls[0], name) == getattr(tokens.calls[0], name)


def test_padding_is_on_the_right_and_masked():
    short = {"input_ids": torch.tensor([[1, 2]]), "versions": torch.tensor([[-1, 0]])}
    long = {"input_ids": torch.tensor([[3, 4, 5]]), "versions": torch.tensor([[-1, 0, 0]])}
    mask = [{"attention_mask": torch.ones(1, n, dtype=torch.bool)} for n in (2, 3)]
    rewards = [{"rewards": torch.tensor([r])} for r in (0.5, 1.5)]
    joined = concat_padded_tensors(
        [short | mask[0] | rewards[0], None, long | mask[1] | rewards[1]], pad_value=9
    )
    assert joined["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert joined["versions"].tolist() == [[-1, 0, -1], [-1, 0, 0]]
    assert joined["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert joined["rewards"].tolist() == [0.5, 1.5]
    assert concat_padded_tensors([None, None]) is None


def test_joining_what_does_not_fit_together_is_refused():
    with pytest.raises(FunctionError, match="dict 0 has the keys a, dict 1 has b"):
        concat_padded_tensors([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(FunctionError, match="no trajectories"):
        concat_padded_tensors([])


def test_containers_are_moved_whole():
    moved = tensor_container_to({"a": [torch.ones(1)], "b": ("x", torch.ones(2))}, "meta")
    assert moved["a"][0].device.type == moved["b"][1].device.type == "meta"
    assert moved["b"][0] == "x"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ModelRequest(PROMPT, GCONFIG.new(n=2)), ConfigError, "gives one answer"),
        (ModelRequest(PROMPT, GCONFIG.new(stop_token_ids=[7])), ConfigError, r"has \[7\], but"),
        (ModelRequest(PROMPT, GCONFIG.new(max_tokens=3)), ConfigError, "max_tokens is 3: no room"),
        (ModelRequest(PROMPT, GCONFIG.new(top_p=0.0)), ConfigError, "top_p is 0.0"),
        (ModelRequest([], GCONFIG), RequestError, "prompt is empty"),
        (ModelRequest([9999], GCONFIG), RequestError, "token id 9999"),
        (ModelRequest([1] * 300, GCONFIG), RequestError, "300 tokens"),
    ],
)
async def test_requests_that_cannot_be_honoured_are_refused(make_gateway, request_, error, message):
    engine = SessionEngine(make_gateway().open_session("s"))
    with pytest.raises(error, match=message):
        await engine.agenerate(request_)


async def test_settings_reach_the_sampler(make_gateway, tokenizer):
    session = make_gateway().open_session("s")
    gconfig = GenerationHyperparameters(
        max_new_tokens=9, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop="x"
    )
    gconfig = gconfig.new(stop_token_ids=[tokenizer.eos_token_id])
    await SessionEngine(session).agenerate(ModelRequest(PROMPT, gconfig))
    await SessionEngine(session).agenerate(ModelRequest(PROMPT, gconfig.new(greedy=True)))
    first, greedy = (call.sampling for call in session.calls)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (4, 0.5, 0.9, 3)
    assert first.stop == ("x",)
    assert greedy.temperature == 0


async def test_a_request_keeps_the_prompt_that_it_was_made_with():
    ids = list(PROMPT)
    request = ModelRequest(ids, GCONFIG)
    ids.append(1)
    assert request.input_ids == PROMPT


async def test_other_event_loops_may_generate(make_gateway):
    engine = SessionEngine(make_gateway().open_session("s"))
    here = await engine.agenerate(ModelRequest(PROMPT, GCONFIG))
    elsewhere = []

    def other():
        elsewhere.append(asyncio.run(engine.agenerate(ModelRequest(PROMPT, GCONFIG))))

    thread = threading.Thread(target=other)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert here.output_len == elsewhere[0].output_len == 5


@pytest.mark.parametrize("wrong", [object(), TwoTurns])
def test_what_is_no_workflow_is_refused(wrong):
    with pytest.raises(FunctionError, match=r"arun_episode|pass an instance"):
        TokenWorkflow(wrong)


def test_numbers_that_make_no_sense_are_refused_by_name():
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        GenerationHyperparameters(max_new_tokens=0)


def test_a_token_that_two_calls_may_have_sampled_belongs_to_the_one_that_went_on_from_there():
    calls = [call("a", [1], [5, 6, 7], [-1, -2, -3]), call("b", [1, 5, 6], [7, 8], [-4, -5])]
    row = Trajectory((1, 5, 6, 7, 8), (False,) + (True,) * 4, (0, -1, -2, -4, -5), None, 1.0)
    owners, trained = settle([row], calls, "test")
    assert owners == ((None, 0, 0, 1, 1),)
    assert trained == ((0, frozenset({0, 1})), (0, frozenset({0, 1})))
