"""What trackers are given, and what they are not; the libraries themselves: tests/integration."""

import json
import os
import re
import sys
import types

import pytest

from tests.kit.builders import call, trace
from tuner.config import load_config
from tuner.errors import ConfigError, MissingDependencyError
from tuner.runs.record import RunRecord, open_directory
from tuner.runs.trackers import Tracker, open_trackers
from tuner.traces import Outcome


def opened(kinds, folder, *, first_step=0, **args):
    return open_trackers(
        kinds, project="p", folder=folder, first_step=first_step, config={}, args=args
    )


def test_tensorboard_holds_every_metric_once_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of this number's digits: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    for first_step, values in ((0, {1: 0.1, 2: 0.2, 3: 0.3}), (2, {2: 0.25})):
        (tracker,) = opened(["tensorboard"], tmp_path, first_step=first_step)
        for step, value in values.items():
            tracker.log_step({"train/loss": value}, step)
        tracker.end(True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {e.step: round(e.value, 3) for e in events.Scalars("train/loss")}
    assert scalars == {1: 0.1, 2: 0.25}


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "swanlab"])
def test_missing_tracker_names_its_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{kind}\]"):
        opened([kind], tmp_path)


@pytest.mark.parametrize(
    ("kinds", "args", "said"),
    [
        (["tensorboard"], {"entity": "me"}, "tensorboard takes no entity (it takes samples)"),
        (["mlflow"], {"entity": "me"}, "it takes password, samples, uri, username)"),
        (["tensorboard", "mlflow"], {"uri": "x"}, "put it below the tracker it is for"),
        (["tensorboard"], {"wandb": {"mode": "offline"}}, "monitor_type has no wandb"),
        (["tensorboard"], {"tensorboard": 3}, "3 is not a set of arguments"),
        (["tensorboard"], {"samples": -1}, "samples is -1"),
    ],
)
def test_arguments_that_no_tracker_takes_are_refused_by_name(kinds, args, said, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        opened(kinds, tmp_path, **args)


def test_a_table_has_the_first_traces_in_their_order_and_long_texts_without_their_middle(tmp_path):
    tables = []
    tracker = Tracker(print, lambda *table: tables.append(table), print, samples=2)
    long = trace(0, 1, [call("a", [1], [2], [-0.5])], reward=1.0, response="a" * 3000 + "b" * 3000)
    failed = trace(0, 0, [], outcome=Outcome.WORKFLOW_ERROR)
    replaced = trace(0, 0, [], outcome=Outcome.WORKFLOW_ERROR, final=False)
    tracker.show(1, "train", [trace(1, 0, []), long, replaced, failed])
    tracker.show(2, "train", [])
    tracker.samples = 0
    tracker.show(3, "train", [long])
    ((name, rows, step),) = tables
    assert (name, step) == ("samples/train", 1)
    assert [row["rollout"] for row in rows] == ["train-1-0-0", "train-1-0-1"]
    assert [(row["reward"], row["outcome"]) for row in rows] == [
        (None, "workflow_error"),
        (1.0, "completed"),
    ]
    assert rows[1]["response"] == "a" * 2000 + " [...] " + "b" * 2000
    assert rows[1]["last_call"] == "user: hi\n\nassistant: ho"


def test_trackers_get_their_password_and_are_sent_none(tmp_path, monkeypatch):
    sent = []
    library = types.SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda **_: types.SimpleNamespace(info=types.SimpleNamespace(run_id="1")),
        log_dict=lambda config, file: sent.append(config),
        end_run=lambda status: None,
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
