"""A run that is interrupted ends, whatever its agents make of it."""

import asyncio
import contextlib
import os
import signal
import traceback
from functools import partial
from pathlib import Path

import pytest

import tuner
from tests.kit import forked, runs
from tuner import AlgorithmConfig, TunerModelConfig, WorkflowOutput, tune
from tuner.loop import run_local
from tuner.rollouts import limits
from tuner.tune import leave_report

TUNER = str(Path(tuner.__file__).parent)


async def stubborn(task, model, *, asked):
    while True:
        with contextlib.suppress(BaseException):
            await runs.answer(model, "hi")
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


def interrupt(process, asked):
    """Once its agents have asked; returns when it has ended."""
    while not asked.exists():
        assert process.exitcode is None
        process.join(timeout=0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join()


@pytest.mark.long
def test_one_interrupt_ends_a_run_whose_agents_catch_everything(random_model_path, tmp_path):
    asked = tmp_path / "asked"
    process = forked.begin(run, random_model_path, tmp_path, asked)
    interrupt(process, asked)
    assert process.exitcode == 1  # as Python ends with a KeyboardInterrupt
    assert not list(tmp_path.rglob(".owner"))


def interrupted_in_a_notebook(model, root, asked):
    """As ipykernel runs a cell: in an event loop of the main thread that knows no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def cell():
        tune(
            partial(asking, asked=Path(asked)),
            runs.judge,
            runs.TRAIN,
            model=TunerModelConfig(model_path=str(model), max_model_len=200),
            algorithm=AlgorithmConfig(batch_size=2, group_size=2),
            overrides=[f"checkpoint_root_dir={root}", "buffer.total_steps=1000"],
        )

    try:
        asyncio.new_event_loop().run_until_complete(cell())
    except KeyboardInterrupt as interruption:
        interrupted, kept, command = str(interruption).splitlines()
        assert interrupted.startswith("interrupted after step ")
        assert kept.startswith(f"kept in {root}")
        assert kept.endswith((": nothing", "the rollouts of step 1, which are not sampled again"))
        # Its name has the time in it, so that the same cell would begin another run.
        assert command.startswith("to continue: ")
        assert f"overrides=['name={report_of(root).parent.name}']" in command
        frames = traceback.extract_tb(interruption.__traceback__)
        assert not [frame for frame in frames if frame.filename.startswith(TUNER)]
        assert "interrupted" in report_of(root).read_text(encoding="utf-8")
        assert not list(root.rglob(".owner"))
        (root / "ended").touch()


def report_of(root):
    (report,) = root.rglob("report.html")
    return report


async def asking(task, model, *, asked):
    await runs.answer(model, task["question"])
    asked.touch()
    return WorkflowOutput(response="r")


def test_an_interrupt_ends_a_run_in_a_notebook_with_its_record(random_model_path, tmp_path):
    asked = tmp_path / "asked"
    process = forked.begin(interrupted_in_a_notebook, random_model_path, tmp_path, asked)
    interrupt(process, asked)
    assert (process.exitcode, (tmp_path / "ended").exists()) == (0, True)
