"""`@tuner.recorded`: results of functions are in the trace, and are given back within a script."""

import asyncio
import enum
import json
import logging
import threading

import pytest

import tuner
from tests.rollouts.test_runner import DEFAULTS, MESSAGES, ask
from tuner.errors import FunctionError
from tuner.rollouts.runner import BranchStart
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces import FunctionResult, Outcome, RolloutId
from tuner.traces.store import trace_from_json, trace_to_json

RAN: list[tuple] = []


@pytest.fixture(autouse=True)
def nothing_has_run():
    RAN.clear()


@tuner.recorded
async def search(query, *, limit=3):
    RAN.append(("search", query, limit))
    return [query] * limit


@tuner.recorded
def price(item: dict) -> dict:
    RAN.append(("price", item["name"]))
    found = {"price": len(RAN)}
    item["name"] = "changed"
    return found


async def run(runner, first=None, calls=None):
    """A rollout; one that begins inside of `first`, behind so many calls, where that is given."""
    again = None
    if first is not None:
        behind = len(first.calls) if calls is None else calls
        again = BranchStart(first, (first.id, first.attempt), behind)
    (trace,) = await runner.run({"question": "hi"}, RolloutId(1, 0, 0), DEFAULTS, again=again)
    return trace


async def workflow(task, model):
    first = await search("a")
    await ask(model)
    second = await search("a", limit=1)
    third = await search(query="a")
    await ask(model)
    return WorkflowOutput(response=json.dumps([first, second, third]))


async def judge(task, response):
    return JudgeOutput(reward=price({"name": "pen"})["price"])


async def test_results_of_workflow_and_judge_are_in_the_trace(make_runner):
    trace = await run(make_runner(workflow, judge))
    here = "test_recorded_functions"
    three, one = {"query": "a", "limit": 3}, {"query": "a", "limit": 1}
    assert trace.results == (
        FunctionResult(f"{here}.search", three, 0, ["a"] * 3, 0),
        FunctionResult(f"{here}.search", one, 0, ["a"], 1),
        FunctionResult(f"{here}.search", three, 1, ["a"] * 3, 1),
        FunctionResult(f"{here}.price", {"item": {"name": "pen"}}, 0, {"price": 4}, 2),
    )
    assert trace_from_json(json.loads(json.dumps(trace_to_json(trace)))) == trace


async def test_within_a_script_functions_do_not_run(make_runner):
    first = await run(make_runner(workflow, judge))
    RAN.clear()
    again = await run(make_runner(workflow, judge), first)
    assert RAN == []
    assert (again.response, again.reward) == (first.response, 4.0)
    assert again.results == first.results


@pytest.mark.parametrize(("calls", "runs"), [(0, 3), (1, 1), (2, 0)])
async def test_behind_the_point_functions_run(calls, runs, make_runner):
    """What was there before the call at the point was committed is given back: here at call 0 the
    first search, at call 1 all of them, at the end the judge's price, too."""
    first = await run(make_runner(workflow, judge))
    RAN.clear()
    await run(make_runner(workflow, judge), first, calls)
    assert len(RAN) == runs


async def test_an_agent_that_has_diverged_runs_its_functions(make_runner):
    first = await run(make_runner(workflow, judge))
    RAN.clear()

    async def other(task, model):
        await search("a")
        await model([*MESSAGES, *MESSAGES])
        await search("a")
        return WorkflowOutput(reward=1.0)

    await run(make_runner(other), first)
    assert RAN == [("search", "a", 3)]


async def test_plain_workflows_and_threads_of_asyncio_belong_to_their_rollout(make_runner):
    def plain(task, model):
        return WorkflowOutput(reward=price({"name": "ink"})["price"])

    async def threaded(task, model):
        await asyncio.gather(*(asyncio.to_thread(price, {"name": name}) for name in "ab"))
        await ask(model)
        return WorkflowOutput(reward=1.0)

    plain_trace, threaded_trace = [await run(make_runner(w)) for w in (plain, threaded)]
    assert plain_trace.outcome is Outcome.NO_CALLS
    assert [result.arguments["item"]["name"] for result in plain_trace.results] == ["ink"]
    names = [result.arguments["item"]["name"] for result in threaded_trace.results]
    assert sorted(names) == ["a", "b"]


