"""A run leaves its report however it ends; one that cannot be written does not fail the run."""

import importlib
import logging
import signal
import sys

import pytest

from tests.kit import runs
from tests.tools.viewer.stored import read_data
from tuner import cli
from tuner.errors import ModelLoadError, TrainingError
from tuner.loop import run_local
from tuner.tasks.functions import JudgeOutput
from tuner.tune import leave_report


def run(model, root, *overrides, workflow=runs.workflow, judge=runs.judge):
    base = ["tuner.deterministic=false", "buffer.total_steps=2"]
    return run_local(
        runs.config(model, root, *base, *overrides),
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
        report=leave_report,
    )


def test_a_finished_run_has_its_report(random_model_path, tmp_path):
    result = run(random_model_path, tmp_path)
    data = read_data((result.run_dir / "report.html").read_text(encoding="utf-8"))
    assert data["run"]["status"] == "completed"
    assert data["run"]["total_steps"] == 2
    assert [row["step"] for row in data["metrics"]] == [0, 1, 2]
    parts = ("generation", "agent", "judge", "training", "sync", "evaluation")
    before, *steps = data["metrics"]
    for row in steps:  # one definition for the page, `tuner compare` and the console
        whole = sum(row.get(f"time/{part}", 0.0) for part in parts)
        assert row["time/step"] == pytest.approx(whole, rel=0.02, abs=0.01)
    assert before["time/evaluation"] > 0
    assert "time/step" not in before
    assert {row["split"] for row in data["traces"]} == {"train", "held-out"}
    assert len(data["traces"]) == data["total_traces"] == 2 * 6 + 2 * 2
    assert all(body["no_text"] is None for body in data["bodies"].values())


def test_a_report_that_cannot_be_written_is_said_and_the_run_completes(
    random_model_path, tmp_path, monkeypatch, caplog
):
    def full(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("tuner.tools.viewer.write_report", full)
    with caplog.at_level(logging.WARNING, logger="tuner"):
        result = run(random_model_path, tmp_path)
    assert result.status == "completed"
    assert "report.html was not written: OSError: no space left on device" in caplog.text


def report_named_by(error):
    (note,) = error.__notes__
    path = note.removeprefix("what the run did until then: ")
    return read_data(open(path, encoding="utf-8").read())


def test_a_run_that_fails_leaves_its_report_with_the_reason(random_model_path, tmp_path):
    async def judge(task, response):
        return JudgeOutput(reward=1.0)

    with pytest.raises(TrainingError) as failed:
        run(random_model_path, tmp_path, "tuner.signal_patience=1", judge=judge)
    data = report_named_by(failed.value)
    assert data["run"]["status"] == "stopped"
    assert data["stopped"] == f"TrainingError: {failed.value}"
    assert [row["step"] for row in data["metrics"]] == [0, 1]
    assert data["total_traces"] == 2 + 6


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_run_leaves_its_report(random_model_path, tmp_path):
    pressed = []

    async def workflow(task, model):
        if task["question"].startswith("train") and not pressed:
            pressed.append(task)
            signal.raise_signal(signal.SIGINT)
        return await runs.workflow(task, model)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        run(random_model_path, tmp_path, workflow=workflow)
    data = report_named_by(interrupted.value)
    assert data["stopped"] == "interrupted"
    assert [row["split"] for row in data["traces"]] == ["held-out"] * 2


def test_a_run_that_did_not_begin_leaves_no_report(tmp_path):
    with pytest.raises(ModelLoadError) as failed:
        run(tmp_path / "nothing", tmp_path)
    assert not hasattr(failed.value, "__notes__")
    assert not list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize(("kind", "code"), [(TrainingError, 1), (KeyboardInterrupt, 130)])
def test_the_command_says_where_the_report_is(tmp_path, monkeypatch, capsys, kind, code):
    def tune(*_args, **_options):
        error = kind("no signal")
        error.add_note("what the run did until then: p/run/report.html")
        raise error

    (tmp_path / "config.yaml").write_text("tuner: {workflow: 'json:dumps'}\n")
    monkeypatch.setattr(importlib.import_module("tuner.tune"), "tune", tune)
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(tmp_path / "config.yaml")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == code
    assert capsys.readouterr().err.endswith("what the run did until then: p/run/report.html\n")
