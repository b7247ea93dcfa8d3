"""Groups of which a part begins inside the others. Real gateway, engine and model."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.training.configured import training
from tuner.config.schema import BranchingSection
from tuner.gateway import SamplingDefaults
from tuner.rollouts import Rollouts
from tuner.rollouts.branching import Branching, PointSelector, stands_still
from tuner.tasks.functions import WorkflowOutput
from tuner.traces import Outcome, RolloutId, TokenTree, Trace, TraceStore
from tuner.training.batch import build_batch
from tuner.training.forks import Point
from tuner.training.scoring import row_advantages

DEFAULTS = SamplingDefaults(max_tokens=6)
TASK = {"question": "hi"}


async def talk(task, model):
    """Three turns; the reward is what the last answer's length says."""
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(3):
        answer = (await model(messages)).content
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"{turn}?"},
        ]
    return WorkflowOutput(response=answer, reward=float(len(answer)))


@dataclass(eq=False)
class At(PointSelector):
    """Points that a test names."""

    positions: Sequence[tuple[int, int, int]] = ()

    def points(self, group, count, dice, shares):
        ids = group.planned
        return [Point(ids[index], call, token) for index, call, token in self.positions]


def at(*positions: tuple[int, int, int], kind=At, repeat=6, **section) -> At:
    settings = BranchingSection(**{"trunks": 2, "ends": 3, **section})
    return kind(settings, repeat, positions=positions)


def ids_of(count: int) -> list[RolloutId]:
    return [RolloutId(1, 0, number) for number in range(count)]


async def grown(runner, where, store=None) -> list[Trace]:
    rollouts = Rollouts(runner, store, max_running=4)
    branching = Branching(where, 1, runner.gateway.engine.capabilities.can_go_on)

    async def run(ids, again):
        known = [] if store is None else rollouts.known("train", 1)
        known = [trace for trace in known if trace.id in ids]
        return await rollouts.run(dict.fromkeys(ids, TASK), DEFAULTS, known=known, again=again)

    return await branching.run(ids_of(where.repeat), run)


def logprobs(model, call) -> torch.Tensor:
    ids = torch.tensor([[*call.prompt_ids, *call.completion_ids]])
    with torch.no_grad():
        found = model(ids).logits[0].float().log_softmax(-1)
    places = torch.arange(len(call.prompt_ids) - 1, ids.shape[1] - 1)
    return found[places, torch.tensor(call.completion_ids)]


@pytest.mark.parametrize("token", [0, 2])
async def test_branches_are_their_trunk_up_to_the_point(make_runner, token):
    runner = make_runner(talk)
    traces = await grown(runner, at((0, 1, token), (1, 2, token)))
    assert [trace.id.rollout for trace in traces] == list(range(6))
    assert all(trace.outcome is Outcome.COMPLETED for trace in traces)
    for trace, trunk, calls in ((traces[2], 0, 1), (traces[3], 0, 1), (traces[4], 1, 2)):
        old = traces[trunk].calls
        assert trace.origin is not None
        assert (trace.origin.rollout, trace.origin.position) == (
            traces[trunk].id,
            (calls, token),
        )
        for mine, his in zip(trace.calls[:calls], old, strict=False):
            assert mine.id == his.id
            assert mine.completion_ids == his.completion_ids
            assert mine.logprobs == his.logprobs
            assert mine.replayed == len(his.completion_ids)
        there = trace.calls[calls]
        assert there.prompt_ids == old[calls].prompt_ids
        assert there.completion_ids[:token] == old[calls].completion_ids[:token]
        assert there.replayed == token
    assert traces[2].calls[1].completion_ids != traces[3].calls[1].completion_ids
    model = runner.gateway.engine._model
    for call in (call for trace in traces for call in trace.calls):
        error = logprobs(model, call) - torch.tensor(call.logprobs)
        assert float(error.abs().max()) < 1e-5


async def test_each_token_is_sampled_trained_and_computed_once(make_runner):
    runner = make_runner(talk)
    before = runner.gateway.engine.stats.sampled_tokens
    traces = await grown(runner, at((0, 1, 2), (1, 2, 0)))
    batch = build_batch(traces)
    assert batch.sampled_tokens == runner.gateway.engine.stats.sampled_tokens - before
    assert batch.trained_tokens == batch.sampled_tokens
    assert batch.replayed_tokens == sum(c.replayed for t in traces for c in t.calls) > 0
    assert batch.dropped_tokens == {}
    tree = TokenTree.build(batch.rows)
    everything = [call for trace in traces for call in trace.calls]
    assert tree.unique_tokens == TokenTree.build(everything).unique_tokens


