"""A function that keeps the event loop, or waits for long, is named; none hangs for ever."""

import asyncio
import contextlib
import logging
import threading

import openai
import pytest

from tests.rollouts.test_runner import MESSAGES, ask, run
from tuner.rollouts import limits as watchdog
from tuner.rollouts.limits import Standstill
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces import Outcome


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for name in ("EVERY", "BLOCKED", "QUIET"):
        monkeypatch.setattr(watchdog, name, 0.05)


def ask_and_wait(model):
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key)
    with client:
        answer = client.chat.completions.create(model=model.model_name, messages=MESSAGES)
    return answer.choices[0].message.content


async def in_the_loop(task, model):
    return WorkflowOutput(response=ask_and_wait(model), reward=1.0)


async def test_a_blocking_client_in_the_loop_is_named_and_then_works_in_a_thread(
    make_runner, caplog
):
    first, second = await run(make_runner(in_the_loop, retries=1))
    assert first.outcome is Outcome.WORKFLOW_ERROR
    assert first.error.startswith(f"ask_and_wait ({__file__}:")
    assert "make the workflow a plain `def`" in first.error
    assert "runs in threads from now on" in first.error
    assert first.calls == ()
    assert second.outcome is Outcome.COMPLETED
    assert len(second.calls) == 1
    said = [r.getMessage() for r in caplog.records if "blocked the event loop" in r.getMessage()]
    assert len(said) == 1


async def test_rollouts_that_begin_together_wait_for_one_of_them_only(make_runner):
    runner = make_runner(in_the_loop, retries=1)
    traces = await asyncio.gather(*(run(runner) for _ in range(4)))
    outcomes = [[trace.outcome for trace in attempts] for attempts in traces]
    assert sorted(map(len, outcomes)) == [1, 1, 1, 2]
    assert all(attempts[-1] is Outcome.COMPLETED for attempts in outcomes)


async def test_a_judge_that_blocks_the_loop_is_asked_again_in_a_thread(make_runner):
    async def workflow(task, model):
        return WorkflowOutput(response=await ask(model))

    helper = None

    async def judge(task, response, auxiliary_models):
        return JudgeOutput(reward=float(len(ask_and_wait(helper)) >= 0))

    runner = make_runner(workflow, judge, retries=1)
    session = runner.gateway.open_session("helper")
    helper = runner.make_model(session)
    runner.auxiliary_models = lambda rollout, seed: contextlib.nullcontext({"helper": helper})
    (trace,) = await run(runner)
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0)


async def test_what_keeps_the_loop_longer_than_a_rollout_may_take_is_broken_off(
    make_runner, caplog
):
    caught, never = [], threading.Event()

    async def workflow(task, model):
        await ask(model)
        try:
            if threading.current_thread() is threading.main_thread():
                never.wait()
        except Standstill:
            caught.append(task)
            raise
        return WorkflowOutput(reward=1.0)

    first, second = await run(make_runner(workflow, timeout=2.0, retries=1))
    assert first.outcome is Outcome.TIMEOUT
    assert len(caught) == 1
    assert second.outcome is Outcome.COMPLETED
    assert f"workflow ({__file__}:" in caplog.text


@pytest.mark.parametrize("plain", [False, True])
async def test_a_rollout_that_waits_for_long_says_where(make_runner, caplog, plain):
    heard = threading.Event()

    class Hears(logging.Handler):
        def emit(self, record):
            if "has waited" in record.getMessage():
                heard.set()

    async def waits(task, model):
        while not heard.is_set():  # noqa: ASYNC110  # the log sets it, from another thread
            await asyncio.sleep(0.01)
        await ask(model)
        return WorkflowOutput(reward=1.0)

    def waits_plainly(task, model):
        heard.wait()
        return waits(task, model)

    logger = logging.getLogger("tuner.rollout")
    logger.addHandler(handler := Hears())
    try:
        (trace,) = await run(make_runner(waits_plainly if plain else waits))
    finally:
        logger.removeHandler(handler)
    assert trace.outcome is Outcome.COMPLETED
    name = "waits_plainly" if plain else "waits"
    assert f"<locals>.{name} ({__file__}:" in caplog.text
