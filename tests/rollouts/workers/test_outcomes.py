"""What comes of a rollout is the same, whoever calls the functions: this process, or workers."""

import asyncio
import importlib
import json
import sys
from contextlib import aclosing
from dataclasses import replace

import pytest

import tuner
from tests.rollouts.workers import functions
from tests.rollouts.workers.conftest import ByPort, pool_of
from tests.rollouts.workers.functions import DOES, OUTCOMES, STOPPED_AT, judge, workflow
from tuner.errors import FunctionError
from tuner.gateway import SamplingDefaults
from tuner.gateway.service import StreamReply
from tuner.rollouts.runner import BranchStart, Panel
from tuner.runs.auxiliary import AuxiliaryModels
from tuner.tasks.loading import PICKLE, ship
from tuner.traces import Outcome, RolloutId

pytestmark = pytest.mark.usefixtures("forked_workers")

DEFAULTS = SamplingDefaults(max_tokens=4)
LIMIT = 3  # calls of a rollout
ID = RolloutId(1, 0, 0)


async def all_of(runner):
    """The traces of every deed, by its name."""
    names = list(DOES)
    found = await asyncio.gather(
        *(runner.run({"do": do}, RolloutId(1, n, 0), DEFAULTS) for n, do in enumerate(names))
    )
    return dict(zip(names, found, strict=True))


def told(trace):
    """A trace without its times."""
    calls = [replace(call, started=0, seconds=0) for call in trace.calls]
    return replace(trace, calls=tuple(calls), seconds={}, started=0)


async def here_and_there(make_runner, *functions, run, **more):
    """What `run` makes of a runner of each kind."""
    here = await run(make_runner(*functions, **more))
    async with pool_of(1, *functions) as pool:
        return here, await run(make_runner(*functions, workers=pool, **more))


def held(gateway):
    """Whoever stops reading is waited for: its stream ends behind the first words."""
    handle = gateway.handle

    async def begun(events):
        async with aclosing(events):
            async for event in events:
                yield event
                delta = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]
                if delta.get("content"):
                    await asyncio.Event().wait()

    async def answer(method, path, headers, body):
        reply = await handle(method, path, headers, body)
        if isinstance(reply, StreamReply) and json.loads(body).get("max_tokens") == STOPPED_AT:
            return replace(reply, events=begun(reply.events))
        return reply

    gateway.handle = answer


@pytest.fixture(scope="module", params=[None, ByPort()], ids=["by a socket", "by a port"])
def both(request, make_runners):
    """The traces of all deeds here, and in two workers."""

    async def run():
        here = await all_of(make_runners(workflow, judge, retries=1, calls=LIMIT))
        async with pool_of(2, workflow, judge, placing=request.param) as pool:
            runner = make_runners(workflow, judge, retries=1, calls=LIMIT, workers=pool)
            held(runner.gateway)
            return here, await all_of(runner)

    return asyncio.run(run())


@pytest.mark.parametrize("do", DOES)
def test_a_worker_leaves_the_trace_that_this_process_would(both, do):
    here, there = ([told(trace) for trace in found[do]] for found in both)
    if do == "stops reading":  # how much was sampled meanwhile is a matter of time
        here, there = (
            [replace(trace, calls=(), metrics={}) for trace in found] for found in (here, there)
        )
    assert there == here
    if do in OUTCOMES:
        assert there[-1].outcome is OUTCOMES[do]


def test_the_deeds_are_what_their_names_say(both):
    _, there = both
    assert there["credit"][0].calls[0].reward == 0.25
    assert there["excludes"][0].calls[0].excluded
    assert [one.value for one in there["recorded"][0].results] == [
        {"found": "A"},
        {"found": "A"},
        {"found": "B"},
    ]
    assert there["stops reading"][0].calls[-1].undelivered
    assert there["opaque"][0].response == "opaque 0.5"
    assert len(there["raises"]) == 2  # tried again
    assert "tuner.max_calls" in there["over limits"][-1].error


async def test_a_judge_says_how_to_do_better_in_a_worker_too(make_runner):
    async def run(runner):
        return [told(trace) for trace in await runner.run({}, ID, DEFAULTS)]

    both = (functions.improving, functions.critical)
    here, there = await here_and_there(
        make_runner, *both, run=run, feedback_attempts=2, pass_reward=99.0
    )
    assert there == here
    assert there[0].metrics["feedback_attempts"] == 2
    assert there[0].response == "better than better than first"


async def test_a_branch_is_given_calls_and_results_back_in_a_worker_too(make_runner):
    async def run(runner):
        (trunk,) = await runner.run({"do": "recorded"}, ID, DEFAULTS)
        again = BranchStart(trunk, (ID, 1), calls=1)
        (branch,) = await runner.run({"do": "recorded"}, RolloutId(1, 0, 1), DEFAULTS, again=again)
        assert branch.calls[0].given_back
        assert branch.origin.diverged is None
        return told(trunk), told(branch)

    here, there = await here_and_there(make_runner, workflow, judge, run=run)
    assert there == here


async def test_frozen_models_are_reached_from_a_worker_by_both_functions(make_runner):
    async def run(runner):
        frozen = AuxiliaryModels("plain")
        frozen.add_local("frozen", make_runner(workflow).gateway, DEFAULTS)
        runner = replace(runner, auxiliary_models=frozen.opened)
        return [told(trace) for trace in await runner.run({}, ID, DEFAULTS)]

    here, there = await here_and_there(
        make_runner, functions.helped, functions.helped_judge, run=run
    )
    assert there == here
    assert there[0].metrics == {"seen": 0}