async def test_siblings_are_compared_at_their_point(make_runner):
    traces = await grown(make_runner(talk), at((0, 1, 2), (1, 2, 0)))
    rewards = [3.0, 5.0, 9.0, 6.0, 5.0, 8.0]
    traces = [replace(t, reward=r) for t, r in zip(traces, rewards, strict=True)]
    batch = build_batch(traces)
    found = row_advantages(batch, training(total_steps=1, advantage="tree", kl="none"))
    value = {0: (3 + 9 + 6) / 3, 1: (5 + 5 + 8) / 3}
    by_row = {(row.rollout, row.place): one for row, one in zip(batch.rows, found, strict=True)}
    assert by_row[0, 0].tolist() == pytest.approx([value[0] - value[1]] * len(by_row[0, 0]))
    inside = by_row[0, 1].tolist()
    assert inside[:2] == pytest.approx([value[0] - value[1]] * 2)
    assert inside[2:] == pytest.approx([(3 - 7.5) / 3] * (len(inside) - 2))
    assert by_row[2, 1].tolist() == pytest.approx([(9 - 4.5) / 3] * len(by_row[2, 1]))
    assert (2, 0) not in by_row


async def test_nothing_begins_where_there_is_no_such_point(make_runner):
    traces = await grown(make_runner(talk), at((0, 3, 0), (1, 1, 99)))
    assert [trace.id.rollout for trace in traces] == [0, 1]
    assert all(trace.origin is None for trace in traces)


class InTurn(At):
    """The first of its points in the first round, the second in the second."""

    def points(self, group, count, dice, shares):
        index, call, token = self.positions[len(group.planned) > 2]
        return [Point(group.planned[index], call, token)]


async def test_rounds_branch_from_branches(make_runner):
    where = at((0, 1, 0), (2, 2, 0), kind=InTurn, rounds=2)
    traces = await grown(make_runner(talk), where)
    origins = {t.id.rollout: t.origin.rollout.rollout for t in traces if t.origin is not None}
    assert origins == {2: 0, 3: 0, 4: 2, 5: 2}
    deep = traces[4]
    assert [call.replayed == len(call.completion_ids) for call in deep.calls] == [True, True, False]
    assert deep.calls[1].completion_ids == traces[2].calls[1].completion_ids


async def test_a_point_in_what_was_given_is_one_of_the_rollout_that_sampled_it(make_runner):
    where = at((0, 2, 0), (2, 1, 0), kind=InTurn, rounds=2)
    traces = await grown(make_runner(talk), where)
    assert traces[4].origin.rollout == RolloutId(1, 0, 0)
    assert traces[4].origin.position == (1, 0)


async def test_what_diverges_is_left_out_or_goes_on(make_runner):
    seen = []

    async def forgetful(task, model):
        seen.append(1)
        first = (await model([{"role": "user", "content": "hi"}])).content
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": f"run {len(seen)}"},
        ]
        second = (await model(messages)).content
        await model([*messages, {"role": "assistant", "content": second}, messages[0]])
        return WorkflowOutput(response=second, reward=1.0)

    dropped = await grown(make_runner(forgetful), at((0, 2, 0), repeat=4))
    assert [trace.outcome for trace in dropped[2:]] == [Outcome.DIVERGED] * 2
    assert "has diverged at call 2: messages[2].content is 'run " in dropped[2].error
    batch = build_batch(dropped)
    assert batch.dropped_rollouts == {"diverged": 2}
    seen.clear()
    runner = make_runner(forgetful)
    went_on = await grown(runner, at((0, 2, 0), repeat=4, on_divergence="sample"))
    assert [trace.outcome for trace in went_on] == [Outcome.COMPLETED] * 4
    assert went_on[2].origin.position == (1, 0)
    assert went_on[2].calls[0].replayed
    assert not went_on[2].calls[1].replayed


async def test_known_branches_are_not_run_again(make_runner, tmp_path):
    store = TraceStore(tmp_path)
    where = at((0, 1, 2), (1, 2, 0))
    first = await grown(make_runner(talk), where, store)
    lines = (tmp_path / "step_000001.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "step_000001.jsonl").write_text("".join(lines[:4]))
    again = await grown(make_runner(talk), where, TraceStore(tmp_path))
    assert ids_and_tokens(again) == ids_and_tokens(first)


def ids_and_tokens(traces):
    return [(t.id, t.origin, [(c.id, c.completion_ids) for c in t.calls]) for t in traces]


async def test_a_point_is_where_nothing_else_is_in_flight(make_runner):
    async def crowd(task, model):
        async def ask(content):
            return (await model([{"role": "user", "content": content}])).content

        first = await ask("one")
        found = await asyncio.gather(ask("two"), ask("three"))
        await ask("four")
        return WorkflowOutput(response=first + found[0], reward=1.0)

    traces = await grown(make_runner(crowd), at(repeat=3))
    still = [
        [stands_still(t, calls, token) for token in (0, 1)] for t in traces for calls in range(4)
    ]
    assert still[:4] == [[True, True], [True, False], [False, False], [True, True]]
