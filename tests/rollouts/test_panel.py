"""Groups that are judged together, and rollouts that try again with what the judge said."""

import asyncio
import math
import time

import pytest

from tests.kit.examples import grid
from tests.rollouts.test_runner import DEFAULTS, ask, run
from tuner.errors import FunctionError
from tuner.gateway import SessionLimits
from tuner.rollouts import RolloutSettings, StepPlan, collect
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces import Outcome, TraceStore


def plan(tasks, repeat=4):
    return StepPlan("train", 1, [{"number": n} for n in range(tasks)], repeat, DEFAULTS)


async def workflow(task, model):
    """Each answers with a number of its own, as an object that no text stands for."""
    await ask(model)
    return WorkflowOutput(response={"number": len(model.session.id)}, metrics={"turns": 1})


async def rank(task, responses):
    """1 for the first, 2 for the second."""
    return [
        JudgeOutput(
            reward=place,
            feedback=f"place {place} of {len(responses)}",
            metrics={"task": task["number"], "seen": response["number"] > 0},
        )
        for place, response in enumerate(responses, 1)
    ]


async def collected(runner, folder, tasks=2, **options):
    return await collect(plan(tasks), runner, TraceStore(folder), max_running=2, **options)


async def test_a_group_is_judged_together_when_its_last_rollout_has_ended(make_runner, tmp_path):
    asked = []

    async def judge(task, responses, auxiliary_models):
        asked.append((task["number"], len(responses)))
        return await rank(task, responses)

    traces = await collected(make_runner(workflow, judge), tmp_path)
    assert sorted(asked) == [(0, 4), (1, 4)]
    assert [trace.reward for trace in traces] == [1, 2, 3, 4] * 2
    assert [trace.feedback for trace in traces[:2]] == ["place 1 of 4", "place 2 of 4"]
    assert {tuple(sorted(trace.metrics.items())) for trace in traces} == {
        (("seen", 1.0), ("task", 0.0), ("turns", 1.0)),
        (("seen", 1.0), ("task", 1.0), ("turns", 1.0)),
    }
    assert all(trace.seconds["judge"] > 0 for trace in traces)
    assert TraceStore(tmp_path).read("train", 1), "stored with their verdicts"
    assert {trace.reward for trace in TraceStore(tmp_path).read("train", 1)} == {1, 2, 3, 4}


async def test_rollouts_that_failed_are_not_judged_and_keep_how_they_ended(make_runner, tmp_path):
    async def fragile(task, model):
        if model.session.id.startswith(("train-1-0-1", "train-1-1-")):
            raise ValueError("broken")
        return await workflow(task, model)

    traces = await collected(make_runner(fragile, rank), tmp_path)
    outcomes = [trace.outcome for trace in traces]
    assert outcomes[:4].count(Outcome.COMPLETED) == 3
    assert [trace.reward for trace in traces] == [1, None, 2, 3, None, None, None, None]


FAULTS = {
    "raises": (Outcome.JUDGE_ERROR, "ValueError: no idea"),
    "hangs": (Outcome.JUDGE_TIMEOUT, "no verdict within 2 s (explorer.max_timeout)"),
    "cancels": (Outcome.JUDGE_ERROR, "CancelledError"),
    "not finite": (
        Outcome.INVALID_REWARD,
        "the judge gave reward nan; a reward must be a finite number",
    ),
}


@grid("fault", [*FAULTS, "nonsense", "too few"], quick=3)
async def test_a_judge_of_groups_that_fails_has_typed_outcomes(make_runner, tmp_path, fault):
    async def judge(task, responses):
        if fault == "raises":
            raise ValueError("no idea")
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "cancels":
            raise asyncio.CancelledError
        outputs = await rank(task, responses)
        if fault == "not finite":
            outputs[0].reward = math.nan
        return {"nonsense": 3, "too few": outputs[1:]}.get(fault, outputs)

    work = collected(
        make_runner(workflow, judge, timeout=2.0 if fault == "hangs" else 60), tmp_path, 1
    )
    if fault in ("nonsense", "too few"):
        with pytest.raises(FunctionError, match=r"list\[JudgeOutput\]|3 outputs for 4 responses"):
            await work
        return
    traces = await work
    assert (traces[0].outcome, traces[0].error) == FAULTS[fault]
    assert [trace.reward for trace in traces[1:]] == (
        [2, 3, 4] if fault == "not finite" else [None] * 3
    )
    assert traces[0].calls, "what was sampled is kept"


