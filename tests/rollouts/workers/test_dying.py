"""A worker that dies is the outcome of its rollouts, and there is another one."""

import asyncio
import json
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

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_workers")]


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
async def test_no_rollout_of_another_worker_is_disturbed(make_runner):
    """The gateway sees the calls of all five before one of them dies."""
    async with pool_of(2, dying) as pool:
        runner = make_runner(dying, workers=pool)
        async with waiting(runner, 4) as (tasks, again):
            (first, dead) = await runner.run({"dies": "exits"}, RolloutId(1, 4, 0), DEFAULTS)
            await again.acquire()  # a neighbour of the dead one has begun again
    assert [first.outcome, dead.outcome] == [Outcome.WORKER_DIED] * 2
    assert all(task.cancelled() for task in tasks)


@pytest.mark.parametrize(("count", "retries"), [(1, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("killers", [{0}, {1, 4, 7}, {2, 3, 4, 5, 6, 7, 8}], ids=len)
async def test_only_rollouts_that_end_their_worker_alone_fail(
    make_runner, caplog, killers, count, retries
):
    """All nine are in workers before the first of them dies, and none is retried for another."""
    async with pool_of(count, dying) as pool:
        runner = make_runner(dying, workers=pool, retries=retries)
        meets(runner, 9)
        found = await asyncio.gather(
            *(
                runner.run(
                    {"dies": "exits" if number in killers else None, "who": f"row {number}"},
                    RolloutId(1, number, 0),
                    DEFAULTS,
                )
                for number in range(9)
            )
        )
    assert {
        n for n, traces in enumerate(found) if traces[-1].outcome is Outcome.WORKER_DIED
    } == killers
    for number, (*before, last) in enumerate(found):
        assert last.outcome is (Outcome.WORKER_DIED if number in killers else Outcome.COMPLETED)
        assert [trace.attempt for trace in (*before, last)] == [*range(1, len(before) + 2)]
        assert all(trace.outcome is Outcome.WORKER_DIED and not trace.final for trace in before)
        assert len(before) <= 1 + retries * (number in killers)
        if number in killers:
            assert "no other rollout was in it, and its task is {" in last.error
            assert f"'who': 'row {number}'" in last.error
            assert f"train-1-{number}-0, attempt {last.attempt}: its worker" in caplog.text


async def test_rollouts_begin_while_others_wait_to_be_alone(make_runner):
    """A suspect gets the worker that was started for it; the others go on in the second."""
    async with pool_of(2, dying) as pool:
        runner = make_runner(dying, workers=pool)
        meets(runner, 4)
        many = [{"dies": "exits"}, {}, {}, {}, *[{}] * 6]
        found = await asyncio.gather(
            *(runner.run(task, RolloutId(1, n, 0), DEFAULTS) for n, task in enumerate(many))
        )
    ended = [traces[-1].outcome for traces in found]
    assert ended == [Outcome.WORKER_DIED, *[Outcome.COMPLETED] * 9]


async def test_a_rollout_that_waits_to_be_alone_can_be_cancelled(make_runner):
    async with pool_of(1, dying) as pool:
        runner = make_runner(dying, workers=pool)
        async with waiting(runner, 1):
            id = "train", 1, 1
            asking = asyncio.ensure_future(pool._place(id, alone=True))
            general = asyncio.ensure_future(pool._place(id, alone=False))
            done, _ = await asyncio.wait([asking, general], timeout=0)
            assert not done
            asking.cancel()
            assert (await general).pid in pool.pids


def meets(runner, count):
    """From now on the first answers are held back until there are so many."""
    handle, arrived, barrier = runner.gateway.handle, 0, asyncio.Event()

    async def answered(*request):
        nonlocal arrived
        reply = await handle(*request)
        arrived += 1
        if arrived == count:
            barrier.set()
        await barrier.wait()
        return reply

    runner.gateway.handle = answered


@pytest.mark.parametrize("killers", [{0}, {1, 3}, {0, 1, 2, 3, 4, 5}], ids=len)
@pytest.mark.parametrize("count", [1, 2])
async def test_a_group_is_judged_without_those_that_end_their_worker(make_runner, count, killers):
    """A judge of groups reads responses that stay in the worker, and die with it."""
    async with pool_of(count, functions.scored, functions.group_judge) as pool:
        runner = make_runner(functions.scored, functions.group_judge, workers=pool)
        rows = {RolloutId(1, n // 3, n % 3): {"dies": n in killers} for n in range(6)}
        panels = [Panel(runner, {}, [*rows][:3]), Panel(runner, {}, [*rows][3:])]

        def make(id):
            return lambda **options: runner.run(rows[id], id, DEFAULTS, **options)

        found = await asyncio.gather(*(panels[id.task].run(id, make(id)) for id in rows))
    for number, (*before, last) in enumerate(found):
        assert last.outcome is (Outcome.WORKER_DIED if number in killers else Outcome.COMPLETED)
        assert last.reward is None or last.reward > 0
        assert all(trace.outcome is Outcome.WORKER_DIED and not trace.final for trace in before)


async def test_a_judge_that_ends_its_worker_is_named_and_takes_no_other_group(make_runner):
    async with pool_of(1, functions.scored, functions.group_judge) as pool:
        runner = make_runner(functions.scored, functions.group_judge, workers=pool)
        tasks = [{"judge dies": True}, {}]
        ids = [RolloutId(1, n // 2, n % 2) for n in range(4)]
        panels = [Panel(runner, task, ids[2 * n : 2 * n + 2]) for n, task in enumerate(tasks)]

        def make(id):
            return lambda **options: runner.run(tasks[id.task], id, DEFAULTS, **options)

        found = await asyncio.gather(*(panels[id.task].run(id, make(id)) for id in ids))
    last = [traces[-1] for traces in found]
    assert [one.outcome for one in last] == [Outcome.WORKER_DIED] * 2 + [Outcome.COMPLETED] * 2
    assert "exited with 1" in last[0].error


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
    """Traces of rollouts. After every so many answers, the worker that waits for one is killed."""
    async with pool_of(workers, functions.names_its_process) as pool:
        runner = make_runner(functions.names_its_process, workers=pool, retries=retries)
        answers, handle, every = 0, runner.gateway.handle, max(1, 2 * rollouts // kills)

        async def answered(method, path, headers, body):
            nonlocal answers, kills
            reply = await handle(method, path, headers, body)
            answers += 1
            process = int(json.loads(body)["messages"][0]["content"])
            if kills and answers >= every and process in pool.pids:
                answers, kills = 0, kills - 1
                os.kill(process, signal.SIGKILL)
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
