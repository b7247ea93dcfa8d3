"""One sentence at the end of a run where one part took most of the time, and none otherwise."""

import pytest

from tuner.config.load import load_config
from tuner.runs.notices import advice

PARTS = ("generation", "agent", "judge")


def rows(*, queue=0.0, count=11, step=20.0, **parts):
    waiting = {name: parts.get(name, 0.0) for name in PARTS}
    row = {
        **{f"time/{name}": seconds for name, seconds in waiting.items()},
        "time/idle": sum(waiting.values()),
        "time/training": 1.0,
        "time/step": step,
        **{f"rollout_seconds/{name}": seconds for name, seconds in waiting.items()},
        "rollout_seconds/queue": queue,
    }
    return [row] * count


@pytest.mark.parametrize(
    ("times", "part", "fix"),
    [
        ({"agent": 15.0}, "75% of the time is the agents' own", "set synchronizer.sync_offset"),
        ({"judge": 15.0}, "is the judge", "or raise explorer.runner_per_model (now 8)"),
        ({"generation": 15.0}, "is generation", "raise explorer.runner_per_model (now 8) to 64"),
        ({"agent": 15.0, "queue": 30.0}, "wait 30.0 s", "explorer.runner_per_model (now 8)"),
    ],
)
def test_what_dominates_is_named_with_a_fix(times, part, fix):
    sentence = advice(rows(**times), load_config(overrides=["explorer.runner_per_model=8"]))
    assert part in sentence
    assert fix in sentence


@pytest.mark.parametrize(
    "history",
    [
        rows(generation=5.0, agent=5.0),  # nothing dominates
        rows(generation=15.0, count=10),  # few steps
        rows(generation=1.5, step=2.0),  # a short run
        [{"time/training": 1.0, "time/step": 20.0}] * 20,  # recorded rollouts
        rows(generation=5.0),  # the rest is evaluation
    ],
)
def test_short_and_replayed_runs_get_no_advice(history):
    assert advice(history, load_config()) is None


SMALL = ["buffer.batch_size=6", "algorithm.repeat_times=8"]  # 48 rollouts in a step


def test_more_rollouts_at_a_time_than_a_step_has_are_not_advised():
    enough = load_config(overrides=[*SMALL, "explorer.runner_per_model=48"])
    assert advice(rows(generation=15.0), enough) is None
    assert "runner_per_model" not in advice(rows(agent=15.0, queue=30.0), enough)
    few = load_config(overrides=[*SMALL, "explorer.runner_per_model=47"])
    assert "raise explorer.runner_per_model (now 47) to 48" in advice(rows(generation=15.0), few)


def test_no_more_answers_at_a_time_are_advised_than_were_measured():
    many = ["buffer.batch_size=60", "explorer.runner_per_model=64"]
    assert advice(rows(generation=15.0), load_config(overrides=many)) is None
    few = load_config(overrides=["buffer.batch_size=60", "explorer.runner_per_model=63"])
    assert "(now 63) to 64" in advice(rows(generation=15.0), few)


def test_more_slots_are_advised_where_fewer_answers_than_rollouts_run_at_once():
    few = load_config(
        overrides=[*SMALL, "explorer.runner_per_model=48", "tuner.max_slots=47"],
    )
    assert "raise tuner.max_slots (now 47) to 48" in advice(rows(generation=15.0), few)


def test_with_collection_ahead_more_is_advised_as_far_as_it_was_measured():
    ahead = [*SMALL, "explorer.runner_per_model=999"]
    some = load_config(overrides=[*ahead, "synchronizer.sync_offset=2"])
    assert "raise synchronizer.sync_offset (now 2)" in advice(rows(agent=15.0), some)
    most = load_config(overrides=[*ahead, "synchronizer.sync_offset=4"])
    assert advice(rows(agent=15.0), most) is None


def test_a_deterministic_run_is_not_advised_to_collect_ahead():
    bits = load_config(overrides=["tuner.deterministic=true", "explorer.runner_per_model=999"])
    said = [advice(rows(**{part: 15.0}), bits) for part in PARTS]
    assert not any("sync_offset" in one for one in said if one)
