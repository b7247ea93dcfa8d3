"""A real run leaves its report; a report that cannot be written does not fail the run."""

import logging

from tests.backends import runs
from tests.viewer.stored import read_data
from tuner.backends.local import run_local


def run(model, root):
    return run_local(
        runs.config(model, root, "tuner.deterministic=false", "buffer.total_steps=2"),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


def test_a_finished_run_has_its_report(random_model_path, tmp_path):
    result = run(random_model_path, tmp_path)
    data = read_data((result.run_dir / "report.html").read_text(encoding="utf-8"))
    assert data["run"]["status"] == "completed"
    assert data["run"]["total_steps"] == 2
    assert [row["step"] for row in data["metrics"]] == [0, 1, 2]
    assert {row["split"] for row in data["traces"]} == {"train", "held-out"}
    assert len(data["traces"]) == data["total_traces"] == 2 * 6 + 2 * 2
    assert all(body["no_text"] is None for body in data["bodies"].values())


def test_a_report_that_cannot_be_written_is_said_and_the_run_completes(
    random_model_path, tmp_path, monkeypatch, caplog
):
    def full(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("tuner.viewer.write_report", full)
    with caplog.at_level(logging.WARNING, logger="tuner"):
        result = run(random_model_path, tmp_path)
    assert result.status == "completed"
    assert "report.html was not written: OSError: no space left on device" in caplog.text
