"""Limits reach a function in a worker, and nothing is left of workers, however a run ends."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.engines.models import until
from tests.kit.clock import jump
from tests.rollouts.workers import functions
from tests.rollouts.workers.conftest import pool_of
from tests.rollouts.workers.functions import hanging
from tuner.gateway import SamplingDefaults
from tuner.rollouts import any_worker
from tuner.traces import Outcome, RolloutId

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_workers")]

DEFAULTS = SamplingDefaults(max_tokens=4)
ID = RolloutId(1, 0, 0)
LIMIT = 30.0  # shorter than the 60 after which the gateway closes an idle connection


def jumping(runner, *, after):
    """So much time goes by once there have been so many answers; 0: never."""
    handle, answers = runner.gateway.handle, []

    async def answered(*request):
        reply = await handle(*request)
        answers.append(reply)
        if len(answers) == after:
            asyncio.get_running_loop().call_soon(jump, LIMIT)
        return reply

    runner.gateway.handle, runner.gateway.answers = answered, answers
    return runner


@pytest.mark.parametrize("does", ["waits", "swallows"])
async def test_an_attempt_that_takes_too_long_is_cancelled_in_its_worker(make_runner, does):
    async with pool_of(1, hanging) as pool:
        runner = jumping(make_runner(hanging, workers=pool, timeout=LIMIT), after=1)
        (trace,) = await runner.run({"does": does}, ID, DEFAULTS)
        (pid,) = pool.pids
        assert trace.outcome is Outcome.TIMEOUT
        assert "within 30 s" in trace.error
        assert len(trace.calls) == 1
        assert pool.pids == [pid]  # which goes on


async def test_a_call_that_comes_too_late_is_refused(make_runner, tmp_path):
    mark = tmp_path / "late"
    async with pool_of(1, hanging) as pool:
        runner = jumping(make_runner(hanging, workers=pool, timeout=LIMIT), after=1)
        (trace,) = await runner.run({"does": "calls late", "mark": str(mark)}, ID, DEFAULTS)
        await until(lambda: mark.exists() and bool(mark.read_text()))  # before its worker ends
    assert trace.outcome is Outcome.TIMEOUT
    assert len(trace.calls) == 1
    assert "has ended" in mark.read_text()


async def test_a_worker_that_hears_nothing_is_killed_and_others_in_it_begin_again(
    make_runner, monkeypatch, tmp_path
):
    monkeypatch.setattr(any_worker, "PATIENCE", 0.1)
    mark = tmp_path / "blocked"
    async with pool_of(1, hanging) as pool:
        (pid,) = await started(pool)
        runner = jumping(make_runner(hanging, workers=pool, timeout=LIMIT), after=0)
        other = make_runner(hanging, workers=pool)
        other.gateway = runner.gateway
        waits = asyncio.ensure_future(
            other.run({"does": "waits once"}, RolloutId(1, 1, 0), DEFAULTS)
        )
        await until(lambda: runner.gateway.answers)  # before its worker is blocked
        blocks = asyncio.ensure_future(
            runner.run({"does": "blocks", "mark": str(mark)}, ID, DEFAULTS)
        )
        await until(mark.exists)
        jump(LIMIT)
        (trace,) = await blocks
        victim, again = await waits
        assert trace.outcome is Outcome.TIMEOUT
        assert again.outcome is Outcome.COMPLETED
        assert victim.outcome is Outcome.WORKER_DIED
        assert "train-1-0-0-1 was cancelled and still kept its event loop" in victim.error
        assert not psutil.pid_exists(pid) or pid not in pool.pids


async def started(pool):
    pool.start()
    while not all(worker.ready.done() for worker in pool._workers):
        await asyncio.wait([worker.ready for worker in pool._workers])
    return pool.pids


async def test_time_in_tools_is_limited_in_a_worker(make_runner):
    async with pool_of(1, hanging) as pool:
        runner = make_runner(hanging, workers=pool, tool_seconds=0.05)
        (trace,) = await runner.run({"does": "waits"}, ID, DEFAULTS)
    assert trace.outcome is Outcome.TIMEOUT
    assert "tuner.max_tool_seconds" in trace.error


@pytest.mark.usefixtures("real_workers")
async def test_what_functions_log_and_print_comes_out_here(make_runner, caplog, capsys):
    async def workflow(task, model, logger):
        print("printed there")
        logger.info("logged %s", "there")
        logging.getLogger("mine").debug("hidden")
        raise ValueError("a line of its own")

    caplog.set_level(logging.INFO)
    async with pool_of(1, workflow) as pool:
        runner = make_runner(workflow, workers=pool)
        await runner.run({}, ID, DEFAULTS)
        await runner.run({}, ID, DEFAULTS)
    assert [r.message for r in caplog.records].count("logged there") == 2
    assert not [r for r in caplog.records if r.message == "hidden"]
    # Where it came up, once for each line.
    assert len([r for r in caplog.records if "a line of its own" in r.message]) == 1
    assert capsys.readouterr().out.count("printed there") == 2


@pytest.mark.usefixtures("real_workers")
async def test_workers_import_what_calls_need_before_they_begin_and_no_pytorch(make_runner):
    """Else the first rollout of each is the slowest, and it counts as the agent's own time."""
    async with pool_of(1, functions.says_what_is_imported) as pool:
        runner = make_runner(functions.says_what_is_imported, workers=pool)
        (torch,) = await runner.run({"module": "torch"}, ID, DEFAULTS)
    async with pool_of(1, functions.says_what_is_imported) as pool:
        runner = make_runner(functions.says_what_is_imported, workers=pool)
        (openai,) = await runner.run({"module": "openai"}, ID, DEFAULTS)
    assert torch.reward == 0.0
    assert openai.metrics == {"before": 1.0}


RUN = """
    import asyncio, os, sys
    from tuner.tasks.functions import WorkflowOutput
    from tuner.rollouts.worker_pool import Pool

    async def workflow(task, model):
        return WorkflowOutput(reward=1.0)

    async def main():
        pool = Pool(2, workflow, None, "plain", 60.0)
        pool.start()
        try:
            await asyncio.wait([worker.ready for worker in pool._workers])
            print(*pool.pids, flush=True)
            await asyncio.Event().wait()
        finally:
            await pool.aclose()

    asyncio.run(main())
"""


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_run(how, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        workers = [psutil.Process(pid) for pid in pids]
        os.kill(run.pid, how)
        _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


@pytest.mark.usefixtures("real_workers")
async def test_a_pool_that_was_closed_leaves_no_descriptor(make_runner):
    process = psutil.Process()
    before, others = process.num_fds(), process.children()
    async with pool_of(2, functions.dying) as pool:
        runner = make_runner(functions.dying, workers=pool)
        await runner.run({}, ID, DEFAULTS)
        await runner.run({"dies": "exits"}, ID, DEFAULTS)
    await runner.gateway.aclose()
    assert process.num_fds() <= before
    assert {*process.children()} <= {*others}
