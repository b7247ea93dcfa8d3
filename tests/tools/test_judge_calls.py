"""A judge called outside a rollout, with the limits and retries of a run."""

import asyncio
import sys
from contextlib import contextmanager

import pytest

from tests.kit.builders import call, trace
from tests.kit.clock import jump
from tuner.errors import FunctionError
from tuner.tasks.functions import JudgeOutput
from tuner.tools.judging import JudgeCalls, was_judged
from tuner.traces import Outcome


def answered(task, rollout, response, **fields):
    calls = [call("c", [1], [2], [-1.0])]
    fields = {"reward": 1.0, "metrics": {"turns": 1}} | fields
    return trace(task, rollout, calls, response=response, **fields)


class Models:
    """Opens no models, and keeps the sessions and seeds that they were opened for."""

    def __init__(self):
        self.opened = []

    @contextmanager
    def __call__(self, session, seed):
        self.opened.append((session, seed))
        yield {}


async def test_a_group_is_judged_in_one_call_in_the_order_of_its_rollouts():
    async def judge(task, responses):
        return [JudgeOutput(reward=n, feedback=text) for n, text in enumerate(map(str, responses))]

    models = Models()
    traces = [
        answered(1, 0, "c"),
        answered(0, 1, "b"),
        answered(0, 0, "a"),
        answered(0, 2, "", outcome=Outcome.TIMEOUT, reward=None),
    ]
    found = await JudgeCalls(judge, models, seed=3).judge_traces(traces, was_judged)
    assert [one and (one.reward, one.feedback) for one in found] == [
        (0, "c"),
        (1, "b"),
        (0, "a"),
        None,
    ]
    assert sorted(session for session, _ in models.opened) == [
        "train-1-0-0-judge",
        "train-1-1-0-judge",
    ]
    assert len({seed for _, seed in models.opened}) == 2


async def test_a_judge_that_fails_is_asked_again_in_the_same_session():
    tries = []

    async def judge(task, response):
        tries.append(str(response))
        if len(tries) < 3:
            raise ValueError("busy")
        return JudgeOutput(reward=0.5)

    models = Models()
    calls = JudgeCalls(judge, models, retries=2)
    (found,) = await calls.judge_traces([answered(0, 0, "a")], was_judged)
    assert (found.reward, tries, len(calls.seconds)) == (0.5, ["a"] * 3, 1)
    assert len(set(models.opened)) == 1
    tries.clear()
    (failed,) = await JudgeCalls(judge, models, retries=1).judge_traces(
        [answered(0, 0, "a")], was_judged
    )
    assert (failed.outcome, failed.error) == (Outcome.JUDGE_ERROR, "ValueError: busy")
    assert failed.kind == "ValueError"


async def test_a_judge_that_hangs_exits_or_cancels_fails_for_its_response_alone():
    async def judge(task, response):
        if response == "hangs":
            jump(4000)
            await asyncio.Event().wait()
        if response == "exits":
            sys.exit(3)
        if response == "cancels":
            raise asyncio.CancelledError
        return JudgeOutput(reward=float("nan"), metrics={"sure": float("nan"), "words": 2})

    texts = ("hangs", "exits", "cancels", "nan")
    calls = JudgeCalls(judge, Models(), timeout=3600, max_running=1)
    traces = [answered(0, n, text) for n, text in enumerate(texts)]
    found = await calls.judge_traces(traces, was_judged)
    assert [one.outcome for one in found] == [
        Outcome.JUDGE_TIMEOUT,
        Outcome.JUDGE_ERROR,
        Outcome.JUDGE_ERROR,
        Outcome.INVALID_REWARD,
    ]
    assert "no verdict within 3600 s (explorer.max_timeout)" in found[0].error
    assert found[1].error == "SystemExit: 3"
    after = found[3].on(traces[3])
    assert after.reward is None
    assert after.metrics == {"turns": 1, "words": 2}
    assert found[1].on(traces[1]).metrics == {"turns": 1}


async def test_a_new_verdict_is_as_if_the_run_had_given_it():
    async def judge(task, response):
        return JudgeOutput(reward=0.25, metrics={"letters": 1}, feedback="short")

    failed = answered(
        0,
        0,
        "a",
        outcome=Outcome.JUDGE_ERROR,
        reward=None,
        error="KeyError: 'x'",
        seconds={"judge": 1.0},
    )
    (found,) = await JudgeCalls(judge, Models()).judge_traces([failed], was_judged)
    after = found.on(failed)
    assert (after.outcome, after.error, after.reward) == (Outcome.COMPLETED, None, 0.25)
    assert (after.metrics, after.feedback) == ({"turns": 1, "letters": 1}, "short")
    assert after.calls == failed.calls


async def test_a_mistake_in_the_judge_ends_all():
    async def judge(task, response):
        return JudgeOutput(reward=1.0) if response == "a" else "good"

    traces = [answered(0, n, text) for n, text in enumerate("ab")]
    with pytest.raises(FunctionError, match=r"returned '?good"):
        await JudgeCalls(judge, Models()).judge_traces(traces, was_judged)