async def test_a_group_is_judged_where_its_responses_are(make_runner):
    async def run(runner):
        ids = [RolloutId(1, 0, n) for n in range(3)]
        panel = Panel(runner, {}, ids)

        def made(id):
            return lambda **options: runner.run({}, id, DEFAULTS, **options)

        found = await asyncio.gather(*(panel.run(id, made(id)) for id in ids))
        return [[told(trace) for trace in traces] for traces in found]

    here = await run(make_runner(functions.scored, functions.group_judge))
    async with pool_of(2, functions.scored, functions.group_judge) as pool:
        there = await run(make_runner(functions.scored, functions.group_judge, workers=pool))
    assert there == here
    assert [traces[-1].reward for traces in there] == [pytest.approx(1 / 3)] * 3


async def test_a_response_is_forgotten_once_its_rollout_has_ended(make_runner):
    both = functions.counts_responses, functions.rates
    async with pool_of(1, *both) as pool:
        runner = make_runner(*both, workers=pool)
        found = []
        for number in range(3):
            found += await runner.run({}, RolloutId(1, 0, number), DEFAULTS)
            await asyncio.sleep(0)  # the worker is told in the loop's next turn
    assert [trace.reward for trace in found] == [1.0] * 3
    assert [trace.metrics["alive"] for trace in found] == [0] * 3


@pytest.mark.long
async def test_a_mistake_in_a_function_ends_the_run_with_its_own_class(make_runner):
    async def wrong(task, model):
        return [3]

    async def asks_for_a_field(task, model):
        return task["answer"]

    for function, message in (
        (wrong, "returned .3. .list.; a workflow returns WorkflowOutput"),
        (asks_for_a_field, "the task has no field 'answer'"),
    ):
        async with pool_of(1, function) as pool:
            with pytest.raises(FunctionError, match=message):
                await make_runner(function, workers=pool).run({}, ID, DEFAULTS)


@pytest.mark.long
async def test_recorded_functions_of_a_script_get_to_a_worker(make_runner):
    @tuner.recorded
    def plain(number):
        return [number]

    @tuner.recorded
    async def awaited(number):
        return [number]

    async def workflow(task, model):
        await functions.ask(model)
        return functions.WorkflowOutput(reward=float(len(plain(1) + await awaited(2))))

    async with pool_of(1, workflow) as pool:
        (trace,) = await make_runner(workflow, workers=pool).run({}, ID, DEFAULTS)
    assert [one.value for one in trace.results] == [[1], [2]]


async def test_functions_share_what_both_refer_to(make_runner):
    kept = {}

    async def workflow(task, model):
        await functions.ask(model)
        kept["left"] = "here"
        return functions.WorkflowOutput()

    async def judge(task, response):
        return functions.JudgeOutput(reward=float(kept["left"] == "here"))

    async with pool_of(1, workflow, judge) as pool:
        (trace,) = await make_runner(workflow, judge, workers=pool).run({}, ID, DEFAULTS)
    assert trace.reward == 1.0
    assert kept == {}  # that of this process is another one


async def test_an_agent_that_blocks_its_event_loop_is_answered(make_runner):
    async with pool_of(1, functions.synchronous) as pool:
        runner = make_runner(functions.synchronous, workers=pool)
        ids = [RolloutId(1, 0, n) for n in range(4)]
        found = await asyncio.gather(*(runner.run({}, id, DEFAULTS) for id in ids))
    assert {traces[-1].outcome for traces in found} == {Outcome.COMPLETED}
    assert all(len(traces[-1].calls) == 1 for traces in found)


async def test_an_agent_of_agentscope_runs_in_a_worker(make_runner):
    pytest.importorskip("agentscope.agent")

    async def workflow(task, model):
        from agentscope.agent import ReActAgent
        from agentscope.formatter import OpenAIChatFormatter
        from agentscope.message import Msg

        agent = ReActAgent("Friday", "Be brief.", model, OpenAIChatFormatter(), max_iters=1)
        answer = await agent(Msg("user", "hi", "user"))
        return functions.WorkflowOutput(response=answer)

    async def judge(task, response):
        return functions.JudgeOutput(reward=len(response.get_text_content()) % 2)

    async with pool_of(1, workflow, judge, kind="agentscope1") as pool:
        runner = make_runner(workflow, judge, workers=pool)
        (trace,) = await runner.run({}, ID, DEFAULTS)
    assert trace.outcome is Outcome.COMPLETED
    assert trace.calls


def test_a_package_beside_the_script_travels_though_an_installed_one_has_its_name(
    tmp_path, monkeypatch
):
    package = tmp_path / "nbclient"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("async def workflow(task, model):\n    return model\n")
    assert importlib.util.find_spec("nbclient") is not None
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nbclient", "nbclient.agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    mine = importlib.import_module("nbclient.agent")
    assert mine.__file__.startswith(str(tmp_path))
    assert ship(mine.workflow, role="workflow").startswith(PICKLE)
    for name in ("nbclient", "nbclient.agent"):
        monkeypatch.delitem(sys.modules, name)