async def test_rollouts_at_the_same_time_keep_their_own(make_runner):
    async def own(task, model):
        await asyncio.sleep(0)
        await search(task["question"])
        await ask(model)
        return WorkflowOutput(reward=1.0)

    runner = make_runner(own)
    traces = await asyncio.gather(
        *(runner.run({"question": q}, RolloutId(1, 0, i), DEFAULTS) for i, q in enumerate("xy"))
    )
    assert [trace.results[0].value for (trace,) in traces] == [["x"] * 3, ["y"] * 3]


async def test_what_raised_is_not_recorded_and_runs_again(make_runner):
    tries = []

    @tuner.recorded
    def flaky():
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("no")
        return len(tries)

    async def patient(task, model):
        with pytest.raises(ValueError, match="no"):
            flaky()
        flaky()
        await ask(model)
        return WorkflowOutput(reward=1.0)

    first = await run(make_runner(patient))
    assert [(result.occurrence, result.value) for result in first.results] == [(1, 2)]
    tries.clear()
    again = await run(make_runner(patient), first)
    assert again.outcome is Outcome.COMPLETED
    assert len(tries) == 1


async def test_what_is_given_back_may_be_changed(make_runner):
    async def greedy(task, model):
        results = [await search("a"), await search("a")]
        for result in results:
            result.append("more")
        await ask(model)
        return WorkflowOutput(reward=1.0)

    first = await run(make_runner(greedy))
    again = await run(make_runner(greedy), first)
    assert (
        [one.value for one in again.results] == [["a"] * 3] * 2 == [r.value for r in first.results]
    )


class Tools:
    """Whose methods are recorded; an object is no argument that could be compared."""

    @tuner.recorded
    async def double(self, number: int) -> int:
        RAN.append(("double", number))
        return 2 * number

    @staticmethod
    @tuner.recorded
    def fixed() -> int:
        RAN.append(("fixed",))
        return 7


async def test_methods(make_runner):
    async def methods(task, model):
        return WorkflowOutput(response=[await Tools().double(4), Tools.fixed()], reward=1.0)

    first = await run(make_runner(methods))
    RAN.clear()
    again = await run(make_runner(methods), first)
    assert RAN == []
    assert again.results == first.results
    assert again.results[0].arguments == {"self": "<not JSON>", "number": 4}


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ((1, 2), r"\(1, 2\) \(tuple\)"),
        ({"a": [1, {2}]}, r"\{2\} \(set\) at \['a'\]\[1\]"),
        ({1: "a"}, r"\{1: 'a'\} \(dict\)"),
        (float("nan"), r"nan \(float\)"),
        (Colour.RED, r"\(Colour\)"),
    ],
)
async def test_a_result_that_is_no_json_is_an_error_that_names_it(value, named, make_runner):
    @tuner.recorded
    def tool():
        return value

    async def workflow(task, model):
        tool()
        return WorkflowOutput(reward=1.0)

    with pytest.raises(FunctionError, match=rf"test_recorded_functions\.\S*tool is .*{named}"):
        await run(make_runner(workflow))
    assert tool() is value  # outside of a rollout it is the bare function


def test_what_cannot_be_decorated_is_refused():
    def yields():
        yield 1

    for given, why in (
        (yields, "yields; it must return"),
        (logging.Logger, "is for functions"),
        (staticmethod(test_methods), "under @staticmethod"),
    ):
        with pytest.raises(FunctionError, match=why):
            tuner.recorded(given)


async def test_threads_that_the_agent_makes_itself_are_outside(make_runner):
    async def workflow(task, model):
        thread = threading.Thread(target=lambda: price({"name": "pen"}))
        thread.start()
        await asyncio.to_thread(thread.join)
        return WorkflowOutput(reward=1.0)

    assert (await run(make_runner(workflow))).results == ()
    assert RAN == [("price", "pen")]
