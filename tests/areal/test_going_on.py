"""A loop that was killed goes on; the data loader's state."""

import json

import pytest
import torch

from tests.areal.loop import ROWS, Random, step
from tuner.areal import StatefulDataLoader
from tuner.errors import DatasetError


@pytest.mark.long
def test_a_killed_loop_goes_on_with_the_same_rows_and_weights(make_loop, tmp_path):
    def states(rollout, loader):
        return json.dumps({"rollout": rollout.state_dict(), "loader": loader.state_dict()})

    def rows(batch):
        return [trace.task["n"] for trace in batch.traces if trace.id.rollout == 0]

    actor, rollout = make_loop(staleness=1)
    loader = StatefulDataLoader(ROWS, 2, shuffle=True)
    step(actor, rollout.prepare_batch(loader, Random(), group_size=2))
    actor.save(tmp_path / "checkpoint")
    saved = states(rollout, loader)
    wanted = sorted(n for _ in range(2) for n in rows(_stepped(actor, rollout, loader)))
    rollout.destroy()

    actor, rollout = make_loop(staleness=1)
    actor.load(tmp_path / "checkpoint")
    loader = StatefulDataLoader(ROWS, 2, shuffle=True)
    state = json.loads(saved)
    rollout.load_state_dict(state["rollout"])
    loader.load_state_dict(state["loader"])
    assert actor.get_version() == rollout.get_version() == 1
    found = sorted(n for _ in range(2) for n in rows(_stepped(actor, rollout, loader)))
    assert found == wanted
    rollout.destroy()


def _stepped(actor, rollout, loader):
    batch = rollout.prepare_batch(loader, Random(), group_size=2)
    assert len(rollout._ahead) == 2  # one batch ahead, also after going on
    step(actor, batch)
    return batch


def test_the_data_loader_goes_on_where_it_was():
    loader = StatefulDataLoader(range(7), 2, shuffle=True)
    first = [*loader, *loader]
    assert [len(batch) for batch in first] == [2] * 6
    assert first[:3] != first[3:]
    other = StatefulDataLoader(range(7), 2, shuffle=True)
    iterator = iter(other)
    assert [next(iterator), next(iterator)] == first[:2]
    resumed = StatefulDataLoader(range(7), 2, shuffle=True)
    resumed.load_state_dict(other.state_dict())
    assert [*resumed, *resumed] == first[2:]
    assert [len(batch) for batch in StatefulDataLoader(range(7), 2, drop_last=False)] == [
        2,
        2,
        2,
        1,
    ]
    with pytest.raises(DatasetError, match="has 1 rows and batch_size is 2"):
        StatefulDataLoader([1], 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "tuner",
    [
        {"model": {"lora_configs": [{"lora_rank": 2}]}},
        {"algorithm": {"algorithm_type": "ppo"}, "tuner": {"critic": {"lr": 0.01}}},
    ],
    ids=["adapter", "critic"],
)
def test_adapter_and_critic_go_on_too(make_loop, tmp_path, tuner):
    def next_batch(actor, rollout):
        batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        return {key: batch[key] for key in ("prox_logp", "values") if key in batch}

    actor, rollout = make_loop(tuner=tuner)
    step(actor, rollout.rollout_batch(ROWS[:2], Random(), group_size=3))
    actor.save(tmp_path / "checkpoint")
    state, wanted = rollout.state_dict(), next_batch(actor, rollout)

    actor, rollout = make_loop(tuner=tuner)
    actor.load(tmp_path / "checkpoint")
    rollout.load_state_dict(state)
    found = next_batch(actor, rollout)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert values.any()
        torch.testing.assert_close(found[key], values, atol=1e-6, rtol=0)
