"""`prepare_batch`: what is begun ahead of time, how old it may be, when it gives up."""

import pytest
import torch

from tests.areal.loop import ROWS, Random, step
from tuner.areal import StatefulDataLoader
from tuner.errors import TrainingError
from tuner.rollouts.groups import admissible


@pytest.mark.parametrize(
    ("numbers", "allowed"),
    [
        ({}, 4),
        ({"running": 3}, 1),
        ({"accepted": 4}, 0),
        ({"accepted": 4, "version": 1}, 4),
        ({"staleness": 2}, 10),
        ({"staleness": 2, "running": 1, "accepted": 5}, 6),
        ({"staleness": 9, "max_running": 7, "running": 5}, 2),
        ({"accepted": 9}, 0),
    ],
)
def test_admission_is_bounded_by_staleness_and_room(numbers, allowed):
    given = {"max_running": 10, "running": 0, "accepted": 0, "batch": 4}
    assert admissible(**{**given, "version": 0, "staleness": 0, **numbers}) == allowed


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_sample_is_older_than_it_may_be_and_batches_are_begun_ahead(make_loop, staleness):
    actor, rollout = make_loop(staleness)
    workflow, loader = Random(), StatefulDataLoader(ROWS, 2, shuffle=True)
    oldest, begun = [], []
    for _ in range(4):
        batch = rollout.prepare_batch(loader, workflow, group_size=2)
        assert len(set(batch["group_ids"].tolist())) == 2
        begun.append(len(rollout._ahead))
        versions = batch["versions"][batch["loss_mask"].bool()]
        oldest.append(actor.get_version() - int(versions.min()))
        metrics = step(actor, batch)
        assert metrics["tokens/sampled"] == metrics["tokens/trained"]
    assert max(oldest) <= staleness
    assert begun == [2 * staleness] * 4
    rollout.destroy()


def test_a_batch_that_may_not_be_begun_says_why(make_loop):
    _, rollout = make_loop()
    loader = StatefulDataLoader(ROWS, 2)
    rollout.prepare_batch(loader, Random(), group_size=2)
    with pytest.raises(TrainingError, match=r"no group may be started: .* max_head_offpolicyness"):
        rollout.prepare_batch(loader, Random(), group_size=2)


def test_groups_that_are_left_out_are_replaced_and_counted(make_loop):
    _, rollout = make_loop()
    loader = StatefulDataLoader(ROWS, 2)

    class Odd(Random):
        async def arun_episode(self, engine, data):
            tensors = await super().arun_episode(engine, data)
            return tensors if data["n"] % 2 else None

    batch = rollout.prepare_batch(loader, Odd(), group_size=2)
    assert len(set(batch["group_ids"].tolist())) == 2
    assert batch.account.outcomes["rejected"] >= 2
    dropped = batch.account.dropped["rejected"]
    assert batch.account.sampled == int(batch["loss_mask"].sum()) + dropped


def test_an_agent_that_always_fails_stops_the_loop_with_its_error(make_loop):
    _, rollout = make_loop()

    class Broken:
        async def arun_episode(self, engine, data):
            raise KeyError("answer")

    with pytest.raises(TrainingError, match=r"12 workflow_error; the last error: .*KeyError"):
        rollout.prepare_batch(StatefulDataLoader(ROWS, 2), Broken(), group_size=2)
    with pytest.raises(TrainingError, match="no trajectory is left to train"):
        rollout.rollout_batch(ROWS[:2], Broken(), group_size=2)


def test_what_runs_ahead_goes_on_while_an_update_is_made(make_loop):
    actor, rollout = make_loop(staleness=1)
    loader = StatefulDataLoader(ROWS, 2)
    batch = rollout.prepare_batch(loader, Random(), group_size=2)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    # Nobody was told of the new weights yet: the engine goes on with those that it has.
    between = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    assert {v for t in between.traces for c in t.calls for v in c.versions} == {0}
    actor.update_weights()
    after = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    assert {v for t in after.traces for c in t.calls for v in c.versions} == {1}
    after.pop("prox_logp", None)
    logp = actor.compute_logp(after)
    mask = after["loss_mask"].bool()
    assert torch.allclose(logp[mask], after["logprobs"][mask].to(logp), atol=1e-4)
