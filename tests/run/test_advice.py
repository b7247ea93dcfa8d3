"""One sentence where one part takes most of the time, and none where nothing does."""

import pytest

from tuner.config.load import load_config
from tuner.run.record import advice

PARTS = ("generation", "agent", "judge")


def rows(*, queue=0.0, training=1.0, sync=0.0, count=3, **parts):
    waiting = {name: parts.get(name, 0.0) for name in PARTS}
    row = {
        **{f"time/{name}": seconds for name, seconds in waiting.items()},
        "time/idle": sum(waiting.values()),
        "time/training": training,
        "time/sync": sync,
        **{f"rollout_seconds/{name}": seconds for name, seconds in waiting.items()},
        "rollout_seconds/queue": queue,
    }
    return [row] * count


@pytest.mark.parametrize(
    ("times", "part", "mend"),
    [
        ({"agent": 9.0}, "agent", "set synchronizer.sync_offset"),
        ({"judge": 9.0}, "judge", "judge"),
        ({"generation": 9.0}, "generation", "tuner.max_slots (now 64)"),
        ({"generation": 0.1, "training": 9.0}, "training", "max_token_len_per_gpu"),
        ({"sync": 9.0}, "sync", "buffer.batch_size"),
        ({"generation": 4.0, "queue": 30.0}, "queue", "explorer.runner_per_model (now 8)"),
    ],
)
def test_what_dominates_is_named_with_a_mend(times, part, mend):
    found, sentence = advice(rows(**times), load_config())
    assert found == part
    assert mend in sentence


def test_where_nothing_dominates_or_little_is_known_nothing_is_said():
    config = load_config()
    assert advice(rows(generation=1.0, agent=1.0, training=1.0), config) is None
    assert advice(rows(agent=9.0, count=2), config) is None
    assert advice([{"time/step": 1.0}] * 5, config) is None


def test_with_collection_ahead_training_may_take_all_the_time():
    config = load_config(overrides=["synchronizer.sync_offset=2"])
    assert advice(rows(training=9.0), config) is None
    _, sentence = advice(rows(agent=9.0), config)
    assert "raise synchronizer.sync_offset (now 2)" in sentence
