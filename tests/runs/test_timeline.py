"""The timeline is a trace that Perfetto reads, whole after a kill, with what happened when."""

import json
from dataclasses import replace

import pytest

from tests.kit.builders import call, trace
from tuner.runs.timeline import Timeline


def events(path):
    """As readers of Chrome's array format do: the closing bracket may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def answer(started, seconds):
    made = call("c", [1, 2], [3, 4], [-1.0, -1.0])
    object.__setattr__(made, "started", started)
    object.__setattr__(made, "seconds", seconds)
    return made


def rollout(number, started, workflow, calls=(), judge=0.0):
    seconds = {"workflow": workflow, "judge": judge, "queue": 0.25}
    return trace(0, number, calls, reward=1.0, started=started, seconds=seconds)


def test_a_rollout_has_its_answers_and_its_judge_inside_it(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    # Two answers at the same time are one stretch, the third is another.
    calls = [answer(101.0, 2.0), answer(102.0, 2.0), answer(106.0, 1.0)]
    timeline.rollout(rollout(0, 100.0, 8.0, calls, judge=1.5))
    timeline.close()
    spans = [event for event in events(tmp_path / "t.json") if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("train-1-0-0", 100_000_000, 9_500_000),
        ("generation", 101_000_000, 3_000_000),
        ("generation", 106_000_000, 1_000_000),
        ("judge", 108_000_000, 1_500_000),
    ]
    assert spans[0]["args"] == {"outcome": "completed", "reward": 1.0, "queue": 0.25, "attempt": 1}
    assert spans[1]["args"] == {"calls": 2, "tokens": 4, "versions": [0]}
    assert len({(e["pid"], e["tid"]) for e in spans}) == 1


def test_an_answer_that_was_given_back_adds_no_tokens(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    timeline.rollout(rollout(0, 100.0, 8.0, [replace(answer(101.0, 2.0), replayed=2)]))
    timeline.close()
    (given,) = [event for event in events(tmp_path / "t.json") if event["name"] == "generation"]
    assert given["args"]["tokens"] == 0


def test_rollouts_at_the_same_time_are_in_different_rows(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    # As they end: the second began before the first was over, the third after it.
    for number, (started, seconds) in enumerate([(10, 5), (12, 6), (15.5, 4)]):
        timeline.rollout(rollout(number, started, seconds))
    timeline.close()
    spans = [event for event in events(tmp_path / "t.json") if event["ph"] == "X"]
    assert [event["tid"] for event in spans] == [0, 1, 0]


def test_a_killed_run_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "t.json"
    first = Timeline(path)
    with first.span("training", version=1):
        pass
    first.close()
    with path.open("a") as file:
        file.write('{"ph": "X", "na')  # killed while it wrote
    second = Timeline(path)
    with pytest.raises(KeyError), second.span("weights", version=1):
        raise KeyError
    second.close()
    assert [e["name"] for e in events(path) if e["ph"] == "X"] == ["training", "weights"]
    assert sum(e["ph"] == "M" for e in events(path)) == 2


def test_nothing_is_opened_before_there_is_something_to_write(tmp_path):
    Timeline(tmp_path / "t.json").close()
    assert not (tmp_path / "t.json").exists()
