"""A run that is interrupted ends, whatever its agents make of it."""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

from tests import forked
from tests.loop import runs
from tuner.loop import run_local
from tuner.rollout import limits
from tuner.tune import leave_report


async def stubborn(task, model, *, asked):
    while True:
        with contextlib.suppress(BaseException):
            await runs.ask(model, "hi")
        asked.touch()


def run(model, root, asked):
    # What a shell starts in the background ignores it, and so would this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limits.GRACE = 0.1
    run_local(
        runs.config(model, root, "explorer.eval_interval=0"),
        workflow=partial(stubborn, asked=Path(asked)),
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={},
        report=leave_report,
    )


def test_one_interrupt_ends_a_run_whose_agents_catch_everything(random_model_path, tmp_path):
    asked = tmp_path / "asked"
    process = forked.begin(run, random_model_path, tmp_path, asked)
    while not asked.exists():
        assert process.exitcode is None
        process.join(timeout=0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 1  # as Python ends with a KeyboardInterrupt
    assert not list(tmp_path.rglob(".owner"))
