"""One sentence where one part takes most of the time, and none where nothing does."""

import pytest

from tuner.config.load import load_config
from tuner.runs.notices import advice

PARTS = ("generation", "agent", "judge")


def rows(*, queue=0.0, training=1.0, sync=0.0, count=3, micro_batches=1, **parts):
    waiting = {name: parts.get(name, 0.0) for name in PARTS}
    row = {
        **{f"time/{name}": seconds for name, seconds in waiting.items()},
        "time/idle": sum(waiting.values()),
        "time/training": training,
        "time/sync": sync,
        **{f"rollout_seconds/{name}": seconds for name, seconds in waiting.items()},
        "rollout_seconds/queue": queue,
        "train/micro_batches": micro_batches,
    }
    return [row] * count


@pytest.mark.parametrize(
    ("times", "part", "fix"),
    [
        ({"agent": 9.0}, "agent", "set synchronizer.sync_offset"),
        ({"judge": 9.0}, "judge", "or raise explorer.runner_per_model (now 8)"),
        ({"generation": 9.0}, "generation", "raise explorer.runner_per_model (now 8) and raise"),
        ({"training": 9.0, "micro_batches": 4}, "training", "max_token_len_per_gpu (now not set"),
        ({"sync": 9.0}, "sync", "buffer.batch_size"),
        ({"generation": 4.0, "queue": 30.0}, "queue", "explorer.runner_per_model (now 8)"),
    ],
)
def test_what_dominates_is_named_with_a_fix(times, part, fix):
    found, sentence = advice(rows(**times), load_config())
    assert found == part
    assert fix in sentence


def test_where_nothing_dominates_or_little_is_known_nothing_is_said():
    config = load_config()
    assert advice(rows(generation=1.0, agent=1.0, training=1.0), config) is None
    assert advice(rows(agent=9.0, count=2), config) is None
    assert advice([{"time/step": 1.0}] * 5, config) is None


SMALL = ["buffer.batch_size=6", "algorithm.repeat_times=8"]  # 48 rollouts in a step


@pytest.mark.parametrize("times", [{"generation": 9.0}, {"generation": 4.0, "queue": 30.0}])
def test_more_rollouts_at_a_time_than_a_step_has_are_not_advised(times):
    enough = load_config(overrides=[*SMALL, "explorer.runner_per_model=48"])
    assert advice(rows(**times), enough) is None
    _, sentence = advice(rows(agent=9.0), enough)
    assert "runner_per_model" not in sentence
    few = load_config(overrides=[*SMALL, "explorer.runner_per_model=47"])
    assert "raise explorer.runner_per_model (now 47)" in advice(rows(**times), few)[1]


def test_with_collection_ahead_the_rollouts_of_several_steps_may_run_at_once():
    ahead = [*SMALL, "explorer.runner_per_model=48", "synchronizer.sync_offset=1"]
    _, sentence = advice(rows(generation=9.0), load_config(overrides=ahead))
    assert "raise explorer.runner_per_model (now 48)" in sentence


def test_more_slots_are_advised_where_fewer_answers_than_rollouts_run_at_once():
    enough = [*SMALL, "explorer.runner_per_model=48"]
    few = load_config(overrides=[*enough, "tuner.max_slots=47"])
    assert "answers: raise tuner.max_slots (now 47) to" in advice(rows(generation=9.0), few)[1]
    assert (
        advice(rows(generation=9.0), load_config(overrides=[*enough, "tuner.max_slots=48"])) is None
    )


def test_where_rollouts_take_turns_no_more_of_them_are_advised():
    alone = load_config(overrides=["tuner.deterministic=true"])
    assert advice(rows(generation=9.0), alone) is None
    assert advice(rows(judge=9.0), alone) is None
    _, sentence = advice(rows(agent=9.0), alone)
    assert sentence.count("explorer.") == 1


def test_longer_micro_batches_are_advised_where_an_update_has_several():
    config = load_config(overrides=["trainer.max_token_len_per_gpu=2048"])
    assert advice(rows(training=9.0), config) is None
    _, sentence = advice(rows(training=9.0, micro_batches=3), config)
    assert "cut into 3 micro-batches: a larger trainer.max_token_len_per_gpu (now 2048)" in sentence


def test_with_collection_ahead_training_may_take_all_the_time():
    config = load_config(overrides=["synchronizer.sync_offset=2"])
    assert advice(rows(training=9.0, micro_batches=3), config) is None
    _, sentence = advice(rows(agent=9.0), config)
    assert "raise synchronizer.sync_offset (now 2)" in sentence
