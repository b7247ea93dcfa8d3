"""A worker that dies is the outcome of its rollouts, and there is another one."""

import asyncio
import os
import signal
import threading

import pytest

from tests.rollouts.workers import functions
from tests.rollouts.workers.conftest import DEFAULTS, pool_of, waiting
from tests.rollouts.workers.functions import DiesWhenLoaded, FailsWhenLoaded, dying
from tuner.errors import FunctionError, WorkerError
from tuner.rollouts.runner import Panel
from tuner.traces import Outcome, RolloutId

ID = RolloutId(1, 0, 0)

pytestmark = pytest.mark.usefixtures("forked_workers")


async def test_a_rollout_whose_worker_is_killed_is_tried_again_in_another(make_runner, tmp_path):
    async with pool_of(2, dying) as pool:
        runner = make_runner(dying, workers=pool, retries=1)
        first, second = await runner.run(
            {"dies": "once", "mark": str(tmp_path / "here")}, ID, DEFAULTS
        )
        assert len(pool.pids) == 2
    assert first.outcome is Outcome.WORKER_DIED
    assert "was killed by SIGKILL" in first.error
    assert not first.final
    assert len(first.calls) == 1  # what was recorded stays
    assert second.outcome is Outcome.COMPLETED
    assert second.attempt == 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exits", "exited with 3"),
        ("crashes", "was killed by SIGSEGV: Fatal Python error: Segmentation fault"),
    ],
)
async def test_the_outcome_has_the_last_words_of_the_worker(make_runner, how, words):
    async with pool_of(1, dying) as pool:
        (trace,) = await make_runner(dying, workers=pool).run({"dies": how}, ID, DEFAULTS)
        assert trace.outcome is Outcome.WORKER_DIED
        assert trace.reward is None
        assert words in trace.error
        assert (how == "crashes") == ("functions.py" in trace.error)  # in which line
        (after,) = await make_runner(dying, workers=pool).run({}, ID, DEFAULTS)
        assert after.outcome is Outcome.COMPLETED


@pytest.mark.usefixtures("real_workers")
async def test_all_rollouts_of_a_worker_die_with_it_and_no_other(make_runner):
    """The gateway sees the calls of all five before one of them dies."""
    async with pool_of(2, dying) as pool:
        runner = make_runner(dying, workers=pool)
        async with waiting(runner, 4) as (tasks, _):
            (dead,) = await runner.run({"dies": "exits"}, RolloutId(1, 4, 0), DEFAULTS)
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 2:
                more, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                done |= more
    assert dead.outcome is Outcome.WORKER_DIED
    assert [task.result()[0].outcome for task in done] == [Outcome.WORKER_DIED] * 2
    assert all(task.cancelled() for task in left)


async def test_a_group_that_loses_a_response_is_not_judged(make_runner):
    """A judge of groups wants all of them."""
    async with pool_of(1, functions.scored, functions.group_judge) as pool:
        runner = make_runner(functions.scored, functions.group_judge, workers=pool)
        ids = [RolloutId(1, 0, n) for n in range(2)]
        panel = Panel(runner, {}, ids)

        def made(id, task):
            return lambda keep: runner.run(task, id, DEFAULTS, keep=keep)

        (first,) = await made(ids[0], {})(keep=lambda response: first_response.append(response))
        second = panel.run(ids[1], made(ids[1], {"dies": True}))
        both = asyncio.gather(panel.run(ids[0], kept(first)), second)
        found = await both
    assert [traces[-1].outcome for traces in found] == [Outcome.WORKER_DIED] * 2
    assert [len(traces[-1].calls) for traces in found] == [1, 1]


first_response = []


def kept(trace):
    async def made(keep):
        keep(first_response.pop())
        return [trace]

    return made


async def test_workers_that_die_before_they_begin_end_the_run_with_a_diagnosis(make_runner):
    function = DiesWhenLoaded()
    async with pool_of(1, function) as pool:
        with pytest.raises(WorkerError, match=r"3 workers died one after the other.*exited with 4"):
            await make_runner(function, workers=pool).run({}, ID, DEFAULTS)


async def test_functions_that_cannot_be_loaded_in_a_worker_end_the_run(make_runner):
    function = FailsWhenLoaded()
    async with pool_of(2, function) as pool:
        with pytest.raises(FunctionError, match="cannot be loaded in a worker: ValueError"):
            await make_runner(function, workers=pool).run({}, ID, DEFAULTS)


async def test_functions_that_cannot_be_sent_are_refused_before_anything_starts():
    lock = threading.Lock()

    async def workflow(task, model):
        with lock:
            return functions.WorkflowOutput(reward=1.0)

    with pytest.raises(FunctionError, match="cannot be sent to the workers: its variable 'lock'"):
        async with pool_of(1, workflow):
            pass


async def killed(make_runner, *, rollouts, kills, workers, retries):
    """Traces of rollouts while a worker is killed at every so many answers."""
    async with pool_of(workers, functions.killed_at_random) as pool:
        runner = make_runner(functions.killed_at_random, workers=pool, retries=retries)
        answers, handle, every = 0, runner.gateway.handle, max(1, 2 * rollouts // kills)

        async def answered(*request):
            nonlocal answers, kills
            reply = await handle(*request)
            answers += 1
            if kills and answers % every == 0:
                kills -= 1
                os.kill(pool.pids[answers % len(pool.pids)], signal.SIGKILL)
            return reply

        runner.gateway.handle = answered
        room = asyncio.Semaphore(rollouts // 4)

        async def one(number):
            async with room:
                return await runner.run({}, RolloutId(1, number, 0), DEFAULTS)

        found = await asyncio.gather(*(one(number) for number in range(rollouts)))
    return found, kills


@pytest.mark.parametrize(
    ("rollouts", "kills", "retries"),
    [(24, 2, 3), pytest.param(1000, 100, 100, marks=pytest.mark.nightly)],
)
async def test_every_rollout_has_an_outcome_whoever_is_killed(
    make_runner, rollouts, kills, retries
):
    found, left = await killed(
        make_runner, rollouts=rollouts, kills=kills, workers=2, retries=retries
    )
    assert left == 0
    assert len(found) == rollouts
    for attempts in found:
        *before, last = [trace.outcome for trace in attempts]
        assert set(before) <= {Outcome.WORKER_DIED}
        assert last in (Outcome.COMPLETED, Outcome.WORKER_DIED)
        assert [trace.final for trace in attempts] == [False] * len(before) + [True]
        assert len(attempts) <= retries + 1
    assert any(trace.outcome is Outcome.WORKER_DIED for attempts in found for trace in attempts)