async def test_a_judge_of_groups_is_asked_again_with_the_same_responses(make_runner, tmp_path):
    seen = []

    async def judge(task, responses):
        seen.append(responses)
        if len(seen) == 1:
            raise ValueError("busy")
        return await rank(task, responses)

    traces = await collected(make_runner(workflow, judge, retries=1), tmp_path, 1)
    assert seen[0] == seen[1]
    assert [trace.reward for trace in traces] == [1, 2, 3, 4]


async def test_a_group_of_which_a_part_is_on_disk_is_made_again(make_runner, tmp_path):
    first = await collected(make_runner(workflow, rank), tmp_path / "all")
    part = TraceStore(tmp_path / "part")
    for trace in first[:6]:  # the whole first group, and half of the second
        part.append(trace)
    made = []

    async def counting(task, model):
        made.append(task["number"])
        return await workflow(task, model)

    traces = await collected(make_runner(counting, rank), tmp_path / "part")
    assert made == [1] * 4
    assert [trace.reward for trace in traces] == [1, 2, 3, 4] * 2
    assert [t.id for t in TraceStore(tmp_path / "part").read("train", 1) if t.final].count(
        traces[4].id
    ) == 1


def with_feedback(runner, attempts, **options):
    runner.settings = RolloutSettings(
        timeout=60, max_retries=0, seed=1, feedback_attempts=attempts, **options
    )
    return runner


async def test_feedback_leads_to_a_second_attempt_in_the_same_rollout(make_runner):
    heard = []

    async def trying(task, model, feedback):
        heard.append(feedback)
        await ask(model)
        return WorkflowOutput(response=f"attempt {len(heard)}", metrics={"last": len(heard)})

    async def judge(task, response):
        number = int(response[-1])
        return JudgeOutput(reward=number / 3, feedback=f"{response} is not enough")

    (trace,) = await run(with_feedback(make_runner(trying, judge), 5))
    assert heard == [None, "attempt 1 is not enough", "attempt 2 is not enough"]
    assert (trace.reward, trace.response) == (1.0, "attempt 3")
    assert len(trace.calls) == 3, "one rollout, one trace"
    assert trace.metrics == {"last": 3, "first_reward": 1 / 3, "feedback_attempts": 2}


async def test_attempts_with_feedback_end_when_there_is_none_or_no_more(make_runner):
    async def trying(task, model, **rest):
        assert rest.get("feedback") in (None, "again")
        await ask(model)
        return WorkflowOutput(response="x")

    async def silent(task, response):
        return JudgeOutput(reward=0.0)

    async def judge(task, response):
        return JudgeOutput(reward=0.0, feedback="again")

    for one, attempts, calls in ((silent, 3, 1), (judge, 0, 1), (judge, 2, 3)):
        (trace,) = await run(with_feedback(make_runner(trying, one), attempts))
        assert (len(trace.calls), trace.reward) == (calls, 0.0)
    limited = with_feedback(make_runner(trying, judge), 3, limits=SessionLimits(calls=2))
    (trace,) = await run(limited)
    assert trace.outcome is Outcome.WORKFLOW_ERROR
    assert "tuner.max_calls" in trace.error


@pytest.mark.parametrize("threaded", [True, False])
async def test_the_seconds_of_a_judge_are_its_own_and_not_the_wait_for_its_turn(
    make_runner, threaded
):
    loop = asyncio.get_running_loop()

    def others():
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass

    def plain(task, response):
        loop.call_soon_threadsafe(others)
        return JudgeOutput(reward=1.0)

    async def judge(task, response):
        return plain(task, response)

    (trace,) = await run(make_runner(workflow, plain if threaded else judge))
    assert 0 < trace.seconds["judge"] < 0.1
