"""What people and trackers get to see of a run."""

import io
import json
import os
import re
import sys
import types
from dataclasses import replace

import pytest
from rich.console import Console

from tests.builders import call, trace
from tuner.config import load_config
from tuner.errors import ConfigError, MissingDependencyError
from tuner.run.console import ConsoleMonitor
from tuner.run.monitors import JsonlMonitor, open_tracker
from tuner.run.record import RunRecord, open_directory
from tuner.traces import Outcome

METRICS = {
    "reward/mean": 0.5,
    "rollouts/timeout": 2,
    "eval/test/reward": 0.75,
    "eval/test/failed": 1,
    "calls/completion_tokens": 12.4,
    "tokens_per_second": 1000.0,
    "time/step": 30.0,
    "time/generation": 6.0,
    "time/agent": 1.0,
    "time/judge": 1.0,
    "time/training": 2.0,
}


def printed(total_steps, calls, *, terminal=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False)
    with ConsoleMonitor(total_steps, console) as monitor:
        for call in calls:
            call(monitor)
    return out.getvalue()


def test_a_step_is_one_plain_line_where_there_is_no_terminal():
    text = printed(
        5,
        [
            lambda m: m.begin("step 1", 4, step=1),
            lambda m: m.rollout_done(),
            lambda m: m.log(1, METRICS),
        ],
    )
    assert text.count("\n") == 1
    for part in (
        "step 1/5",
        "reward 0.500",
        "test 0.750",
        "test: 1 failed",
        "12 tokens/call",
        "1000 tokens/s",
        "generation 60%, agent 10%, judge 10%, training 20%",
        "2 timeout",
        "2 min 00 s left",
    ):
        assert part in text
    assert "\x1b" not in text


def test_a_terminal_shows_rollouts_and_time_left():
    text = printed(
        5,
        [
            lambda m: m.begin("step 1", 4, step=1),
            lambda m: m.log(1, METRICS),
            lambda m: m.begin("step 2", 4, step=2),
            lambda m: m.rollout_done(),
        ],
        terminal=True,
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "step 2" in plain
    assert "1/4" in plain
    assert "left" in plain


def test_the_best_the_worst_and_one_between_are_shown_shortened():
    def rollout(n, reward, *responses):
        calls = [replace(call(f"{n}", [1], [2], [-1.0]), response=said) for said in responses]
        return trace(n, 0, calls, reward=reward)

    add = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    traces = [
        rollout(0, 0.5, {"content": "between\nlines"}),
        rollout(1, 0.0, *[{"content": f"call {n}"} for n in range(6)]),
        rollout(2, 1.0, {"content": None, "tool_calls": [add]}, {"content": "x" * 500}),
        rollout(3, 0.25, {"content": "in the middle"}),
        trace(4, 0, [], outcome=Outcome.TIMEOUT, error="late"),
    ]
    assert printed(5, [lambda m: m.samples(traces)]).splitlines() == [
        "reward 1  task 2",
        '    add({"a": 1})',
        f"    {'x' * 107}...",
        "reward 0.25  task 3",
        "    in the middle",
        "reward 0  task 1",
        *(f"    call {n}" for n in range(4)),
        "    ... 2 more calls",
    ]
    assert printed(5, [lambda m: m.samples(traces[-1:])]) == ""


def test_evaluation_before_training_is_the_start_line():
    assert printed(5, [lambda m: m.log(0, {"eval/test/reward": 0.25, "time/step": 1.0})]) == (
        "start  test 0.250\n"
    )
    repeated = {"eval/test/reward": 0.25, "eval/test/pass_at_4": 0.5, "time/step": 1.0}
    assert printed(5, [lambda m: m.log(0, repeated)]) == "start  test 0.250  test pass_at_4 0.500\n"


def test_jsonl_starts_again_from_the_rows_of_the_interrupted_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    monitor = JsonlMonitor(path, [{"step": 1}])
    monitor.log(2, {"loss": 0.1})
    monitor.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2, "loss": 0.1},
    ]


def test_tensorboard_holds_every_metric_once_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of this number's digits: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def tracker(first_step):
        return open_tracker(
            "tensorboard",
            project="p",
            name="n",
            folder=tmp_path,
            first_step=first_step,
            config={},
            args={},
        )

    for first_step, values in ((0, {1: 0.1, 2: 0.2, 3: 0.3}), (2, {2: 0.25})):
        monitor = tracker(first_step)
        for step, value in values.items():
            monitor.log(step, {"train/loss": value})
        monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {e.step: round(e.value, 3) for e in events.Scalars("train/loss")}
    assert scalars == {1: 0.1, 2: 0.25}


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "swanlab"])
def test_missing_tracker_names_its_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, kind, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{kind}\]"):
        open_tracker(kind, project="p", name="n", folder=tmp_path, first_step=0, config={}, args={})


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_argument_that_a_tracker_does_not_take_is_refused_by_name(kind, tmp_path):
    with pytest.raises(ConfigError, match="entity"):
        open_tracker(
            kind,
            project="p",
            name="n",
            folder=tmp_path,
            first_step=0,
            config={},
            args={"entity": "me"},
        )


def test_trackers_get_their_password_and_are_sent_none(tmp_path, monkeypatch):
    sent = []
    library = types.SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda run_name: None,
        log_dict=lambda config, file: sent.append(config),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "")
    config = load_config(
        settings={"checkpoint_root_dir": str(tmp_path)},
        overrides=["monitor.monitor_type=mlflow", "monitor.monitor_args.password=hunter2"],
    )
    with open_directory(config, {}) as directory:
        record = RunRecord(config, directory, 1)
        record.open([])
        record.close()
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "hunter2"
    assert sent[0]["monitor"]["monitor_type"] == ["mlflow"]
    assert "hunter2" not in json.dumps(sent)
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and "hunter2" in file.read_text()
    ]
